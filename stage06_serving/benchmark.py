"""What HTTP costs, where it costs nothing, and where it costs most:
`python -m stage06_serving.benchmark`.

The engine of stage 05, in a process of its own with nothing around it, and a server process
(`python -m stage06_serving`) with clients in another one run in turn: the same weights, dtype,
threads, memory and requests, and the same number of requests in flight.

The engine's process can serve too, and is then watched: every pass, and the processor time of each
thread. So the same engine is measured alone and beside the event loop, whose time Python's profiler
divides among the parts of a token's way.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import uvicorn
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench import kit, rows
from shared.bench.kit import Group, Subject
from shared.bench.rows import Results, Row, median, percentile
from shared.measure import Summary, summarize
from shared.server import own_server
from stage01_forward.generation import Output
from stage04_continuous.request import Request

from .__main__ import SWITCH, configure, listen, make_engine
from .app import create_app
from .async_engine import EngineThread
from .settings import PREFIX, parse

HTTP, NULL, LOSE = "http", "null", "lose"
OFFLINE, SERVER = "engine alone", "server"
AIM = 0.95  # share of the throughput offline, with the most streams
LONGEST_EVENT = 2**20  # bytes
# The way of a token on the event loop, by the files and packages whose functions run.
PARTS = {
    "HTTP and socket": (
        "uvicorn",
        "h11",
        "starlette",
        "fastapi",
        "anyio",
        "sse.py",
        "guard.py",
        "connection.py",
    ),
    "chunk and JSON": ("json", "pydantic", "formats.py", "protocol.py"),
    "text": ("tiktoken", "text.py", "tokenizer.py", "service.py"),
    "waking the readers": ("asyncio", "selectors.py"),
}
REST = "tickets, metrics, requests"


@dataclass(frozen=True)
class Load:
    """Requests that `streams` send, each its next one when its last one has ended. In tokens."""

    case: str  # HTTP, NULL or LOSE
    streams: int
    requests: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    # Models and dtypes: the first in all cases, the others with the most streams, and in float32
    # where HTTP costs most.
    subjects: tuple[tuple[str, str], ...] = (
        ("gpt2", "float32"),
        ("gpt2", "bfloat16"),
        ("stories", "float32"),
    )
    max_sequences: int = 32
    kv_memory: str = "512MiB"
    options: tuple[str, ...] = ()  # more of them, for engine and server
    # Win: streams, and the requests that they send in all.
    streams: tuple[tuple[int, int], ...] = ((1, 2), (8, 8), (32, 64))
    prompt: int = 64
    answer: int = 64
    repeats: int = 2
    null_answer: int = 256  # Null: one long request.
    null_repeats: int = 1
    lose: tuple[int, int] = (200, 8)  # requests and prompt of the least that can be asked for
    # Seconds after which a thread that waits for Python's lock asks for it: Python's own setting.
    switches: tuple[float, ...] = (0.005,)

    def loads(self, subject: tuple[str, str]) -> list[Load]:
        whole, most = subject == self.subjects[0], self.streams[-1][0]
        streams = self.streams if whole else self.streams[-1:]
        found = [Load(HTTP, *some, self.prompt, self.answer) for some in streams]
        if whole:
            found.append(Load(NULL, 1, 1, self.prompt, self.null_answer))
        if subject[1] == "float32":
            found.append(Load(LOSE, most, *self.lose, 1))
        return found

    def repeats_of(self, subject: tuple[str, str], load: Load) -> dict[str, int]:
        """How often each variant runs. A long request shows nothing new when it is watched."""
        often = self.null_repeats if load.case == NULL else self.repeats
        most = (HTTP, self.streams[-1][0])
        whole = subject == self.subjects[0] and (load.case, load.streams) == most
        more = self.switches if whole else ()
        watched = [] if load.case == NULL else [watched_name(s) for s in (SWITCH, *more)]
        return {OFFLINE: often, SERVER: often} | dict.fromkeys(watched, 1)


FULL = Plan()
QUICK = kit.quick(FULL)


def watched_name(switch: float) -> str:
    """The variant in which the engine's own process serves, with this switch interval in
    seconds."""
    return f"watched, {switch * 1e3:g} ms"


def options(plan: Plan, model: str, dtype: str, linear: str) -> list[str]:
    """The command line of the server; the engine alone is made by the same. Prefixes are not
    cached: the second run would find what the first has computed."""
    given = {
        "model": model,
        "device": "cpu",
        "dtype": dtype,
        "linear": linear,
        "kv-memory": plan.kv_memory,
        "threads": torch.get_num_threads(),
        "max-sequences": plan.max_sequences,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    weights = [] if model == "stories" else ["--random-weights"]
    return [*words, *weights, "--no-prefix-caching", *plan.options]


def clean_environment() -> dict[str, str]:
    """Without the user's own settings of a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


