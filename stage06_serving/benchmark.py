"""What HTTP costs, where it costs nothing, and where it costs most:
`python -m stage06_serving.benchmark`.

Two ways run in turn: stage 05's engine alone in a process, and a server process (`python -m
stage06_serving`) with clients in another one. Both have the same weights, dtype, threads, memory
and requests, and the same number of requests in flight. The engine's process can also serve, and is
then watched: its passes, and the processor time of the event loop, which Python's profiler divides
among the parts of a token's way.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import claims, kit, rows
from shared.bench.kit import Group, Subject
from shared.bench.rows import Results, Row, median, percentile
from shared.measure import Summary, summarize
from shared.roofline import forward_cost
from shared.server import own_server
from stage04_continuous.request import Request

from .inside import Inside
from .settings import PREFIX

HTTP, NULL, LOSE = "http", "null", "lose"
CHUNK = 256  # tokens of a step at most, the default
OFFLINE, SERVER = "engine alone", "server"
WATCHED = "watched"  # the engine's own process serves
AIMS = {"paged": 95.0, "kernels": 97.0}  # percent of the throughput offline, with the most streams
BLOCK = 16  # tokens in a block of the server
END = b"0\r\n\r\n"  # of a body in chunks
# The way of a token on the event loop, by the files and packages whose functions run.
PARTS = {
    "HTTP and socket": "uvicorn httptools starlette fastapi anyio asyncio guard.py connection.py",
    "chunk and JSON": "json pydantic formats.py protocol.py sse.py",
    "text": "tiktoken text.py tokenizer.py service.py",
    "the writer": "writer.py",
}
REST = "tickets, metrics, requests"
Parts = list[tuple[float, bytes]]  # of an answer, each with the time of its arrival
Way = Callable[["Load", Sequence[list[int]]], "Run"]  # to run a load


@dataclass(frozen=True)
class Load:
    """Requests from `streams`, each of which sends its next one when its last one has ended.
    Prompts and answers are in tokens."""

    case: str  # HTTP, NULL or LOSE
    streams: int
    requests: int
    prompt: int
    answer: int


FULL = kit.plan(
    # Model, dtype and engine. The first has all loads; the others only the one with the most
    # streams, and the losing one.
    subjects=(
        ("gpt2", "float32", "kernels"), ("gpt2", "float32", "paged"),
        ("gpt2", "bfloat16", "kernels"), ("stories", "float32", "kernels"),
    ),
    loads=(  # see Load
        (HTTP, 1, 2, 64, 64), (HTTP, 8, 8, 64, 64), (HTTP, 32, 64, 64, 64),
        (NULL, 1, 1, 64, 256),  # one long request
        (LOSE, 32, 200, 8, 1),  # the shortest answers possible
    ),
    repeats=2, max_num_seqs=32, kv_memory="512MiB",
    options=(),  # more of them, for engine and server
)  # fmt: skip


def most_streams(plan: Any) -> Load:
    return [Load(*load) for load in plan.loads if load[0] == HTTP][-1]


def turns(plan: Any, subject: tuple[str, str, str]) -> Iterator[tuple[Load, dict[str, int]]]:
    """The loads of a subject, and how often each variant runs. A long request shows nothing new
    when it runs again or is watched."""
    for load in (Load(*fields) for fields in plan.loads):
        if subject == plan.subjects[0] or load == most_streams(plan) or load.case == LOSE:
            often = dict.fromkeys((OFFLINE, SERVER), plan.repeats) | {WATCHED: 1}
            yield load, {OFFLINE: 1, SERVER: 1} if load.case == NULL else often


def options(plan: Any, model: str, dtype: str, engine: str) -> list[str]:
    """The command line of the server, which also configures the engine alone. Prefixes are not
    cached: the second run would find what the first computed."""
    more = {
        "kv_memory": plan.kv_memory,
        "max_num_seqs": plan.max_num_seqs,
        "device": "cpu",
        "engine": engine,
    }
    words = kit.server_options(model, dtype, 1, **more)
    return [*words, "--no-enable-prefix-caching", *plan.options]


# ---- one run ------------------------------------------------------------------------------------


@dataclass
class Run:
    """A load, once through. Times are `time.perf_counter()`, in the order of sending."""

    seconds: float
    sent: list[float]
    times: list[list[float]]  # of each answer: when something new arrived
    ids: list[list[int]]
    cpu: dict[str, float]  # seconds of processor time of the "engine", the "loop", the "client"
    passes: int | None = None  # of the engine; None: unknown
    parts: dict[str, float] = field(default_factory=dict)  # shares of the loop's time

    def kept(self) -> dict[str, Any]:
        first = [times[0] - sent for times, sent in zip(self.times, self.sent, strict=True)]
        between = [late - soon for times in self.times for soon, late in pairwise(times)]
        return {
            "seconds": self.seconds,
            "cpu": self.cpu,
            "passes": self.passes,
            "ttft": [percentile(first, share) for share in (0.5, 0.99)],
            "itl": [percentile(between, share) for share in (0.5, 0.99)] if between else None,
        }


def run_offline(engine: Any, load: Load, prompts: Sequence[list[int]]) -> Run:
    """The engine alone: a loop that steps, and adds a request when another has ended."""
    engine.steps.clear()
    waiting, sent, times = iter(prompts), list[float](), dict[str, list[float]]()
    ids: list[list[int]] = []

    def send() -> None:
        for prompt in islice(waiting, 1):
            request = engine.add(Request(prompt, kit.greedy(load.answer)))
            times[request.id] = []
            sent.append(time.perf_counter())
            ids.append(request.output.token_ids)

    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(load.streams):
        send()
    while engine.requests:
        tokens, now = engine.step(), time.perf_counter()
        for request, token in tokens:
            times[request].append(now)
            if token.finish_reason is not None:
                send()
    seconds, used = time.perf_counter() - started, {"engine": time.process_time() - cpu}
    return Run(seconds, sent, [*times.values()], ids, used, len(engine.steps))


def message(host: str, prompt: list[int], answer: int) -> bytes:
    """A request for exactly `answer` greedy tokens, with their ids."""
    body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    text = json.dumps(body | {"stream": True, "return_token_ids": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()


class Connection(asyncio.Protocol):
    """One stream's connection: keeps what arrives, and when. A library's client takes as long for
    an event as the server does, and would count as the server's time where both share two cores."""

    def __init__(self) -> None:
        self.parts: Parts = []
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))
        head = self.parts[0][1]
        if not head.startswith(b"HTTP/1.1 200 "):
            answer = head.splitlines()[0].decode()
            self.ended.set_exception(RuntimeError(f"the server answered {answer}"))
        elif data.endswith(END):
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("the server closed the connection"))

    async def answer(self) -> Parts:
        """The parts of the next answer, in the order of their arrival."""
        self.parts, self.ended = [], asyncio.get_running_loop().create_future()
        await self.ended
        return self.parts


