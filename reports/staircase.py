"""One workload through every stage, and through `transformers`: `python -m reports.staircase`.

The requests are all there at the start, with prompts and answers of different lengths. Each stage
works through them in its own process, as its user would have to: one after another if it takes one
prompt, as many together as fit into the same memory if it takes several, and the server over HTTP.
The processes run in turn for several rounds, and every token is proved.

Writes reports/<machine>/staircase.json; `python -m reports.draw` draws the chart that the
main README opens with.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from reports import stages
from shared import charts, cli, measure
from shared.bench import kit
from shared.bench.rows import Column, Results, Row, median, tables
from shared.checkpoint import PRESETS
from shared.errors import UserError
from shared.parity import random_prompt
from shared.paths import discover
from shared.peers import transformers_batch, transformers_greedy, transformers_model
from shared.server import MODULE, own_server

KIND, NAME = "staircase", "reports.staircase"
FIRST = discover()[0]
ONE_BY_ONE, BATCH = "transformers", "transformers, a batch"
TITLES = {ONE_BY_ONE: "transformers, one by one", BATCH: "transformers, one batch"}
FULL = kit.plan(
    model="gpt2", dtype="float32", device="cpu", rounds=3,
    requests=12, prompts=(8, 64), answers=(8, 64),
    contexts=8,  # memory for keys and values, where a stage takes several sequences
)  # fmt: skip


def workload(plan: Any) -> tuple[list[list[int]], list[int]]:
    """Prompts (token ids), and how many tokens each answer has."""
    rng, config = random.Random(KIND), PRESETS[plan.model]
    lengths = [rng.randint(*plan.prompts) for _ in range(plan.requests)]
    prompts = [random_prompt(length, config, number) for number, length in enumerate(lengths)]
    return prompts, [rng.randint(*plan.answers) for _ in prompts]


@dataclass
class Run:
    """What a variant answered, and when each answer was whole: seconds from the start."""

    ends: list[float]
    tokens: list[list[int]]
    seconds: float = 0.0
    bytes: int = 0  # peak memory of the process, or of the server's


Prompts = list[list[int]]
Answers = Iterator[tuple[int, list[int]]]  # a prompt's place, and next tokens of its answer


def work(variant: str, sizes: Mapping[str, Any], threads: int) -> Run:
    """Run `variant`, a stage, one of TITLES, or the server, by the sizes of a plan. A short warm-up
    comes first: libraries choose their kernels at the first call."""
    plan = kit.plan(**sizes)
    if variant == MODULE:
        return by_server(plan, threads)
    torch.set_num_threads(threads)
    dtype, shape = getattr(torch, plan.dtype), kit.shape(plan.model)
    answer: Callable[[Prompts, list[int]], Answers]
    if variant in TITLES:
        model = transformers_model(shape, dtype).to(plan.device)
        answer = partial(by_transformers, model, variant == BATCH)
    else:
        model = kit.Subject(shape, dtype, plan.device).model
        shape.tensors.clear()
        answer = partial(by_stage, variant, stages.engines()[variant](model, plan.contexts))
    prompts, counts = workload(plan)
    for _ in answer(prompts[:2], [2, 2]):
        pass
    run = Run([0.0] * len(prompts), [[] for _ in prompts])
    measure.synchronize(plan.device)
    started = time.perf_counter()
    for place, ids in answer(prompts, counts):
        run.tokens[place] += ids
        run.ends[place] = time.perf_counter() - started
    run.seconds, run.bytes = time.perf_counter() - started, measure.peak_so_far(os.getpid())
    return run


def by_stage(name: str, engine: Any, prompts: Prompts, counts: list[int]) -> Answers:
    for place, token in stages.answer(engine, prompts, list(map(kit.greedy, counts))):
        yield place, [token.id]


def by_transformers(model: Any, batch: bool, prompts: Prompts, counts: list[int]) -> Answers:
    """transformers' `generate`, as its users call it. In a batch every answer gets as many tokens
    as the longest one."""
    if batch:
        every = transformers_batch(model, prompts, max(counts))
        yield from enumerate(ids[:count] for ids, count in zip(every, counts, strict=True))
    else:
        yield from enumerate(map(partial(transformers_greedy, model), prompts, counts))


def by_server(plan: Any, threads: int) -> Run:
    """All requests at once, to our server, started for them."""
    about = {"device": plan.device, "threads": threads, "max_num_seqs": plan.requests}
    options = kit.server_options(plan.model, plan.dtype, plan.contexts, **about)
    with own_server(options, quiet=True) as server:
        run = asyncio.run(ask_all(server.url, *workload(plan)))
        run.bytes = measure.peak_so_far(server.pid)
        return run


async def ask_all(url: str, prompts: Prompts, counts: list[int]) -> Run:
    """All answers of one of our servers. Raises UserError if an answer fails or has the wrong
    length."""
    run = Run([0.0] * len(prompts), [[] for _ in prompts])

    async def ask(place: int, prompt: list[int], count: int) -> None:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise UserError(f"{url} answered {response.status}: {text}")
            answer = await response.json()
        run.ends[place] = time.perf_counter() - started
        if (got := answer["usage"]["completion_tokens"]) != count:
            raise UserError(f"{url} gave {got} tokens where {count} were requested.")
        run.tokens[place] = answer["choices"][0]["token_ids"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(ask(0, prompt, 2) for prompt in prompts[:2]))  # warms up
        started = time.perf_counter()
        await asyncio.gather(*map(ask, range(len(prompts)), prompts, counts))
        run.seconds = time.perf_counter() - started
    return run


def variants(plan: Any) -> list[str]:
    """What each process runs, in the order of a round."""
    return [*([] if plan.device == "mps" else TITLES), *stages.engines(), MODULE]


def run(plan: Any) -> dict[str, Any]:
    """Raises AssertionError for a wrong token, and UserError for a run that fails."""
    wanted, threads = variants(plan), torch.get_num_threads()
    with tqdm(total=len(wanted) * plan.rounds, unit="run") as bar:

        def fresh(name: str) -> Run:
            bar.set_postfix_str(name)
            try:
                with measure.process() as worker:
                    return worker.submit(work, name, vars(plan), threads).result()
            except BrokenExecutor as error:
                raise UserError(f"{name} could not be measured: {error}") from None
            finally:
                bar.update()

        ways = {name: partial(fresh, name) for name in wanted}
        runs = measure.turns(ways, plan.rounds, warmup=0, steady=False)
    return {"steps": [together(plan, runs)]}


def together(plan: Any, results: Mapping[str, list[Run]]) -> kit.Group:
    """The runs as a group, every answer proved."""
    prompts, counts = workload(plan)
    subject = kit.Subject(kit.shape(plan.model), getattr(torch, plan.dtype), plan.device)

    def kept(run: Run) -> kit.Group:
        proof = subject.prove_lengths(prompts, run.tokens, counts)
        return {"seconds": run.seconds, "ends": run.ends, "bytes": run.bytes, "proof": proof}

    fields = {name: list(map(kept, runs)) for name, runs in results.items()}
    lengths = list(zip(map(len, prompts), counts, strict=True))
    return subject.about | {"lengths": kit.packed(lengths)} | kit.by_variant(fields)


def span(row: Row, place: int) -> str:
    """All tokens of prompts or answers, and their range."""
    lengths = [pair[place] for pair in row.lengths]
    return f"{sum(lengths)}: {min(lengths)} to {max(lengths)} each"


def name_of(row: Row) -> str:
    return TITLES.get(row.variant, row.variant)


COLUMNS: dict[str, Column] = {
    "engine": name_of,
    "over stage 01": lambda row: f"{row.of(FIRST).median / row.median:.1f}x",
    "an answer takes, s (mean)": lambda row: f"{median(map(statistics.fmean, row['ends'])):.1f}",
    "the slowest, s": lambda row: f"{median(map(max, row['ends'])):.1f}",
    "peak memory, MiB": lambda row: f"{median(row['bytes']) / 2**20:,.0f}",
    "tokens proved": "proof",
    "prompt tokens": lambda row: span(row, 0),
    "answer tokens": lambda row: span(row, 1),
    "memory, whole contexts": lambda row: row.results.plan["contexts"],
    "rounds": lambda row: row.results.plan["rounds"],
}
TABLES = tables(
    COLUMNS,
    """
    workload < steps: model | dtype | requests | prompt tokens | answer tokens
      | memory, whole contexts | rounds
    steps: engine | tok/s | over stage 01 | an answer takes, s (mean) | the slowest, s
      | peak memory, MiB | tokens proved
    """,
)


def steps_chart(results: Results) -> Figure:
    """Ours from top to bottom, and transformers below them."""
    ours = sorted(row.variant for row in results.rows("steps") if row.variant not in TITLES)
    order = [*ours, *TITLES]
    engines = sorted(results.rows("steps"), key=lambda row: order.index(row.variant))
    best = min(row.median for row in engines if row.variant in stages.engines())
    gain = engines[0].of(FIRST).median / best
    rates = [row.rate for row in engines]
    return charts.bars(
        f"The staircase: {gain:.0f}x the naive engine's throughput",
        "output tok/s",
        list(map(name_of, engines)),
        {"tok/s": [rate.median for rate in rates]},
        spread={"tok/s": [(rate.low, rate.high) for rate in rates]},
        others=list(TITLES.values()),
        digits=0,
    )


def headline(results: Results) -> str:
    group = results.groups("steps")[0]
    last = [name for name in stages.engines() if name in group["seconds"]][-1]
    return f"{group.gain(FIRST, last):.0f}x from {FIRST} to {last}"


OPTIONS: dict[str, Any] = {
    "device": {"choices": ("cpu", "cuda", "mps"), "default": "cpu", "help": "what to compute on"},
    "dtype": {"choices": ("float32", "bfloat16"), "default": "float32", "help": "number format"},
}
BENCHMARK = kit.Benchmark(
    KIND, __doc__, FULL, run, TABLES, {"steps": steps_chart}, headline, module=NAME, options=OPTIONS
)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