# ---- one run ------------------------------------------------------------------------------------


@dataclass
class Run:
    """A load, once through. Lists are by request, in the order of sending; times are
    `time.perf_counter()`."""

    seconds: float
    sent: list[float]
    times: list[list[float]]  # when there was something new: tokens, or an event
    ids: list[list[int]]
    cpu: dict[str, float]  # seconds of processor time of the "engine", the "loop", the "client"
    steps: dict[str, Any] = field(default_factory=dict)  # see `steps_of`
    parts: dict[str, float] = field(default_factory=dict)  # shares of the loop's time

    def kept(self) -> dict[str, Any]:
        first = [times[0] - sent for times, sent in zip(self.times, self.sent, strict=True)]
        between = [later - earlier for times in self.times for earlier, later in pairwise(times)]
        return {
            "seconds": self.seconds,
            "cpu": self.cpu,
            "steps": self.steps,
            "ttft": [percentile(first, share) for share in (0.5, 0.99)],
            "itl": [percentile(between, share) for share in (0.5, 0.99)] if between else None,
        }


def steps_of(records: Sequence[Any], streams: int) -> dict[str, Any]:
    """The number of passes; and of those that decode for every stream and do nothing else, medians
    in seconds: of the pass, of what in it was not the model, and from its end to the next one's
    beginning. None if there was no such pass."""
    decodes = [record.decode_tokens == streams and not record.prefill_tokens for record in records]
    full = [record for record, decode in zip(records, decodes, strict=True) if decode]
    gaps = [
        later.started - earlier.started - earlier.seconds
        for (earlier, later), both in zip(pairwise(records), pairwise(decodes), strict=True)
        if all(both)
    ]
    return {
        "passes": len(records),
        "seconds": median(record.seconds for record in full) if full else None,
        "bookkeeping": median(record.bookkeeping_seconds for record in full) if full else None,
        "between": median(gaps) if gaps else None,
    }


def run_offline(engine: Any, load: Load, prompts: Sequence[list[int]]) -> Run:
    """The engine with nothing around it: a loop that steps, and adds a request when one has
    ended."""
    engine.steps.clear()
    requests: list[Request] = []
    numbers: dict[str, int] = {}
    sent: list[float] = []
    times: list[list[float]] = [[] for _ in prompts]

    def send() -> None:
        if len(requests) < len(prompts):
            request = engine.add(Request(prompts[len(requests)], kit.greedy(load.answer)))
            numbers[request.id] = len(requests)
            requests.append(request)
            sent.append(time.perf_counter())

    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(load.streams):
        send()
    while engine.requests:
        tokens = engine.step()
        now = time.perf_counter()
        for name, token in tokens:
            times[numbers[name]].append(now)
            if token.finish_reason is not None:
                send()
    ended, used = time.perf_counter(), {"engine": time.process_time() - cpu}
    ids = [request.output.token_ids for request in requests]
    return Run(ended - started, sent, times, ids, used, steps_of(engine.steps, load.streams))


def body_of(prompt: list[int], answer: int) -> dict[str, Any]:
    """A request for exactly `answer` greedy tokens, with their ids."""
    greedily = {"max_tokens": answer, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "stream": True, "return_token_ids": True} | greedily