def events_of(parts: Parts) -> tuple[list[float], list[bytes]]:
    """The events of an answer before the last, [DONE], and when each was complete."""
    times, events, rest = list[float](), list[bytes](), b""
    for now, data in parts:
        *whole, rest = (rest + data).split(b"\n\n")
        times += [now] * len(whole)
        events += whole
    return times[:-1], events[:-1]


async def run_client(address: str, load: Load, prompts: Sequence[list[int]]) -> Run:
    """All requests of a load to the server at `address`, each stream over one connection. Events
    are parsed once all have arrived. Raises RuntimeError for an invalid answer."""
    place, loop = urlsplit(address), asyncio.get_running_loop()
    host, port = str(place.hostname), place.port or 80
    messages = iter([message(place.netloc, prompt, load.answer) for prompt in prompts])
    sent, answers = list[float](), list[Parts]()

    async def stream() -> None:
        transport, connection = await loop.create_connection(Connection, host, port)
        with closing(transport):
            for request in messages:
                number = len(answers)
                answers.append([])
                sent.append(time.perf_counter())
                transport.write(request)
                answers[number] = await connection.answer()

    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    seconds, used = time.perf_counter() - started, {"client": time.process_time() - cpu}
    times, events = zip(*map(events_of, answers), strict=True)
    return Run(seconds, sent, [*times], [*map(ids_of, events)], used)


