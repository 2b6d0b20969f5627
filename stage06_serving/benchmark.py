"""What HTTP costs, where it costs nothing, and where it costs most: `python -m stage06_serving.benchmark`.

Writes reports/<machine>/stage06_serving.json; `python -m shared.bench.report` turns it into tables and charts. The engine of stage 05,
in a process of its own with nothing around it, and a server process (`python -m stage06_serving`) with clients in another one,
run in turn: the same weights, dtype, threads, memory and requests, and the same number of them in hand at a time.

The engine's process can serve too, with everything in it being watched: every pass, and the processor time of each thread. So
the same engine is seen alone and beside the event loop. What is written down of a token's way on the loop is measured with the
server's own functions on tokens that nobody has computed.

Every answer is proved: one pass over prompt and answer alone, without cache or neighbours, must choose the same tokens. Nothing
is written if one differs.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import uvicorn
from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, measure
from shared.bench import benchmarks
from shared.bench.tables import limits_table, median
from shared.cli import Loaded
from shared.parity import random_prompt
from shared.server import own_server
from stage01_forward.generation import Output, Token
from stage01_forward.params import SamplingParams
from stage02_kv_cache.benchmark import greedy, proof_text
from stage03_batching.benchmark import Subject
from stage04_continuous.benchmark import percentile
from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage05_paged.records import BlocksRecord

from .__main__ import SWITCH, listen, make_engine
from .app import Api, create_app
from .async_engine import AsyncEngine, EngineThread, Step, Ticket
from .engines import Paged
from .protocol import CompletionBody
from .service import Service
from .settings import PREFIX, Settings, parse

STAGE = "stage06_serving"
HTTP, NULL, LOSE = "http", "null", "lose"
OFFLINE, SERVER = "engine alone", "server"
AIM = 0.95  # share of the throughput offline, at the most streams
LONGEST_EVENT = 2**20  # bytes
PARTS = ("waking the readers", "text", "chunk and JSON", "HTTP and socket")
REST = "tickets, metrics, requests"


@dataclass(frozen=True)
class Load:
    """So many requests, sent by `streams` that each send their next one when their last one has ended. Lengths in tokens."""

    case: str  # HTTP, NULL or LOSE
    streams: int
    requests: int
    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return self.requests * self.answer


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    # Models and dtypes. The first is measured in all cases, the others with the most streams, and in float32 where it loses.
    subjects: tuple[tuple[str, str], ...] = (
        ("gpt2", "float32"),
        ("gpt2", "bfloat16"),
        ("stories", "float32"),
    )
    max_sequences: int = 32
    kv_memory: str = "512MiB"
    options: tuple[str, ...] = ()  # more of them, for engine and server
    # Win: streams, and how many requests they send in all.
    streams: tuple[tuple[int, int], ...] = ((1, 2), (8, 8), (32, 64))
    prompt: int = 64
    answer: int = 64
    repeats: int = 3
    # Null: one request, nearly as long as the context.
    null_answer: int = 900
    null_repeats: int = 1
    # Lose: the least that can be asked for, by the most streams.
    lose_requests: int = 200
    lose_prompt: int = 8
    # Seconds after which a thread that waits for Python's lock asks for it, beside the server's own setting: Python's.
    switches: tuple[float, ...] = (0.005,)

    def loads(self, subject: tuple[str, str]) -> list[Load]:
        whole, most = subject == self.subjects[0], self.streams[-1][0]
        found = [
            Load(HTTP, *each, self.prompt, self.answer)
            for each in self.streams[0 if whole else -1 :]
        ]
        if whole:
            found.append(Load(NULL, 1, 1, self.prompt, self.null_answer))
        if subject[1] == "float32":
            found.append(Load(LOSE, most, self.lose_requests, self.lose_prompt, 1))
        return found

    def switches_of(self, subject: tuple[str, str], load: Load) -> list[float]:
        """Seconds of the switch intervals with which the load is watched, the server's first. A long request tells no more."""
        if load.case == NULL:
            return []
        more = self.switches if load.case == HTTP and subject == self.subjects[0] else ()
        return [SWITCH, *more]

    def repeats_of(self, load: Load) -> int:
        """How often the engine alone and the server run; what is watched runs once."""
        return self.null_repeats if load.case == NULL else self.repeats

    @property
    def runs(self) -> int:
        """How many timed runs that is."""
        every = [(each, load) for each in self.subjects for load in self.loads(each)]
        return sum(
            2 * self.repeats_of(load) + len(self.switches_of(each, load)) for each, load in every
        )


