"""One workload through every stage, and through `transformers`: `python -m reports.staircase`.

The requests are all there at the start, with prompts and answers of different lengths. Each stage
works through them in a process of its own, as its user would have to: one after another if it takes
one prompt, as many together as fit into the same memory if it takes several, and the server over
HTTP. The processes take turns for nine rounds, and every token is proved.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any

import aiohttp
import torch

from shared import catalog, charts, cli, kit, models, registry
from shared.catalog import EMBEDDED
from shared.kit import Results, Row, Subject
from shared.parity import random_prompt
from shared.peers import transformers_batch, transformers_model
from shared.server import MODULE, own_server

NAME, ROUNDS = "staircase", 9
ENGINES = ("forward", "kv_cache", "batching", "continuous", "paged", "kernels")
ONE_BY_ONE, BATCH = "transformers, one by one", "transformers, one batch"
ORDER = (*ENGINES, MODULE, ONE_BY_ONE, BATCH)
REQUESTS, PROMPTS, ANSWERS = 12, (8, 64), (8, 24)  # tokens
CONTEXTS = 8  # memory for keys and values, where a stage takes several sequences
Lists = list[list[int]]


def workload(model: str) -> tuple[Lists, list[int]]:
    """Prompts (token ids), and how many tokens each answer has."""
    rng, config = random.Random(NAME), catalog.presets()[model]
    prompts = [random_prompt(rng.randint(*PROMPTS), config, number) for number in range(REQUESTS)]
    return prompts, [rng.randint(*ANSWERS) for _ in prompts]


# ---- in a process of its own --------------------------------------------------------------------

answer: Callable[[Lists, list[int]], Lists]


def begin(variant: str, model: str, threads: int) -> None:
    """Load what answers, and answer something: libraries choose their kernels at the first call."""
    global answer
    torch.set_num_threads(threads)
    if variant in ENGINES:
        plain = variant == "forward"  # its layers are those that the lesson shows
        subject = Subject(model, "float32", plain=plain)
        engine = registry.load(registry.ENGINES[variant])(subject.model, CONTEXTS)
        subject.shape.tensors.clear()

        def answer(prompts: Lists, counts: list[int]) -> Lists:
            outputs = engine.generate(prompts, [kit.greedy(count) for count in counts])
            return [output.token_ids for output in outputs]
    else:
        shape = models.load(model, random_weights=model not in EMBEDDED)
        its = transformers_model(shape, torch.float32)

        def answer(prompts: Lists, counts: list[int]) -> Lists:
            if variant == ONE_BY_ONE:
                pairs = zip(prompts, counts, strict=True)
                return [transformers_batch(its, [ids], count)[0] for ids, count in pairs]
            every = transformers_batch(its, prompts, max(counts))  # all as long as the longest
            return [ids[:count] for ids, count in zip(every, counts, strict=True)]

    answer([[1, 2, 3]] * 2, [2, 2])


def run(prompts: Lists, counts: list[int]) -> dict[str, Any]:
    seconds, ids = kit.measure.timed(partial(answer, prompts, counts))
    return {"seconds": seconds, "ids": ids, "bytes": kit.peak_so_far(os.getpid())}


async def ask_all(url: str, prompts: Lists, counts: list[int], **more: Any) -> dict[str, Any]:
    """All answers of one of our servers; more: fields of the requests."""

    async def ask(prompt: list[int], count: int) -> list[int]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
        async with session.post(f"{url}/v1/completions", json=body | more) as response:
            ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return ids

    patient: Any = {"timeout": aiohttp.ClientTimeout(total=None), "raise_for_status": True}
    async with aiohttp.ClientSession(**patient) as session:
        started = time.perf_counter()
        ids = await asyncio.gather(*map(ask, prompts, counts))
        return {"seconds": time.perf_counter() - started, "ids": list(ids)}


# ---- rounds -------------------------------------------------------------------------------------


def measure(bench: kit.Bench) -> None:
    model = "stories" if bench.quick else "gpt2"
    threads, (prompts, counts) = torch.get_num_threads(), workload(model)

    def by_process(worker: Executor) -> dict[str, Any]:
        return worker.submit(run, prompts, counts).result()

    with ExitStack() as stack:
        ways: dict[str, Callable[[], dict[str, Any]]] = {}
        for variant in (ONE_BY_ONE, BATCH, *ENGINES):
            worker = stack.enter_context(kit.process(begin, variant, model, threads))
            worker.submit(int).result()  # one process after the other: each takes all processors
            ways[variant] = partial(by_process, worker)
        subject = Subject(model, "float32")
        server = stack.enter_context(own_server(subject.server_options(CONTEXTS), quiet=True))

        def by_server() -> dict[str, Any]:
            answers = asyncio.run(ask_all(server.url, prompts, counts, ignore_eos=True))
            return answers | {"bytes": kit.peak_so_far(server.process.pid)}

        ways[MODULE], seen = by_server, list[Lists]()

        def proved(way: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            result = way()
            seen.append(result.pop("ids"))
            return result

        def proof() -> dict[str, Any]:
            if any(list(map(len, ids)) != counts for ids in seen):
                raise AssertionError("an answer has another length than was asked for")
            return subject.prove(prompts * len(seen), sum(seen, []))

        lengths = kit.packed(zip(map(len, prompts), counts, strict=True))
        variants = {name: partial(proved, way) for name, way in ways.items()}
        bench.row("steps", variants, ROUNDS, 1, proof, **subject.about, lengths=lengths)


def title(variant: str) -> str:
    """The package of an engine's stage."""
    return registry.ENGINES[variant].partition(".")[0] if variant in ENGINES else variant


def lines(row: Row) -> Iterator[dict[str, object]]:
    for variant in ORDER:
        yield {
            "engine": title(variant), "tok/s": row.rate(variant, 0),
            "over stage 01": f"{row.gain('forward', variant):.1f}x",
            "peak memory, MiB": f"{max(row['bytes'][variant]) / 2**20:,.0f}",
        }  # fmt: skip


def tables(results: Results) -> kit.Tables:
    return {"steps": [line for row in results.rows("steps") for line in lines(row)]}


def chart(results: Results) -> charts.Figure:
    (row, *_) = results.rows("steps")
    figure = charts.bars(
        f"The staircase: {next(headline(results))}'s throughput",
        "output tok/s (GPT-2 124M shape, float32, 12 requests together)",
        [*map(title, ORDER)], {"tok/s": [row.tokens / row.median(name) for name in ORDER]},
        digits=0,
    )  # fmt: skip
    for bar in figure.axes[0].patches[-2:]:  # of transformers
        bar.set_facecolor(charts.COLOURS[3])
    return figure


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("steps"):
        yield f"{row.gain('forward', min(ENGINES, key=row.median)):.0f}x the naive engine"


if __name__ == "__main__":
    cli.run(partial(kit.main, NAME, __doc__, measure, tables))