def ids_of(events: Sequence[bytes]) -> list[int]:
    """The tokens in some events. Raises RuntimeError if one is an error."""
    ids: list[int] = []
    for event in events:
        data = json.loads(event.partition(b"data: ")[2])
        if "error" in data:
            raise RuntimeError(f"the server broke an answer off: {data['error']['message']}")
        ids += data["choices"][0]["token_ids"]
    return ids


def client(url: str, load: Load, prompts: Sequence[list[int]]) -> Run:
    return asyncio.run(run_client(url, load, prompts))


# ---- processes ----------------------------------------------------------------------------------

inside: Inside  # in the engine's process: by the server's command line, and able to serve


def begin(arguments: list[str]) -> None:
    global inside
    inside = Inside(arguments)


def offline(load: Load, prompts: Sequence[list[int]]) -> Run:
    run: Run = inside.thread.run(partial(run_offline, inside.engine, load, prompts)).result()
    return run


def watched(load: Load, prompts: Sequence[list[int]], profile: bool = False) -> Run:
    return asyncio.run(run_watched(load, prompts, profile))


async def run_watched(load: Load, prompts: Sequence[list[int]], profile: bool) -> Run:
    """Serve a load to a client in another process. With `profile`, the loop's time is divided into
    PARTS."""
    profiler = cProfile.Profile(time.thread_time)
    with measure.process() as clients:
        async with inside.serving() as url:
            inside.engine.steps.clear()
            loop, every = time.thread_time(), time.process_time()
            if profile:
                profiler.enable()
            run = await asyncio.wrap_future(clients.submit(client, url, load, prompts))
            profiler.disable()
            loop, every = time.thread_time() - loop, time.process_time() - every
    run.cpu |= {"engine": every - loop, "loop": loop}
    run.passes = len(inside.engine.steps)
    run.parts = shares(profiler) if profile else {}
    return run


def shares(profiler: cProfile.Profile) -> dict[str, float]:
    """Shares of PARTS in the time that was profiled. A built-in function counts for its caller."""
    profiler.create_stats()
    seconds: dict[str, float] = dict.fromkeys((*PARTS, REST), 0.0)
    for (file, *_), (_, _, exclusive, _, callers) in profiler.stats.items():
        builtin = {caller[0]: times[2] for caller, times in callers.items()} if file == "~" else {}
        for place, taken in (builtin or {file: exclusive}).items():
            words = place.replace("\\", "/").split("/")
            part = (name for name, files in PARTS.items() if {*files.split()} & {*words})
            seconds[next(part, REST)] += taken
    total = sum(seconds.values())
    return {name: taken / total for name, taken in seconds.items()}


def clocks(pid: int) -> dict[str, float]:
    """Seconds of processor time so far: of the loop, which runs on the main thread, and of all
    other threads. Where the system does not number threads as Linux does, all of it counts as the
    engine's."""
    server = psutil.Process(pid)
    times, threads = server.cpu_times(), [thread for thread in server.threads() if thread.id == pid]
    loop = sum(thread.user_time + thread.system_time for thread in threads)
    return {"engine": times.user + times.system - loop, "loop": loop}


# ---- measuring ----------------------------------------------------------------------------------