FULL = Plan()
QUICK = Plan(
    subjects=(("gpt2", "float32"),), streams=((1, 1), (32, 32)), answer=24, repeats=2, null_answer=128, null_repeats=1,
    lose_requests=96,
)  # fmt: skip


def watched_name(switch: float) -> str:
    """Of the variant in which the engine's own process serves, with this switch interval in seconds."""
    return f"watched, {switch * 1e3:g} ms"


def options(plan: Plan, model: str, dtype: str, linear: str) -> list[str]:
    """The command line of the server; the engine alone is made by the same.

    Prefixes are not cached: the second run would find what the first has computed.
    """
    weights = [] if model == "stories" else ["--random-weights"]
    return [
        "--model", model, *weights, "--device", "cpu", "--dtype", dtype, "--linear", linear,
        "--threads", str(torch.get_num_threads()), "--max-sequences", str(plan.max_sequences), "--kv-memory", plan.kv_memory,
        "--no-prefix-caching", "--port", "0", *plan.options,
    ]  # fmt: skip


# ---- one run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A load, once through. Lists are by request, in the order of sending; times are `time.perf_counter()`."""

    seconds: float
    sent: list[float]
    times: list[list[float]]  # when there was something new: tokens, or an event
    ids: list[list[int]]
    cpu: dict[
        str, float
    ]  # seconds of processor time, by who took them: "engine", "loop" or "client"
    steps: dict[str, Any]  # see `steps_of`

    def told(self) -> dict[str, Any]:
        """What is kept of it."""
        first = [times[0] - sent for times, sent in zip(self.times, self.sent, strict=True)]
        between = [
            later - earlier
            for times in self.times
            for earlier, later in zip(times, times[1:], strict=False)
        ]
        return {
            "seconds": self.seconds, "cpu": self.cpu, "steps": self.steps,
            "ttft": [percentile(first, share) for share in (0.5, 0.99)],
            "itl": [percentile(between, share) for share in (0.5, 0.99)] if between else None,
        }  # fmt: skip


def steps_of(records: Sequence[BlocksRecord], streams: int) -> dict[str, Any]:
    """How many passes there were; and of those that decode for every stream and do nothing else, medians in seconds: of the pass,
    of what in it was not the model, and from its end to the beginning of the next one. None if there was no such pass."""
    decodes = [record.decode_tokens == streams and not record.prefill_tokens for record in records]
    full = [record for record, decode in zip(records, decodes, strict=True) if decode]
    gaps = [
        later.started - earlier.started - earlier.seconds
        for earlier, later, *both in zip(records, records[1:], decodes, decodes[1:], strict=False)
        if all(both)
    ]
    return {
        "passes": len(records),
        "seconds": median([record.seconds for record in full]) if full else None,
        "bookkeeping": median([record.bookkeeping_seconds for record in full]) if full else None,
        "between": median(gaps) if gaps else None,
    }


def run_offline(
    engine: Engine,
    load: Load,
    prompts: Sequence[list[int]],
    after_step: Callable[[], object] = lambda: None,
) -> Run:
    """The engine with nothing around it: a loop that makes steps, and adds a request whenever one has ended."""
    engine.steps.clear()
    requests: list[Request] = []
    numbers: dict[str, int] = {}
    sent: list[float] = []
    times: list[list[float]] = [[] for _ in prompts]

    def send() -> None:
        if len(requests) < len(prompts):
            request = engine.add(Request(prompts[len(requests)], greedy(load.answer)))
            numbers[request.id] = len(requests)
            requests.append(request)
            sent.append(time.perf_counter())

    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(load.streams):
        send()
    while engine.scheduler.unfinished:
        said = engine.step()
        now = time.perf_counter()
        for name, token in said:
            times[numbers[name]].append(now)
            if token.finish_reason is not None:
                send()
        after_step()
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    ids = [request.output.token_ids for request in requests]
    return Run(
        ended - started,
        sent,
        times,
        ids,
        {"engine": cpu},
        steps_of(list[Any](engine.steps), load.streams),
    )


