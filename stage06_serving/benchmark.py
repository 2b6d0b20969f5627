"""What HTTP costs: `python -m stage06_serving.benchmark`.

Two ways run in turn: an engine alone in a process, and a server process (`python -m
stage06_serving`) with clients in another one. Both have the same weights, dtype, threads, memory
and requests, and the same number of requests in flight. Every answer is proved.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from shared import charts, cli, kit, registry
from shared.kit import Results, Row, Subject
from shared.server import own_server
from stage04_continuous.request import Request

OFFLINE, SERVER = "engine alone", "server"
SEQUENCES, CONTEXTS = 32, 8
HTTP, NULL, LOSE = "http", "one long request", "answers of one token"
# Case, streams, requests, tokens of prompt and answer. A stream sends when its last one has ended.
LOADS = ((HTTP, 1, 2, 64, 64), (HTTP, 8, 16, 64, 64), (HTTP, 32, 64, 64, 64))
CONTROLS = ((NULL, 1, 1, 64, 256), (LOSE, 32, 200, 8, 1))
PAIRS = (("float32", "kernels"), ("float32", "paged"), ("bfloat16", "kernels"))
Lists = list[list[int]]

engine: Any  # of the process that has no server


def begin(name: str, model: str, dtype: str, threads: int) -> None:
    global engine
    torch.set_num_threads(threads)
    subject = Subject(model, dtype, plain=name == "kernels")
    options = {"max_sequences": SEQUENCES, "token_budget": 256, "prefix_caching": False}
    engine = registry.load(registry.ENGINES[name])(subject.model, CONTEXTS, **options)


def offline(streams: int, prompts: Lists, answer: int) -> dict[str, Any]:
    """A loop that steps, and adds a request when another has ended."""
    waiting, requests, started = iter(prompts), list[Any](), time.perf_counter()

    def send() -> None:
        if (prompt := next(waiting, None)) is not None:
            requests.append(engine.add(Request(prompt, kit.greedy(answer))))

    for _ in range(streams):
        send()
    while engine.requests:
        for _, token in engine.step():
            if token.finish_reason is not None:
                send()
    ids = [request.output.token_ids for request in requests]
    return {"seconds": time.perf_counter() - started, "ids": ids}


def ask_all(url: str, streams: int, prompts: Lists, answer: int) -> dict[str, Any]:
    """All requests over `streams` connections. Events are parsed once all have arrived: a library's
    client would take as long for an event as the server does, and count as the server's time."""
    place = urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
    head += "Content-Type: application/json\r\n"
    body = {"max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    texts = [json.dumps(body | {"prompt": p, "return_token_ids": True}) for p in prompts]
    requests = [f"{head}Content-Length: {len(t)}\r\n\r\n{t}".encode() for t in texts]
    waiting, answers = iter(enumerate(requests)), [b""] * len(requests)

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**26)
        for number, request in waiting:
            writer.write(request)
            answers[number] = await reader.readuntil(b"0\r\n\r\n")  # of a body in chunks
        writer.close()

    async def gather() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return time.perf_counter() - started

    seconds = asyncio.run(gather())
    chunks = [re.findall(rb"^data: (\{.*)$", received, re.M) for received in answers]
    tokens = [[json.loads(line)["choices"][0]["token_ids"] for line in some] for some in chunks]
    return {"seconds": seconds, "ids": [sum(some, []) for some in tokens]}


def measure(bench: kit.Bench) -> None:
    model, threads = "stories" if bench.quick else "gpt2", torch.get_num_threads()
    for dtype, name in bench.sizes(*PAIRS):
        subject = Subject(model, dtype)
        words = f"--engine {name} --max-num-seqs {SEQUENCES} --no-enable-prefix-caching".split()
        options = [*subject.server_options(CONTEXTS), *words]
        with ExitStack() as stack:
            worker = stack.enter_context(kit.process(begin, name, model, dtype, threads))
            worker.submit(int).result()  # one process after the other takes all processors
            server = stack.enter_context(own_server(options, quiet=True))
            clients = stack.enter_context(kit.process())
            warm = (1, subject.prompts([8]), 2)
            worker.submit(offline, *warm).result()
            clients.submit(ask_all, server.url, *warm).result()
            loads = (*LOADS, *CONTROLS) if (dtype, name) == PAIRS[0] else (LOADS[-1], CONTROLS[-1])
            for load in bench.sizes(*loads):
                run(bench, subject, name, load, (worker, server, clients))