@contextmanager
def ways_to_run(subject: Subject, plan: Any, clients: Executor) -> Iterator[dict[str, Way]]:
    """The engine's process and the server, as ways to run a load; that of PARTS is profiled."""
    about = subject.about
    arguments = options(plan, *(about[name] for name in ("model", "dtype", "engine")))
    with measure.process(begin, arguments) as engine:
        # Both time their linear layers at the start, and must not do so at once.
        engine.submit(int).result()
        with own_server(arguments, quiet=True) as server:

            def by_server(load: Load, prompts: Sequence[list[int]]) -> Run:
                before = clocks(server.pid)
                run: Run = clients.submit(client, server.url, load, prompts).result()
                run.cpu |= {name: now - before[name] for name, now in clocks(server.pid).items()}
                return run

            def by_engine(do: Callable[..., Run], *more: Any) -> Way:
                return lambda load, prompts: engine.submit(do, load, prompts, *more).result()

            profiled = {WATCHED: by_engine(watched), "parts": by_engine(watched, True)}
            yield {OFFLINE: by_engine(offline), SERVER: by_server, **profiled}


def measure_load(
    subject: Subject, load: Load, repeats: Mapping[str, int], ways: Mapping[str, Way]
) -> Group:
    """One load in turn by each of the ways, every answer proved."""
    prompts = subject.prompts([load.prompt] * load.requests)
    runs = {name: partial(ways[name], load, prompts) for name in repeats}
    counts = [load.answer] * load.requests
    results = measure.turns(runs, repeats, warmup=0, steady=False)
    kept = {
        name: [
            run.kept() | {"proof": subject.prove_lengths(prompts, run.ids, counts)} for run in runs
        ]
        for name, runs in results.items()
    }
    alone, about = results[OFFLINE][-1].ids, subject.about | asdict(load)
    same = {name: sum(map(list.__eq__, runs[-1].ids, alone)) for name, runs in results.items()}
    lengths = [[load.prompt, load.answer, load.requests]]
    return about | kit.by_variant(kept) | {"lengths": lengths, "same": same}


def run(plan: Any) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # the user's own settings of a server
    results: dict[str, Any] = {HTTP: [], NULL: [], LOSE: [], "parts": {}}
    most, total = (
        most_streams(plan),
        sum(len(list(turns(plan, subject))) for subject in plan.subjects),
    )
    warm = replace(most, requests=most.streams, answer=2)
    with tqdm(total=total, unit="load") as bar, measure.process() as clients:
        for model, dtype, engine in plan.subjects:
            subject = Subject(kit.shape(model), getattr(torch, dtype))
            subject.about["engine"] = engine
            with ways_to_run(subject, plan, clients) as ways:
                for name in (OFFLINE, SERVER):
                    ways[name](warm, subject.prompts([warm.prompt] * warm.requests, "warm"))
                for load, repeats in turns(plan, (model, dtype, engine)):
                    what = load.case, f"{load.streams} streams", model, dtype, engine
                    bar.set_postfix_str(", ".join(what))
                    results[load.case].append(measure_load(subject, load, repeats, ways))
                    bar.update()
                if not results["parts"]:
                    prompts = subject.prompts([most.prompt] * most.requests)
                    results["parts"] = ways["parts"](most, prompts).parts
    return results


# ---- predictions --------------------------------------------------------------------------------


def python_seconds(row: Row, who: str) -> float:
    """Processor time of the "loop" or the "client" for the whole load: of the watched run, or of
    the server's own where none was watched."""
    timed = row.of(WATCHED if WATCHED in row.group["seconds"] else SERVER)
    return median(used[who] for used in timed["cpu"])


def left(engine: float, python: float, cpus: float) -> tuple[float, float]:
    """Percent of an engine's throughput that remain when loop and client take this time in
    `python`: the engine stands still for all of it, or loses only its share of the processors."""
    return 100 * engine / (engine + python), 100 * engine / (engine + python / cpus)


def predicted(row: Row) -> tuple[float, float]:
    """The least and the most percent, from the time of loop and client on this machine."""
    python = python_seconds(row, "loop") + python_seconds(row, "client")
    return left(row.of(OFFLINE).median, python, row.results.content["machine"]["cpus"])


def share(row: Row) -> Summary:
    """The server's throughput in percent of the engine's alone, over the pairs that ran in turn."""
    pairs = zip(row.of(OFFLINE)["seconds"], row.of(SERVER)["seconds"], strict=True)
    return summarize([100 * alone / server for alone, server in pairs])