def body_of(prompt: list[int], answer: int) -> dict[str, Any]:
    """A request for exactly `answer` greedy tokens, which are to be told by their ids too."""
    return {
        "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip


async def run_client(url: str, load: Load, prompts: Sequence[list[int]]) -> Run:
    """All requests of a load to the server at `url`, each stream over one connection.

    It is written on bare sockets: a library's client takes as long for an event as the server does, and where both share two
    cores that would pass for the server's time. What events say is looked at when all of them are there. Raises RuntimeError
    for an answer that is none.
    """
    place = urlsplit(url)
    messages = []
    for prompt in prompts:
        body = json.dumps(body_of(prompt, load.answer)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        messages.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    sent = [0.0 for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    events: list[list[bytes]] = [[] for _ in prompts]
    queue = iter(range(len(prompts)))

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(
            place.hostname, place.port, limit=LONGEST_EVENT
        )
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
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    return Run(ended - started, sent, times, [ids_of(each) for each in events], {"client": cpu}, {})


def ids_of(events: Sequence[bytes]) -> list[int]:
    """The tokens that some events tell of. Raises RuntimeError if one is an error."""
    found: list[int] = []
    for each in events:
        data = json.loads(each.partition(b"data: ")[2])
        if "error" in data:
            raise RuntimeError(f"the server broke an answer off: {data['error']['message']}")
        found += data["choices"][0]["token_ids"]
    return found


# ---- processes ----------------------------------------------------------------------------------------------------------


class Helper:
    """A process of its own that runs `target(connection, *arguments)` and does what it is asked."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=target, args=(theirs, *arguments), name=target.__name__, daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """Its answer. Raises RuntimeError if it has ended instead; it has said why."""
        self.connection.send(question)
        return self.answer()

    def answer(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.process.name} has ended, and said why") from None

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # that ends it
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def questions(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """What the helper is asked, until there is nobody who could ask."""
    try:
        while True:
            yield connection.recv()
    except EOFError:
        return


def client_process(connection: Connection) -> None:
    """Sends loads: asked (url, load, prompts), answers a Run."""
    for asked in questions(connection):
        connection.send(asyncio.run(run_client(*asked)))


def engine_process(connection: Connection, arguments: list[str]) -> None:
    """The engine that the server's command line makes. Asked ("offline", load, prompts) it answers a Run; the other two kinds of
    question serve meanwhile: see `watched` and `parts`."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    settings = parse(arguments)
    thread = EngineThread()  # as in the server: nobody else may compute
    engine, loaded = thread.run(lambda: make_engine(settings)).result()
    assert isinstance(engine, Paged)
    connection.send("ready")
    for kind, *asked in questions(connection):
        if kind == "offline":
            connection.send(thread.run(partial(run_offline, engine.engine, *asked)).result())
        elif kind == "watched":
            connection.send(
                asyncio.run(watched(connection, thread, engine, loaded, settings, *asked))
            )
        else:
            connection.send(
                asyncio.run(parts(connection, thread, engine, loaded, settings, *asked))
            )


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The address at which `app` is served by this process, as `python -m stage06_serving` serves its own."""
    place = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http="h11", ws="none", server_header=False
    )
    server = uvicorn.Server(config)
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


async def watched(
    connection: Connection,
    thread: EngineThread,
    engine: Paged,
    loaded: Loaded,
    settings: Settings,
    load: Load,
    switch: float,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Serve one load, with `switch` seconds as Python's switch interval: tells the address, and is told when all is answered.

    Returns processor time of "engine" (all threads but the loop's) and "loop", and what `steps_of` makes of the passes.
    """
    app = create_app(engine, loaded, settings, None, thread)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(switch)
    try:
        async with listening(app) as url:
            records: list[BlocksRecord] = []

            def keep(step: Step, spoke: list[Ticket], ended: list[Ticket]) -> None:
                if step.record is not None:
                    records.append(step.record)

            app.state.engine.listeners.append(keep)
            loop, process = time.thread_time(), time.process_time()
            connection.send(url)
            await asyncio.to_thread(connection.recv)
            loop, process = time.thread_time() - loop, time.process_time() - process
    finally:
        sys.setswitchinterval(usual)
    return {"engine": process - loop, "loop": loop}, steps_of(records, load.streams)


def clocks(server: psutil.Process) -> dict[str, float]:
    """Seconds of processor time so far: of the loop, which runs on the main thread, and of all other threads.

    Where the system does not number threads as Linux does, the loop's counts as the engine's.
    """
    times = server.cpu_times()
    loop = sum(
        each.user_time + each.system_time for each in server.threads() if each.id == server.pid
    )
    return {"engine": times.user + times.system - loop, "loop": loop}


# ---- a token's way on the loop, part by part ----------------------------------------------------------------------------


class MadeUp:
    """Stands where the AsyncEngine does, and says tokens that nobody has computed: one to everybody at each tick."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.tickets: list[Ticket] = []  # of those that have begun to read

    def submit(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], salt: bytes
    ) -> list[list[Ticket]]:
        return [
            [
                Ticket("made up", len(prompt), each, time.perf_counter(), asyncio.Event())
                for each in sampling
            ]
            for prompt in prompts
        ]

    def tick(self) -> None:
        for ticket in self.tickets:
            ticket.news.set()

    async def tokens(
        self, tickets: Sequence[Ticket], deadline: float
    ) -> AsyncIterator[tuple[Ticket, list[Token]]]:
        (ticket,) = tickets
        self.tickets.append(ticket)
        for left, each in zip(reversed(range(len(self.ids))), self.ids, strict=True):
            await ticket.news.wait()
            ticket.news.clear()
            yield ticket, [Token(each, None, None if left else "length")]

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """Nobody computes it."""


async def parts(
    connection: Connection,
    thread: EngineThread,
    engine: Paged,
    loaded: Loaded,
    settings: Settings,
    load: Load,
) -> dict[str, float]:
    """Seconds of processor time that a token takes on the loop in each of PARTS, with as many streams as `load` has requests.

    Made-up tokens go ever further on the way of real ones, from one measurement to the next, and the difference is the part. They
    come at the pace of real passes, which another thread makes meanwhile: in a loop that did nothing else everything would be in
    the processor's cache, and nobody would hold Python's lock. For the last part, tells an address and is told when all is
    answered.
    """
    prompts = [
        random_prompt(load.prompt, loaded.config, f"made up {number}")
        for number in range(load.requests)
    ]
    body = CompletionBody.model_validate(body_of(prompts[0], load.answer))
    loop = asyncio.get_running_loop()

    def new_service() -> tuple[MadeUp, Service]:
        made_up: Any = MadeUp(random_prompt(load.answer, loaded.config, "made up"))
        return made_up, Service(made_up, loaded, loaded.config.name, None, settings.request_timeout)

    async def waking(service: Service) -> AsyncIterator[object]:
        (choice,) = await service.complete(body, b"")
        return service.engine.tokens([choice.ticket], math.inf)

    async def text(service: Service) -> AsyncIterator[object]:
        return service.pieces(await service.complete(body, b""), math.inf)

    async def chunk(service: Service) -> AsyncIterator[object]:
        response: Any = await Api(service).complete(
            HTTPRequest({"type": "http", "tenant": b""}), body
        )
        return response.body_iterator

    async def read(items: AsyncIterator[object]) -> None:
        async for _ in items:
            pass

    async def cost(
        made_up: MadeUp, answered: Awaitable[object], serving: AsyncEngine | None = None
    ) -> float:
        """Processor time of the loop until all is `answered`, from when everybody has begun to read. While it is `serving`, the
        engine's thread is reached through that."""
        while len(made_up.tickets) < load.requests:
            await asyncio.sleep(0.001)
        started = time.thread_time()
        tick = partial(loop.call_soon_threadsafe, made_up.tick)
        if serving is None:
            await asyncio.wrap_future(thread.run(partial(run_offline, engine.engine, load, prompts, tick)))
        else:
            await serving.call(lambda _: run_offline(engine.engine, load, prompts, tick))
        await answered
        return (time.thread_time() - started) / load.tokens

    costs = [0.0]
    for way in (waking, text, chunk):
        made_up, service = new_service()
        costs.append(
            await cost(made_up, asyncio.gather(*[read(await way(service)) for _ in prompts]))
        )
    app = create_app(engine, loaded, settings, None, thread)
    async with listening(app) as url:
        made_up, service = new_service()
        app.state.api = Api(service)
        connection.send(url)
        costs.append(await cost(made_up, asyncio.to_thread(connection.recv), app.state.engine))
    return {name: more - less for name, (less, more) in zip(PARTS, pairwise(costs), strict=True)}


# ---- measuring ----------------------------------------------------------------------------------------------------------


def measure_load(
    subject: Subject,
    load: Load,
    repeats: int,
    switches: Sequence[float],
    engine: Helper,
    client: Helper,
    server: tuple[str, psutil.Process],
    bar: tqdm,
) -> dict[str, Any]:
    """One load in turn by the engine alone, by the server, and, once for each of `switches`, by the engine's process serving."""
    prompts = [
        random_prompt(load.prompt, subject.config, f"request {number}")
        for number in range(load.requests)
    ]
    url, process = server

    def over_http() -> Run:
        before = clocks(process)
        run: Run = client.ask(url, load, prompts)
        run.cpu |= {name: seconds - before[name] for name, seconds in clocks(process).items()}
        return run

    def by_engine(switch: float) -> Run:
        address = engine.ask("watched", load, switch)
        run: Run = client.ask(address, load, prompts)
        cpu, run.steps = engine.ask("answered")
        run.cpu |= cpu
        return run

    ways: dict[str, Callable[[], Run]] = {
        OFFLINE: lambda: engine.ask("offline", load, prompts),
        SERVER: over_http,
    }
    ways |= {watched_name(switch): partial(by_engine, switch) for switch in switches}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    said: dict[str, list[list[int]]] = {}
    proof: dict[str, Any] = {}
    for number, names in enumerate(measure.rounds(list(ways), repeats)):
        for name in names:
            if number == 0 or name in (OFFLINE, SERVER):
                run = ways[name]()
                runs[name].append(run.told())
                said[name] = run.ids
                proof[name] = prove(subject, load, prompts, run.ids)
                bar.update()
    return {
        **subject.about, **asdict(load), "runs": runs, "proof": proof,
        "same": {name: sum(a == b for a, b in zip(ids, said[OFFLINE], strict=True)) for name, ids in said.items()},
    }  # fmt: skip


def prove(
    subject: Subject, load: Load, prompts: Sequence[list[int]], ids: Sequence[list[int]]
) -> dict[str, Any]:
    """That every answer is as long as it should be, and what the model says. Raises AssertionError."""
    if wrong := [len(each) for each in ids if len(each) != load.answer]:
        raise AssertionError(
            f"{len(wrong)} answers of {wrong[0]} tokens and the like, where {load.answer} were asked for"
        )
    return subject.prove(
        [Output(prompt, answer) for prompt, answer in zip(prompts, ids, strict=True)]
    )


def measure_parts(load: Load, engine: Helper, client: Helper) -> dict[str, float]:
    """Seconds a token of each of PARTS."""
    address = engine.ask("parts", load)
    client.ask(address, load, [[0] * load.prompt] * load.requests)
    return engine.ask("answered")


def measure_all(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything that `plan` says: configuration, results, limits."""
    limits = measure.limits(refresh=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    results: dict[str, Any] = {HTTP: [], NULL: [], LOSE: [], "parts": {}}
    with tqdm(total=plan.runs, unit="run") as bar, Helper(client_process) as client:
        for model, dtype in plan.subjects:
            subject = Subject(
                checkpoint.load(model, random_weights=model != "stories"), getattr(torch, dtype)
            )
            arguments = options(plan, model, dtype, subject.about["linear"])
            loads = plan.loads((model, dtype))
            with ExitStack() as stack:
                engine = stack.enter_context(Helper(engine_process, arguments))
                engine.answer()  # it is ready: both try out their linear layers, and must not do so at the same time
                own = stack.enter_context(own_server(arguments, True, environment))
                server = own.url, psutil.Process(own.pid)
                most = max(
                    (load for load in loads if load.case == HTTP), key=lambda load: load.streams
                )
                warm = replace(most, requests=most.streams, answer=2)
                prompts = [
                    random_prompt(warm.prompt, subject.config, f"warm {number}")
                    for number in range(warm.requests)
                ]
                engine.ask("offline", warm, prompts)
                client.ask(server[0], warm, prompts)
                for load in loads:
                    switches = plan.switches_of((model, dtype), load)
                    found = measure_load(
                        subject, load, plan.repeats_of(load), switches, engine, client, server, bar
                    )
                    results[load.case].append(found)
                if not results["parts"]:
                    results["parts"] = measure_parts(
                        replace(most, requests=most.streams), engine, client
                    )
    return {"plan": asdict(plan)}, results, limits


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes."""
    configuration, results, limits = measure_all(QUICK if quick else FULL)
    return {"quick": quick, **configuration}, results, limits


# ---- predictions ------------------------------------------------------------------------------------------------------


def watched_runs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those with the server's own switch interval, the first that are watched; where nothing is, the server itself."""
    return next(
        (runs for name, runs in row["runs"].items() if name not in (OFFLINE, SERVER)),
        row["runs"][SERVER],
    )


def python_seconds(row: Mapping[str, Any], who: str) -> float:
    """Processor time of the "loop" or the "client" for the whole load, as it was watched."""
    return median([run["cpu"][who] for run in watched_runs(row)])


def predicted(results: dict[str, Any], row: Mapping[str, Any]) -> tuple[float, float]:
    """Shares of the throughput offline that should be left, the least and the most, by what loop and client compute.

    The least: the engine stands still for all of it. The most: it takes its share of every processor, and nobody waits.
    """
    alone = median(values(row, OFFLINE, "seconds"))
    more = python_seconds(row, "loop") + python_seconds(row, "client")
    return alone / (alone + more), alone / (alone + more / results["machine"]["cpus"])


# ---- from results to tables and charts ----------------------------------------------------------------------------------


def values(row: Mapping[str, Any], name: str, key: str) -> list[float]:
    """One figure of every run of a variant."""
    return [run[key] for run in row["runs"][name]]


def share(row: Mapping[str, Any]) -> measure.Summary:
    """Throughput of the server over that of the engine alone: the median of the pairs that ran side by side, and their range."""
    pairs = zip(values(row, OFFLINE, "seconds"), values(row, SERVER, "seconds"), strict=True)
    return measure.summarize([alone / server for alone, server in pairs])


def share_text(results: dict[str, Any], row: Mapping[str, Any], name: str) -> str:
    """Two cells: the share of the throughput offline, and what was predicted."""
    if name == OFFLINE:
        return " | "
    found, (least, most) = share(row), predicted(results, row)
    return f"{found.median:.1%} ({found.low:.1%} to {found.high:.1%}) | {least:.1%} to {most:.1%}"


def percentiles(row: Mapping[str, Any], name: str, key: str) -> str:
    """Two cells: p50 and p99 in ms, each the median of the runs."""
    found = [run[key] for run in row["runs"][name]]
    return (
        " | ".join(f"{median([each[i] for each in found]) * 1e3:,.1f}" for i in (0, 1))
        if all(found)
        else " | "
    )


def same_text(row: Mapping[str, Any], name: str) -> str:
    proof = proof_text(row["proof"][name])
    return (
        proof
        if name == OFFLINE
        else f"{proof}; {row['same'][name]} of {row['requests']} answers as alone"
    )


def busy(row: Mapping[str, Any], name: str) -> str:
    """Three cells: processors that engine, loop and client kept busy on average."""
    runs = row["runs"][name]
    cells = [
        [run["cpu"][who] / run["seconds"] for run in runs if who in run["cpu"]]
        for who in ("engine", "loop", "client")
    ]
    return " | ".join(f"{median(cell):.2f}" if cell else "" for cell in cells)


def http_table(results: dict[str, Any]) -> str:
    return load_table(results, results["results"][HTTP])


def null_table(results: dict[str, Any]) -> str:
    return load_table(results, results["results"][NULL])


def load_table(results: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The engine alone and the server, with what was predicted, latencies, and who kept how many processors busy."""
    lines = [
        "| model | dtype | streams | requests | answer | engine | tok/s | share | predicted | TTFT p50, ms | p99, ms "
        "| ITL p50, ms | p99, ms | CPUs: engine | loop | client | same tokens |",
        "|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        for name in (OFFLINE, SERVER):
            rate = measure.summarize(values(row, name, "seconds")).of(
                row["requests"] * row["answer"]
            )
            lines.append(
                f"| {row['model']} | {row['dtype']} | {row['streams']} | {row['requests']} | {row['answer']} | {name} "
                f"| {rate.show()} | {share_text(results, row, name)} | {percentiles(row, name, 'ttft')} "
                f"| {percentiles(row, name, 'itl')} | {busy(row, name)} | {same_text(row, name)} |"
            )
    return "\n".join(lines)


def lose_table(results: dict[str, Any]) -> str:
    lines = [
        "| model | streams | requests | prompt | engine | requests/s | share | predicted | passes | TTFT p50, ms | p99, ms "
        "| loop, us a request | client, us a request | same tokens |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"][LOSE]:
        for name in (OFFLINE, SERVER):
            rate = measure.summarize(values(row, name, "seconds")).of(row["requests"])
            runs = row["runs"][OFFLINE] if name == OFFLINE else watched_runs(row)
            each = [python_seconds(row, who) / row["requests"] * 1e6 for who in ("loop", "client")]
            lines.append(
                f"| {row['model']} | {row['streams']} | {row['requests']} | {row['prompt']} | {name} | {rate.show()} "
                f"| {share_text(results, row, name)} | {median([run['steps']['passes'] for run in runs]):.0f} "
                f"| {percentiles(row, name, 'ttft')} | {' | ' if name == OFFLINE else f'{each[0]:,.0f} | {each[1]:,.0f}'} "
                f"| {same_text(row, name)} |"
            )
    return "\n".join(lines)


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass that decodes for all streams: itself, what in it is not the model, from its end to the next one."""

    seconds: float
    bookkeeping: float
    between: float


def pass_of(runs: Sequence[Mapping[str, Any]]) -> Pass | None:
    """The medians of some runs; None if they had no such pass."""
    found = [[run["steps"][key] for run in runs] for key in ("seconds", "bookkeeping", "between")]
    return None if None in sum(found, []) else Pass(*map(median, found))


def steps_table(results: dict[str, Any]) -> str:
    """The engine's thread: passes that decode for all streams, alone and beside the loop. A table for the lock's sake too: how
    many times its own time the loop costs the engine, with the server's switch interval and with others."""
    lines = [
        "| dtype | streams | the engine's thread | pass, ms | of it not the model | until the next, ms | longer than alone, ms "
        "| the loop computes, ms | the client, ms | longer by, over the loop's |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["results"][HTTP]:
        alone = pass_of(row["runs"][OFFLINE])
        for name, runs in row["runs"].items():
            found = None if name == SERVER else pass_of(runs)
            if found is None or alone is None:
                continue
            cells = ["", "", "", ""]
            if name != OFFLINE:
                longer = found.seconds + found.between - alone.seconds - alone.between
                loop, client = (
                    median([run["cpu"][who] / run["steps"]["passes"] for run in runs])
                    for who in ("loop", "client")
                )
                cells = [
                    f"{longer * 1e3:.2f}",
                    f"{loop * 1e3:.2f}",
                    f"{client * 1e3:.2f}",
                    f"{longer / loop:.1f}x",
                ]
            lines.append(
                f"| {row['dtype']} | {row['streams']} | {'alone' if name == OFFLINE else name} | {found.seconds * 1e3:.2f} "
                f"| {found.bookkeeping * 1e3:.2f} | {found.between * 1e3:.2f} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def main_row(results: dict[str, Any]) -> dict[str, Any]:
    """The first model with the most streams."""
    rows = results["results"][HTTP]
    return max((row for row in rows if row["dtype"] == rows[0]["dtype"] and row["model"] == rows[0]["model"]),
               key=lambda row: row["streams"])  # fmt: skip


def loop_parts(results: dict[str, Any]) -> dict[str, float]:
    """Microseconds a token on the loop, part by part; the rest is what the loop took in all, less those."""
    row = main_row(results)
    found = {name: seconds * 1e6 for name, seconds in results["results"]["parts"].items()}
    total = python_seconds(row, "loop") / (row["requests"] * row["answer"]) * 1e6
    return found | {REST: total - sum(found.values())}


def tokens_table(results: dict[str, Any]) -> str:
    """A token's way on the loop; and below it the engine's thread."""
    row, found = main_row(results), loop_parts(results)
    total = sum(found.values())
    lines = [
        f"| on the loop, {row['streams']} streams, {row['dtype']} | us a token | share |",
        "|---|--:|--:|",
    ]
    lines += [f"| {name} | {part:.1f} | {part / total:.0%} |" for name, part in found.items()]
    client = python_seconds(row, "client") / (row["requests"] * row["answer"]) * 1e6
    lines += [
        f"| **all of it** | {total:.1f} | |",
        f"| the client, in its own process | {client:.1f} | |",
    ]
    return "\n".join(lines) + "\n\n" + steps_table(results)


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "http": http_table(results),
        "tokens": tokens_table(results),
        "null": null_table(results),
        "lose": lose_table(results),
    }


def http_chart(results: dict[str, Any]) -> Any:
    """Share of the throughput offline by streams, of the first model; with both predictions."""
    first = main_row(results)
    rows = [
        row
        for row in results["results"][HTTP]
        if (row["model"], row["dtype"]) == (first["model"], first["dtype"])
    ]
    found, forecast = [share(row) for row in rows], [predicted(results, row) for row in rows]
    return draw.lines(
        "What is left of the engine's throughput behind HTTP",
        f"streams (GPT-2 124M shape, {first['dtype']})",
        "% of the tok/s of the engine alone",
        [row["streams"] for row in rows],
        {
            "server": [100 * each.median for each in found],
            "if nobody waits": [100 * most for _, most in forecast],
            "if the engine waits": [100 * least for least, _ in forecast],
            f"aim at {first['streams']}": [100 * AIM for _ in rows],
        },
        spread={"server": [(100 * each.low, 100 * each.high) for each in found]},
        dashed=("if nobody waits", "if the engine waits", f"aim at {first['streams']}"),
        log_x=True,
    )


def where_chart(results: dict[str, Any]) -> Any:
    """What a token costs beside its pass: how much longer the engine's thread takes, and what the loop does."""
    row = main_row(results)
    alone, beside = pass_of(row["runs"][OFFLINE]), pass_of(watched_runs(row))
    found = {}
    if alone and beside:
        found = {
            "thread: longer pass": (beside.seconds - alone.seconds) / row["streams"] * 1e6,
            "thread: longer until the next": (beside.between - alone.between)
            / row["streams"]
            * 1e6,
        }
    found |= {f"loop: {name}": part for name, part in loop_parts(results).items()}
    found["client"] = python_seconds(row, "client") / (row["requests"] * row["answer"]) * 1e6
    return draw.bars(
        "What a token costs beside its pass",
        f"microseconds a token, {row['streams']} streams (GPT-2 124M shape, {row['dtype']})",
        list(found),
        {"beside the loop": [max(0.0, each) for each in found.values()]},
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {"http": partial(http_chart, results), "where": partial(where_chart, results)}


def headline(results: dict[str, Any]) -> str:
    row = main_row(results)
    return (
        f"{share(row).median:.0%} of the offline engine's tok/s behind HTTP, {row['streams']} streams (GPT-2 124M shape, "
        f"{row['dtype']})"
    )


def main(argv: list[str] | None = None) -> None:
    about = "Measures the server against the engine alone on this CPU, and proves every answer."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