async def run_client(url: str, load: Load, prompts: Sequence[list[int]]) -> Run:
    """All requests of a load to the server at `url`, each stream over one connection.

    It is written on bare sockets: a library's client takes as long for an event as the server does,
    and would count as the server's time where both share two cores. Events are read when all have
    arrived. Raises RuntimeError for an invalid answer.
    """
    place = urlsplit(url)
    messages = []
    for prompt in prompts:
        body = json.dumps(body_of(prompt, load.answer)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        messages.append(head.encode() + body)
    sent = [0.0 for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    events: list[list[bytes]] = [[] for _ in prompts]
    queue = iter(range(len(prompts)))

    async def stream() -> None:
        connection = asyncio.open_connection(place.hostname, place.port, limit=LONGEST_EVENT)
        reader, writer = await connection
        with closing(writer):
            for number in queue:
                sent[number] = time.perf_counter()
                writer.write(messages[number])
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"the server answered {head.splitlines()[0].decode()}")
                while not (line := await reader.readuntil(b"\n\n")).endswith(b"data: [DONE]\n\n"):
                    times[number].append(time.perf_counter())
                    events[number].append(line)
                await reader.readuntil(b"0\r\n\r\n")  # the end of the body
        await writer.wait_closed()

    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    ended, used = time.perf_counter(), {"client": time.process_time() - cpu}
    return Run(ended - started, sent, times, [ids_of(some) for some in events], used)


def ids_of(events: Sequence[bytes]) -> list[int]:
    """The tokens in some events. Raises RuntimeError if one is an error."""
    found: list[int] = []
    for event in events:
        data = json.loads(event.partition(b"data: ")[2])
        if "error" in data:
            raise RuntimeError(f"the server broke an answer off: {data['error']['message']}")
        found += data["choices"][0]["token_ids"]
    return found


def client(url: str, load: Load, prompts: Sequence[list[int]]) -> Run:
    return asyncio.run(run_client(url, load, prompts))


# ---- processes ----------------------------------------------------------------------------------


def process(initial: Callable[..., None] | None = None, *arguments: Any) -> Executor:
    """A process of its own that runs what it is given, after `initial(*arguments)`."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initial, arguments)


class Engine:
    """What the engine's process has: made by the server's command line, and able to serve.

    As in the server, one thread computes and no other.
    """

    made: Engine

    def __init__(self, arguments: list[str]) -> None:
        for name in os.environ.keys() - clean_environment().keys():
            del os.environ[name]
        self.settings, self.thread = parse(arguments), EngineThread()
        make = partial(make_engine, self.settings)
        self.engine, self.loaded = self.thread.run(make).result()

    @classmethod
    def make(cls, arguments: list[str]) -> None:
        cls.made = cls(arguments)

    def offline(self, load: Load, prompts: Sequence[list[int]]) -> Run:
        run: Run = self.thread.run(partial(run_offline, self.engine.engine, load, prompts)).result()
        return run

    async def watched(
        self, load: Load, prompts: Sequence[list[int]], switch: float, profile: bool
    ) -> Run:
        """Serve a load to a client in another process, with `switch` seconds as Python's switch
        interval; the loop's time is divided into PARTS if it is to `profile`."""
        made = self.thread.run(lambda: (self.engine, self.loaded))
        made.result()
        app = create_app(made, self.settings, None, self.thread)
        profiler, usual = cProfile.Profile(time.thread_time), sys.getswitchinterval()
        sys.setswitchinterval(switch)
        try:
            with process() as clients:
                async with listening(app) as url:
                    self.engine.steps.clear()
                    loop, every = time.thread_time(), time.process_time()
                    if profile:
                        profiler.enable()
                    sent = clients.submit(client, url, load, prompts)
                    run = await asyncio.wrap_future(sent)
                    profiler.disable()
                    loop, every = time.thread_time() - loop, time.process_time() - every
        finally:
            sys.setswitchinterval(usual)
        run.cpu |= {"engine": every - loop, "loop": loop}
        run.steps = steps_of(list(self.engine.steps), load.streams)
        run.parts = shares(profiler) if profile else {}
        return run


def offline(load: Load, prompts: Sequence[list[int]]) -> Run:
    return Engine.made.offline(load, prompts)


def watched(load: Load, prompts: Sequence[list[int]], switch: float, profile: bool = False) -> Run:
    return asyncio.run(Engine.made.watched(load, prompts, switch, profile))


def shares(profiler: cProfile.Profile) -> dict[str, float]:
    """Shares of PARTS in the time that was profiled. A built-in function counts for its caller."""
    profiler.create_stats()
    seconds: dict[str, float] = dict.fromkeys((*PARTS, REST), 0.0)
    for (file, *_), (_, _, own, _, callers) in profiler.stats.items():
        builtin = {caller[0]: times[2] for caller, times in callers.items()} if file == "~" else {}
        for place, taken in (builtin or {file: own}).items():
            words = place.replace("\\", "/").split("/")
            part = (name for name, files in PARTS.items() if not set(files).isdisjoint(words))
            seconds[next(part, REST)] += taken
    total = sum(seconds.values())
    return {name: taken / total for name, taken in seconds.items()}


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The address at which this process serves `app`, as `python -m stage06_serving` serves its."""
    place = listen("127.0.0.1", 0)
    server = uvicorn.Server(configure(app))
    serving = asyncio.create_task(server.serve(sockets=[place]))
    try:
        while not server.started:
            if serving.done():
                raise RuntimeError("the application did not start")
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def clocks(pid: int) -> dict[str, float]:
    """Seconds of processor time so far: of the loop, which runs on the main thread, and of all
    other threads. Where the system does not number threads as Linux does, the loop's count as the
    engine's."""
    server = psutil.Process(pid)
    times, threads = server.cpu_times(), [one for one in server.threads() if one.id == pid]
    loop = sum(one.user_time + one.system_time for one in threads)
    return {"engine": times.user + times.system - loop, "loop": loop}


# ---- measuring ----------------------------------------------------------------------------------


def measure_load(
    subject: Subject, load: Load, repeats: Mapping[str, int], ways: Mapping[str, Callable[..., Run]]
) -> Group:
    """One load in turn by each of the ways, every answer proved."""
    prompts = subject.prompts([load.prompt] * load.requests)
    runs = {name: partial(ways[name], load, prompts) for name in repeats}
    found = measure.turns(runs, repeats, warmup=0)
    alone = found[OFFLINE][-1].ids
    kept = {name: [run.kept() for run in runs] for name, runs in found.items()}
    every = {
        name: [prove(subject, load, prompts, run.ids) for run in runs]
        for name, runs in found.items()
    }
    return {
        **subject.about,
        **asdict(load),
        "lengths": kit.packed([(load.prompt, load.answer)] * load.requests),
        **kit.by_variant(kept),
        "proof": {name: proofs[-1] for name, proofs in every.items()},
        "same": {name: sum(map(list.__eq__, runs[-1].ids, alone)) for name, runs in found.items()},
    }


def prove(
    subject: Subject, load: Load, prompts: Sequence[list[int]], ids: Sequence[list[int]]
) -> dict[str, Any]:
    """That every answer has its length, and is what stage 01 would choose. Raises
    AssertionError."""
    if wrong := [len(answer) for answer in ids if len(answer) != load.answer]:
        raise AssertionError(
            f"{len(wrong)} answers have another length than {load.answer}, such as {wrong[0]} "
            "tokens"
        )
    return subject.prove(map(Output, prompts, ids))


def run(plan: Plan) -> dict[str, Any]:
    results: dict[str, Any] = {HTTP: [], NULL: [], LOSE: [], "parts": {}}
    todo = [(subject, load) for subject in plan.subjects for load in plan.loads(subject)]
    with tqdm(total=len(todo), unit="load") as bar, process() as clients:
        for model, dtype in plan.subjects:
            subject = Subject(kit.shape(model), getattr(torch, dtype))
            arguments = options(plan, model, dtype, subject.about["linear"])
            with ExitStack() as stack:
                engine = stack.enter_context(process(Engine.make, arguments))
                # Both try out their linear layers, and must not do so at the same time.
                engine.submit(int).result()
                server = own_server(arguments, quiet=True, environment=clean_environment())
                serving = stack.enter_context(server)

                def by_engine(do: Any, *arguments: Any, engine: Any = engine) -> Run:
                    done: Run = engine.submit(do, *arguments).result()
                    return done

                def by_server(load: Load, prompts: Any, serving: Any = serving) -> Run:
                    before = clocks(serving.pid)
                    run: Run = clients.submit(client, serving.url, load, prompts).result()
                    now = clocks(serving.pid)
                    run.cpu |= {name: now[name] - before[name] for name in now}
                    return run

                ways: dict[str, Any] = {OFFLINE: partial(by_engine, offline), SERVER: by_server}
                for switch in (SWITCH, *plan.switches):
                    ways[watched_name(switch)] = lambda *given, by=by_engine, s=switch: by(
                        watched, *given, s
                    )
                loads = plan.loads((model, dtype))
                http = [load for load in loads if load.case == HTTP]
                most = max(http, key=lambda load: load.streams)
                warm = replace(most, requests=most.streams, answer=2)
                for name in (OFFLINE, SERVER):
                    ways[name](warm, subject.prompts([warm.prompt] * warm.requests, "warm"))
                for load in loads:
                    bar.set_postfix_str(f"{load.case}, {load.streams} streams, {model}, {dtype}")
                    repeats = plan.repeats_of((model, dtype), load)
                    results[load.case].append(measure_load(subject, load, repeats, ways))
                    bar.update()
                if not results["parts"]:
                    prompts = subject.prompts([most.prompt] * most.requests)
                    profiled = by_engine(watched, most, prompts, SWITCH, True)
                    results["parts"] = profiled.parts
    return results


# ---- predictions --------------------------------------------------------------------------------


def beside(row: Row) -> Row:
    """The engine with the server's own switch interval, watched; where nothing is, the server."""
    watched = [name for name in row.group["seconds"] if name not in (OFFLINE, SERVER)]
    return row.of(next(iter(watched), SERVER))


def python_seconds(row: Row, who: str) -> float:
    """Processor time of the "loop" or the "client" for the whole load, as it was watched."""
    return median(cpu[who] for cpu in beside(row)["cpu"])


def predicted(row: Row) -> tuple[float, float]:
    """Shares of the throughput offline that should be left, the least and the most, by what loop
    and client compute. The least: the engine stands still for all of it. The most: it takes its
    share of every processor."""
    alone = row.of(OFFLINE).median
    more = python_seconds(row, "loop") + python_seconds(row, "client")
    cpus = row.results.content["machine"]["cpus"]
    return alone / (alone + more), alone / (alone + more / cpus)


def share(row: Row) -> Summary:
    """Throughput of the server over that of the engine alone, of the pairs that ran in turn."""
    pairs = zip(row.of(OFFLINE)["seconds"], row.of(SERVER)["seconds"], strict=True)
    return summarize([alone / server for alone, server in pairs])


# ---- tables and charts --------------------------------------------------------------------------


def share_text(row: Row) -> str:
    found, (least, most) = share(row), predicted(row)
    spread = f"{found.median:.1%} ({found.low:.1%} to {found.high:.1%})"
    return f"{spread}, {least:.1%} to {most:.1%}"


def quantile(key: str, place: int) -> rows.Column:
    """The median of the runs, in ms."""

    def text(row: Row) -> str:
        runs = row[key]
        return f"{median(run[place] for run in runs) * 1e3:,.1f}" if all(runs) else ""

    return text


def busy(who: str) -> rows.Column:
    """Processors that the engine, the loop or the client kept busy on average."""

    def text(row: Row) -> str:
        pairs = zip(row["cpu"], row["seconds"], strict=True)
        found = [cpu[who] / seconds for cpu, seconds in pairs if who in cpu]
        return f"{median(found):.2f}" if found else ""

    return text


def both(results: Results) -> list[Row]:
    """The engine alone and the server, in all cases."""
    groups = [row for case in (HTTP, NULL, LOSE) for row in results.groups(case)]
    return [row.of(name) for row in groups for name in (OFFLINE, SERVER)]


def pass_of(row: Row) -> dict[str, float]:
    """Medians of some runs: seconds of a pass that decodes for all streams, of what in it is not
    the model, and from its end to the next one. Empty if they had no such pass."""
    names, runs = ("seconds", "bookkeeping", "between"), row["steps"]
    if any(steps.get(name) is None for steps in runs for name in names):
        return {}
    return {name: median(steps[name] for steps in runs) for name in names}


def passes(results: Results) -> list[Row]:
    """The engine's thread, alone and beside the loop."""
    return [row for row in results.rows(HTTP) if pass_of(row) and pass_of(row.of(OFFLINE))]


def longer(row: Row) -> float:
    """Seconds that a pass and the way to the next one take longer than alone."""
    alone, own = pass_of(row.of(OFFLINE)), pass_of(row)
    return sum(own[key] - alone[key] for key in ("seconds", "between"))


def a_pass(row: Row, who: str) -> float:
    """Processor time of the loop or the client, in seconds a pass."""
    runs = zip(row["cpu"], row["steps"], strict=True)
    return median(cpu[who] / steps["passes"] for cpu, steps in runs)


def watched_only(value: Callable[[Row], str]) -> rows.Column:
    return lambda row: "" if row.variant == OFFLINE else value(row)


def in_ms(row: Row, *keys: str) -> str:
    return ", ".join(f"{pass_of(row)[key] * 1e3:.2f}" for key in keys)


def main_row(results: Results) -> Row:
    """The first model with the most streams."""
    first, *_ = results.groups(HTTP)
    own = results.groups(HTTP, model=first["model"], dtype=first["dtype"])
    return max(own, key=lambda row: row["streams"])


def loop_parts(results: Results) -> dict[str, float]:
    """Microseconds a token on the loop, part by part."""
    row = main_row(results)
    total = python_seconds(row, "loop") / row.tokens * 1e6
    return {name: part * total for name, part in results["parts"].items()}


def token_lines(results: Results) -> list[dict[str, str]]:
    """A token's way on the loop."""
    found, row = loop_parts(results), main_row(results)
    total, own = sum(found.values()), python_seconds(row, "client") / row.tokens * 1e6
    shares = {name: f"{part / total:.0%}" for name, part in found.items()}
    found |= {"**all of it**": total, "the client, in its own process": own}
    return [
        {"on the loop": name, "us a token": f"{part:.1f}", "share": shares.get(name, "")}
        for name, part in found.items()
    ]


def a_request(who: str) -> rows.Column:
    return lambda row: f"{python_seconds(row, who) / row['requests'] * 1e6:,.0f}"


def requests_a_second(variant: str) -> rows.Column:
    return lambda row: summarize(row.of(variant)["seconds"]).of(row["requests"]).show()


COLUMNS: dict[str, rows.Column] = {
    "engine's thread": "variant",
    "step, ms": lambda row: in_ms(row, "seconds", "bookkeeping"),
    "until the next, ms": lambda row: in_ms(row, "between"),
    "longer than alone, ms": watched_only(lambda row: f"{longer(row) * 1e3:.2f}"),
    "the loop, ms": watched_only(lambda row: f"{a_pass(row, 'loop') * 1e3:.2f}"),
    "the client, ms": watched_only(lambda row: f"{a_pass(row, 'client') * 1e3:.2f}"),
    "longer over the loop's": watched_only(lambda row: f"{longer(row) / a_pass(row, 'loop'):.1f}x"),
    "model": lambda row: f"{row['model']}, {row['dtype']}",
    "requests": lambda row: row["requests"],
    "alone, tok/s": lambda row: row.of(OFFLINE).rate.show(),
    "server, tok/s": lambda row: row.of(SERVER).rate.show(),
    "share, predicted": share_text,
    "same tokens": lambda row: (row if row.variant else row.of(SERVER)).alike(OFFLINE, "alone"),
    **{f"TTFT {name}, ms": quantile("ttft", at) for at, name in enumerate(("p50", "p99"))},
    **{f"ITL {name}, ms": quantile("itl", at) for at, name in enumerate(("p50", "p99"))},
    **{f"CPUs: {who}": busy(who) for who in ("engine", "loop", "client")},
    "alone, requests/s": requests_a_second(OFFLINE),
    "server, requests/s": requests_a_second(SERVER),
    "steps": lambda row: ", ".join(
        f"{median(steps['passes'] for steps in one['steps']):.0f}"
        for one in (row.of(OFFLINE), beside(row))
    ),
    "loop, us a request": a_request("loop"),
    "client, us a request": a_request("client"),
}
LOADS = "model | streams | alone, tok/s | server, tok/s | share, predicted | same tokens"
TABLES = rows.tables(
    COLUMNS,
    f"""
    http: {LOADS}
    null: {LOADS}
    latency: model | streams | requests | answer | engine | TTFT p50, ms | TTFT p99, ms
      | ITL p50, ms | ITL p99, ms | CPUs: engine | CPUs: loop | CPUs: client
    lose: model | streams | alone, requests/s | server, requests/s | share, predicted | steps
      | loop, us a request | client, us a request | same tokens
    passes: dtype | streams | engine's thread | step, ms | until the next, ms
      | longer than alone, ms | the loop, ms | the client, ms | longer over the loop's
    """,
    tokens=token_lines,
    passes=passes,
    latency=both,
)


def http_chart(results: Results) -> Figure:
    """Share of the throughput offline by streams, of the first model; with both predictions."""
    first = main_row(results)
    own = results.groups(HTTP, model=first["model"], dtype=first["dtype"])
    found, forecast = [share(row) for row in own], [predicted(row) for row in own]
    aim = f"aim at {first['streams']}"
    return charts.lines(
        "What is left of the engine's throughput behind HTTP",
        f"streams (GPT-2 124M shape, {first['dtype']})",
        "% of the tok/s of the engine alone",
        [row["streams"] for row in own],
        {
            "server": [100 * one.median for one in found],
            "if no request waits": [100 * most for _, most in forecast],
            "if the engine waits": [100 * least for least, _ in forecast],
            aim: [100 * AIM for _ in own],
        },
        spread={"server": [(100 * one.low, 100 * one.high) for one in found]},
        dashed=("if no request waits", "if the engine waits", aim),
        log_x=True,
    )


def where_chart(results: Results) -> Figure:
    """What a token costs beside its step: how much longer the engine's thread takes, and the
    loop."""
    row = main_row(results)
    alone, watched = pass_of(row.of(OFFLINE)), pass_of(beside(row))
    found: dict[str, float] = {}
    if alone and watched:
        names = {"seconds": "thread: longer step", "between": "thread: longer until the next"}
        for key, name in names.items():
            found[name] = (watched[key] - alone[key]) / row["streams"] * 1e6
    found |= {f"loop: {name}": part for name, part in loop_parts(results).items()}
    found["client"] = python_seconds(row, "client") / row.tokens * 1e6
    title = "What a token costs beside its step"
    x = f"microseconds a token, {row['streams']} streams (GPT-2 124M shape, {row['dtype']})"
    shown = {"beside the loop": [max(0.0, cost) for cost in found.values()]}
    return charts.bars(title, x, list(found), shown)


def headline(results: Results) -> str:
    row = main_row(results)
    return (
        f"{share(row).median:.0%} of the offline engine's tok/s behind HTTP, {row['streams']} "
        f"streams (GPT-2 124M shape, {row['dtype']})"
    )


ABOUT = "Measures the server against the engine alone on this CPU."
CHARTS = {"http": http_chart, "where": where_chart}
BENCHMARK = kit.Benchmark("stage06_serving", ABOUT, FULL, QUICK, run, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