def run(bench: kit.Bench, subject: Subject, name: str, load: Any, programs: Any) -> None:
    worker, server, clients = programs
    case, streams, requests, prompt, answer = load
    prompts, seen = subject.prompts([prompt] * requests), list[Lists]()
    process = psutil.Process(server.process.pid)

    def loop_seconds() -> float:
        """Processor time so far of the event loop, which runs on the main thread."""
        (main,) = (thread for thread in process.threads() if thread.id == process.pid)
        return float(main.user_time + main.system_time)

    def alone() -> dict[str, Any]:
        result = worker.submit(offline, streams, prompts, answer).result()
        seen.append(result.pop("ids"))
        return result

    def served() -> dict[str, Any]:
        before = loop_seconds()
        result = clients.submit(ask_all, server.url, streams, prompts, answer).result()
        seen.append(result.pop("ids"))
        return result | {"loop": loop_seconds() - before}

    def proof() -> dict[str, Any]:
        assert {len(ids) for run in seen for ids in run} == {answer}, "an answer of another length"
        return subject.prove(prompts * len(seen), sum(seen, []))

    about = {**subject.about, "engine": name, "load": case, "streams": streams}
    about["lengths"] = [[prompt, answer, requests]]
    ways = {OFFLINE: alone, SERVER: served}
    bench.row("loads", ways, 1 if case == NULL else 3, 0, proof, **about)


def share(row: Row) -> float:
    """The server's throughput in percent of the engine's alone."""
    return 100 * row.gain(OFFLINE, SERVER)


def tables(results: Results) -> kit.Tables:
    http = [
        {
            "model": f"{row['model']}, {row['dtype']}, {row['engine']}",
            "load": f"{row['load']}, {row['streams']}",
            "alone, tok/s": row.rate(OFFLINE), "server, tok/s": row.rate(SERVER),
            "share, %": f"{share(row):.1f}",
            "loop, us a token": f"{1e6 * row.median(SERVER, 'loop') / row.tokens:.0f}",
        }
        for row in results.rows("loads")
    ]  # fmt: skip
    return {"http": http, "loop": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts: percent that a load loses behind HTTP."""
    by_hand = {
        (HTTP, 8, "float32", "kernels"): 5.0, (HTTP, 32, "float32", "kernels"): 7.0,
        (HTTP, 32, "float32", "paged"): 5.0, (HTTP, 32, "bfloat16", "kernels"): 13.0,
        (NULL, 1, "float32", "kernels"): 0.8, (LOSE, 32, "float32", "kernels"): 4.0,
    }  # fmt: skip
    for about, hand in by_hand.items():
        where = dict(zip(("load", "streams", "dtype", "engine"), about, strict=True))
        for row in results.rows("loads", model="gpt2", **where):
            alone, loop = row.median(OFFLINE), row.median(SERVER, "loop")
            here = 100 * loop / (alone + loop)  # the engine stands still while the loop computes
            what = f"lost behind HTTP, %: {', '.join(map(str, about))}"
            yield kit.claim(what, hand, here, max(0.0, 100 - share(row)), "")


def chart(results: Results) -> charts.Figure:
    rows = results.rows("loads", load=HTTP, streams=32)
    title = "What is left of the engine's throughput behind HTTP"
    about = "% of the tok/s of the engine alone (GPT-2 124M shape, 32 streams)"
    names, series = [f"{r['dtype']}, {r['engine']}" for r in rows], {"share": [*map(share, rows)]}
    return charts.bars(title, about, names, series, digits=0)


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("loads", load=HTTP, streams=32):
        yield f"{share(row):.0f}% of the offline engine's tok/s behind HTTP, 32 streams"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage06_serving", __doc__, measure, tables))