# The lesson's predictions, if any: ms of engine and of Python in a step, or in a request of one
# token, on its machine of two cores; and why the measured share differs.
BY_HAND: dict[tuple[str, str, int], tuple[tuple[float, float] | None, str]] = {
    (HTTP, "gpt2, float32, kernels", 8): ((15, 0.24), ""),
    (HTTP, "gpt2, float32, kernels", 32): ((42, 1), ""),
    (HTTP, "gpt2, float32, paged", 32): ((60, 1), ""),
    (HTTP, "gpt2, bfloat16, kernels", 32): ((21, 1), ""),
    (NULL, "gpt2, float32, kernels", 1): ((13, 0.03), "nothing to share: the difference is noise"),
    (LOSE, "gpt2, float32, kernels", 32): ((7.2, 0.3), "requests come one by one: steps not full"),
    (LOSE, "gpt2, bfloat16, kernels", 32): (None, "requests come one by one: steps not full"),
    (LOSE, "stories, float32, kernels", 32): (None, "the loop takes longer than the model"),
}
NOT_IN_LESSON = {(HTTP, "stories, float32, kernels", 32), (LOSE, "gpt2, float32, paged", 32)}


def subject_of(row: Row) -> str:
    return f"{row['model']}, {row['dtype']}, {row['engine']}"


def predictions(results: Results) -> Iterator[dict[str, str]]:
    """Each prediction of the lesson, this machine's, and what came of it."""
    what = {HTTP: "{streams} streams", NULL: "one long request", LOSE: "answers of one token"}
    for row in (row for case in what for row in results.groups(case)):
        key = (row["case"], subject_of(row), row["streams"])
        if key in NOT_IN_LESSON or row["case"] == HTTP and row["streams"] == 1:
            continue  # one stream is like the long request
        hand, why = BY_HAND.get(key, (None, ""))
        percent, (least, most) = share(row).median, predicted(row)
        verdict = "**missed**" if percent < least else "more" if percent > most else "held"
        if row["case"] == HTTP and row["streams"] == most_streams(FULL).streams:
            aim = AIMS[row["engine"]]
            verdict += f"; aim of {aim:.0f}%: {'held' if percent >= aim else '**missed**'}"
        yield {
            "prediction": f"{what[row['case']].format_map(row)}, {subject_of(row)}",
            "by hand": percents(*left(*hand, 2)) if hand else "",
            "this machine": percents(least, most),
            "measured": f"{percent:.1f}%",
            "result": verdict,
            "why": why,
        }


def percents(least: float, most: float) -> str:
    return f"{least:.1f}% to {most:.1f}%"


# ---- tables and charts --------------------------------------------------------------------------


def latency(key: str, place: int) -> rows.Column:
    """The runs' median, in ms, of the percentile at `place` in "ttft" or "itl"."""

    def cell(row: Row) -> str:
        known = [run[place] for run in row[key] if run]
        return f"{median(known) * 1e3:,.1f}" if known else ""

    return cell


def a_request(who: str) -> rows.Column:
    """Microseconds of the loop or the client."""
    return lambda row: f"{python_seconds(row, who) / row['requests'] * 1e6:,.0f}"


def a_token(row: Row) -> str:
    """Microseconds of the loop."""
    return f"{python_seconds(row, 'loop') / row.tokens * 1e6:.1f}"


def waits(results: Results) -> Iterator[claims.Claim]:
    """The lesson's two times, over HTTP with stage 05's engine: predicted from the limits of the
    machine and one reading of all keys and values more, which is the gather."""
    for row in (group.of(SERVER) for group in results.groups(HTTP, engine="paged")[-1:]):
        prompt, answer = row.lengths[0]
        count, context = row["streams"], prompt + answer // 2
        gathered = count * context * row.config.kv_bytes_per_token(row.kind) / row.bandwidth
        step = row.least([forward_cost(row.config, row.kind, 1, context, rows=count)]) + gathered
        chunks = -(-count * prompt // CHUNK)
        last = chunks * row.least([forward_cost(row.config, row.kind, CHUNK, sampled=4)])
        between, first = (
            1e3 * median(run[place] for run in row[key] if run)
            for key, place in (("itl", 0), ("ttft", 1))
        )
        why = "attention and Python beside the products"
        yield claims.Claim("time between two tokens, p50", 1e3 * step, between, "ms", why, 60.0)
        what = f"first token, the last of {count} prompts (p99)"
        why = "prompts come one by one, and their steps are rarely full"
        yield claims.Claim(what, 1e3 * last, first, "ms", why, 2000.0)


def most_of_first(results: Results) -> Row:
    """The first subject with the most streams."""
    groups = results.groups(HTTP)
    return [row for row in groups if subject_of(row) == subject_of(groups[0])][-1]


def token_lines(results: Results) -> Iterator[dict[str, str]]:
    """A token's way on the loop, with the most streams."""
    row = most_of_first(results)
    loop, client = (python_seconds(row, who) / row.tokens * 1e6 for who in ("loop", "client"))
    for name, part in results["parts"].items():
        yield {"on the loop": name, "us a token": f"{part * loop:.1f}", "share": f"{part:.0%}"}
    for name, whole in (("**all of it**", loop), ("the client, in its own process", client)):
        yield {"on the loop": name, "us a token": f"{whole:.1f}", "share": ""}


COLUMNS: dict[str, rows.Column] = {
    "model": subject_of,
    "alone, tok/s": lambda row: row.of(OFFLINE).rate.show(),
    "share, %": lambda row: share(row).show(1),
    "predicted": lambda row: percents(*predicted(row)),
    "same tokens": lambda row: row.of(SERVER).alike(OFFLINE, "alone"),
    "steps": lambda row: ", ".join(
        f"{median(row.of(name)['passes']):.0f}" for name in (OFFLINE, WATCHED)
    ),
    "loop, us a token": a_token,
    **{f"{who}, us a request": a_request(who) for who in ("loop", "client")},
    **{
        f"{key.upper()} {name}, ms": latency(key, place)
        for key in ("ttft", "itl")
        for place, name in enumerate(("p50", "p99"))
    },
}
LOADS = "model | streams | alone, tok/s | server, tok/s | share, % | predicted | same tokens"
TABLES = rows.tables(
    COLUMNS,
    f"""
    http: {LOADS} | loop, us a token
    null: {LOADS}
    lose: {LOADS} | steps | loop, us a request | client, us a request
    latency < sides: model | streams | requests | answer | engine | TTFT p50, ms | TTFT p99, ms
      | ITL p50, ms | ITL p99, ms
    """,
    sides=lambda results: [
        group.of(side)
        for case in (HTTP, NULL, LOSE)
        for group in results.groups(case)
        for side in (OFFLINE, SERVER)
    ],
    tokens=token_lines,
    loop=predictions,
    waits=claims.closing(waits),
)


def share_chart(results: Results) -> Figure:
    groups = results.groups(HTTP)
    shares = list(map(share, groups))
    return charts.bars(
        "What is left of the engine's throughput behind HTTP",
        "% of the tok/s of the engine alone",
        [f"{subject_of(row)}\nstreams: {row['streams']}" for row in groups],
        {"measured": [summary.median for summary in shares]},
        spread={"measured": [(summary.low, summary.high) for summary in shares]},
        limits={"the aim with kernels": AIMS["kernels"]},
        digits=0,
    )


def headline(results: Results) -> str:
    row = most_of_first(results)
    return (
        f"{share(row).median:.0f}% of the offline engine's tok/s behind HTTP, {row['streams']} "
        f"streams (GPT-2 124M shape, {row['dtype']}, {row['engine']})"
    )


CHARTS = {"http": share_chart}
FEW = {"subjects": FULL.subjects[:3:2]}  # both dtypes
BENCHMARK = kit.Benchmark("stage06_serving", __doc__, FULL, run, TABLES, CHARTS, headline, few=FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
