"""Every engine of the staircase behind the same HTTP, under the same load:
`python -m stage07_loadtest.benchmark`.

Every request is kept beside the results, in stage07_loadtest.requests.jsonl.gz. The servers are
`python -m stage06_serving --engine ...`, all started at the beginning and loaded in turn, with the
same weights, dtype, threads and memory. Answers have the same number of tokens everywhere. Before a
server is measured, its answers to prompts of the workloads, many at a time, are proved.
"""

from __future__ import annotations

import asyncio
import gzip
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, cli, measure
from shared.bench.kit import Benchmark, Output, Plan, Subject, greedy, shape
from shared.bench.rows import Column, Results, median, tables
from shared.checkpoint import PRESETS, Config
from shared.course import stages
from shared.errors import UserError
from shared.roofline import forward_cost
from shared.server import own_server

from . import charts as curves
from . import metrics, mock, schedule, workload
from .__main__ import MOST_A_SECOND, SHARES
from .client import Target, open_session
from .load import run_point
from .metrics import Slo, Summary
from .results import from_json, request_lines, to_json
from .workload import ANSWER, LENGTHS, Ask

STAGE = "stage07_loadtest"
SLO = Slo(ttft=1.0, tpot=0.2)
TRANSFORMERS, SEQUENTIAL, STATIC = "transformers", "sequential", "static"
CONTINUOUS, PAGED = "continuous", "paged"
ENGINES = {
    TRANSFORMERS: "transformers, one request at a time",
    SEQUENTIAL: "stage 02's cache, one request at a time",
    STATIC: "batching (stage 03)",
    CONTINUOUS: "continuity (stage 04)",
    PAGED: "paging (stage 05)",
}
BURSTS = 3
BLOCK = 16  # tokens, stage 05's default
WARM = 2  # tokens of each answer while warming up
# Seconds that the mock server takes, against which the measuring is checked; users and rounds.
RULER = {"ttft": 0.2, "itl": 0.05, "users": 8, "rounds": 4}
USERS: dict[str, dict[str, tuple[int, ...]]] = {
    TRANSFORMERS: {"short": (1, 8)},
    SEQUENTIAL: {"short": (1, 8, 64), "medium": (8,), "long": (8,), "mixed": (8,)},
    STATIC: {"short": (1, 8, 64, 128), "mixed": (64,)},
    CONTINUOUS: {"short": (1, 8, 64, 128), "mixed": (64,)},
    PAGED: {
        "short": (1, 2, 4, 8, 16, 32, 64, 128),
        "medium": (1, 8, 64, 128),
        "long": (1, 8, 64, 128),
        "mixed": (64,),
    },
}
FEW = {name: {"short": (1, 16) if name == PAGED else (16,)} for name in (STATIC, CONTINUOUS, PAGED)}


@dataclass(frozen=True)
class Sizes(Plan):
    """A point is (workload, users). Each starts no request after `seconds`, or has so many a user.
    The second dtype is measured for SEQUENTIAL and PAGED, alone and at `main_users`."""

    users: Any = None  # engine -> workload -> users; None: USERS
    contexts: int = 8  # memory for keys and values: this many whole contexts
    sequences: int = 64  # at a time, where the memory allows it
    main_users: int = 64  # where the engines are compared
    rounds: int = 2  # of the comparison; all else is measured once
    seconds: float = 30.0
    a_user: int = 2  # requests, where that is more than one
    open_requests: int = 100
    burst: tuple[int, float] = (40, 8.0)
    prove_prompts: int = 3  # of each length

    def points(self, engine: str) -> list[tuple[str, str, int]]:
        wanted = (USERS if self.users is None else self.users).get(engine, {})
        return [(engine, name, users) for name, many in wanted.items() for users in many]

    @property
    def turns(self) -> list[tuple[str, str, int]]:
        """The closed loops in order: first the comparison, in rotated rounds."""
        every = [point for engine in ENGINES for point in self.points(engine)]
        main = [point for point in every if point[2] == self.main_users]
        rotated = [main[at % len(main) :] + main[: at % len(main)] for at in range(self.rounds)]
        return [*sum(rotated, []), *(point for point in every if point not in main)]


FULL = Sizes()
ALONE = {TRANSFORMERS: {"short": (1,)}, SEQUENTIAL: {"short": (1,)}}
QUICK = replace(
    FULL,
    dtypes=("float32",),
    users=ALONE | FEW,
    main_users=16,
    rounds=1,
    seconds=6.0,
    a_user=1,
    open_requests=12,
    burst=(8, 4.0),
    prove_prompts=1,
)


# ---- servers and their proof --------------------------------------------------------------------


def options(plan: Sizes, engine: str, dtype: str) -> list[str]:
    """The command line of a server. Random weights have the same seed everywhere."""
    (model,), config = plan.models, PRESETS[plan.models[0]]
    memory = plan.contexts * config.n_positions * config.kv_bytes_per_token(getattr(torch, dtype))
    given = {
        "engine": engine,
        "model": model,
        "device": "cpu",
        "dtype": dtype,
        "kv-memory": memory,
        "threads": torch.get_num_threads(),
        "max-sequences": plan.sequences,
        "max-queue": 1000,
        "request-timeout": 3600,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return words if model == "stories" else [*words, "--random-weights"]


async def answers(url: str, asks: Sequence[Ask]) -> list[list[int]]:
    """What a server answers to all of them at once. Raises UserError if it does not."""

    async def one(ask: Ask) -> list[int]:
        body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                (choice,) = (await response.json())["choices"]
                ids: list[int] = choice["token_ids"]
                return ids
        except (aiohttp.ClientError, KeyError) as error:
            raise UserError(
                f"The server at {url} did not answer ({error}): try its command line by hand."
            ) from None

    async with open_session(Target(url)) as session:
        return list(await asyncio.gather(*map(one, asks)))


def token_ids(ask: Ask) -> list[int]:
    return [int(token) for token in ask.prompt]


def prove(subject: Subject, url: str, count: int) -> dict[str, Any]:
    """That a server answers `count` prompts of each length as stage 01 would.

    Raises AssertionError for a wrong token and for an answer of another length.
    """
    asks = [ask for name in LENGTHS for ask in workload.make(name, count, "proof")]
    got = asyncio.run(answers(url, asks))
    if wrong := [
        len(ids) for ids, ask in zip(got, asks, strict=True) if len(ids) != ask.max_tokens
    ]:
        raise AssertionError(f"{len(wrong)} answers have another length, such as {wrong[0]} tokens")
    return subject.prove(Output(token_ids(ask), ids) for ask, ids in zip(asks, got, strict=True))


def naive_rate(subject: Subject, count: int) -> float:
    """Output tok/s of stage 01's engine over short prompts, without HTTP."""
    engine = stages.oracle(subject.model)
    prompts = [token_ids(ask) for ask in workload.make("short", count, "proof")]
    engine.generate(prompts[:1], greedy(WARM))
    return count * ANSWER / measure.seconds(lambda: engine.generate(prompts, greedy(ANSWER)))


def check_ruler() -> dict[str, Any]:
    """What the load test measures of a server whose latencies are known, in seconds."""
    ttft, itl, users = RULER["ttft"], RULER["itl"], int(RULER["users"])
    known = {metrics.TTFT: ttft, metrics.ITL: itl, metrics.E2E: ttft + (ANSWER - 1) * itl}
    count = int(users * RULER["rounds"])
    asks, when = workload.make("short", users + count, "ruler"), schedule.closed(users, count)
    with mock.process("--ttft", str(ttft), "--itl", str(itl)) as url:
        point = asyncio.run(run_point(Target(url), asks, when, warmup=users))
    found = metrics.summarize(point, Slo())
    measured = {name: found.at(name, 50) for name in known}
    return {"known": known, "measured": measured, "client_cpu": found.client_cpu}


# ---- measuring ----------------------------------------------------------------------------------


def alone(server: str) -> bool:
    """Whether the server of this name takes one request at a time."""
    return server.startswith((SEQUENTIAL, TRANSFORMERS))


class Bench:
    """The servers that run, and the points measured of them."""

    def __init__(self, plan: Sizes, stack: ExitStack, progress: Callable[[str], None]) -> None:
        self.plan, self.stack, self.progress = plan, stack, progress
        self.points: list[dict[str, Any]] = []
        self.proof: dict[str, Any] = {}
        self.requests: list[str] = []  # a line of JSON each
        self.urls: dict[str, str] = {}

    def start(self, engine: str, subject: Subject) -> str:
        """Start and prove a server; its name is that of the engine, with the second dtype."""
        dtype = subject.about["dtype"]
        name = engine if dtype == self.plan.dtypes[0] else f"{engine}, {dtype}"
        server = own_server(options(self.plan, engine, dtype), quiet=True)
        self.urls[name] = self.stack.enter_context(server).url
        self.proof[name] = prove(subject, self.urls[name], self.plan.prove_prompts)
        return name

    def measure(
        self, server: str, name: str, when: schedule.Schedule, count: int, seconds: float | None
    ) -> None:
        number, config = len(self.points), PRESETS[self.plan.models[0]]
        most = min(when.users or self.plan.sequences, self.plan.sequences)
        warmup = 1 if alone(server) else most
        asks = workload.make(name, warmup + count, f"point {number}", longest=config.n_positions)
        asks = [replace(ask, max_tokens=WARM) for ask in asks[:warmup]] + asks[warmup:]
        how: dict[str, Any] = {"workload": name, "warmup": warmup, "seconds": seconds}
        point = asyncio.run(run_point(Target(self.urls[server]), asks, when, **how))
        if point.interrupted:
            raise KeyboardInterrupt
        summary = metrics.summarize(point, SLO)
        self.requests.append(request_lines(number, point.records))
        self.points.append({"server": server} | to_json(summary))
        self.progress(f"{server}, {name}, {when}: {summary.output_rate:.0f} tok/s")

    def closed(self, server: str, name: str, users: int) -> None:
        """`users` who each send their next request when the last one has ended."""
        plan, seconds = self.plan, None
        if users >= plan.main_users:  # one at a time is as fast with any number waiting
            count = users * (1 if alone(server) else plan.a_user)
        else:
            count, seconds = math.ceil(users * (1 + MOST_A_SECOND * plan.seconds)), plan.seconds
        self.measure(server, name, schedule.closed(users, count), count, seconds)


def run(plan: Sizes) -> dict[str, Any]:
    """Raises UserError for a server that does not start, AssertionError for one that is wrong."""
    first, *rest = plan.dtypes
    subject, ruler = Subject(shape(plan.models[0]), getattr(torch, first)), check_ruler()
    naive, count = naive_rate(subject, plan.prove_prompts), plan.open_requests
    total = len(plan.turns) + len(SHARES) + 1 + 3 * len(rest)
    with tqdm(total=total, unit="point") as bar, ExitStack() as stack:

        def progress(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        bench = Bench(plan, stack, progress)
        for engine in ENGINES:
            if plan.points(engine):
                bench.start(engine, subject)
        for turn in plan.turns:
            bench.closed(*turn)
        most = capacity([(each["server"], from_json(summary(each))) for each in bench.points])
        for share in SHARES:
            when = schedule.poisson(share * most, count, seed=round(100 * share))
            bench.measure(PAGED, "short", when, count, None)
        size, every = plan.burst
        when = schedule.bursts(size, every, BURSTS * size)
        bench.measure(PAGED, "short", when, BURSTS * size, None)
        for dtype in rest:
            other = Subject(shape(plan.models[0]), getattr(torch, dtype))
            for engine, many in ((SEQUENTIAL, [1]), (PAGED, [1, plan.main_users])):
                name = bench.start(engine, other)
                for users in many:
                    bench.closed(name, "short", users)
    keep_requests(plan, bench.requests)
    return {"points": bench.points, "proof": bench.proof, "naive": naive, "ruler": ruler}


def keep_requests(plan: Sizes, lines: Sequence[str]) -> None:
    """Beside the results, of a run that is kept."""
    if plan is FULL:
        path = measure.results_file(STAGE).with_suffix(".requests.jsonl.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def summary(point: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in point.items() if key != "server"}


def capacity(points: Iterable[tuple[str, Summary]]) -> float:
    """Most requests per second that closed loops of short prompts got of paging."""
    return max(
        point.request_rate
        for server, point in points
        if server == PAGED and point.workload == "short" and point.users
    )


# ---- predictions --------------------------------------------------------------------------------


def rows_of(plan: Any, config: Config, engine: str, name: str, users: int) -> int:
    """Sequences that a pass can have: by the memory, the settings, and the users."""
    if alone(engine):
        return 1
    slots = plan["contexts"]
    if engine.startswith(PAGED):
        blocks = -(-(LENGTHS[name] + ANSWER) // BLOCK)
        slots = plan["contexts"] * config.n_positions // (blocks * BLOCK)
    return int(min(slots, plan["sequences"], users))


def predicted(results: Results, engine: str, name: str, users: int, dtype: str) -> float | None:
    """Output tok/s if passes took what operations and bytes need, and nothing else took time. None
    for lengths that vary."""
    if name not in LENGTHS:
        return None
    config, kind = PRESETS[results.plan["models"][0]], getattr(torch, dtype)
    rows, prompt = rows_of(results.plan, config, engine, name, users), LENGTHS[name]
    passes = [forward_cost(config, kind, prompt, rows=rows)]
    past = range(prompt, prompt + ANSWER - 1)
    passes += [forward_cost(config, kind, 1, cached, rows=rows) for cached in past]
    return rows * ANSWER / sum(cost.seconds(results.limits, kind) for cost in passes)


# ---- tables and charts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """All repeats of one point."""

    results: Results
    server: str
    points: list[Summary]

    @property
    def first(self) -> Summary:
        return self.points[0]

    @property
    def workload(self) -> str:
        return self.first.workload

    @property
    def users(self) -> int:
        return self.first.users or 0

    def median(self, of: Callable[[Summary], float]) -> float:
        return median([of(point) for point in self.points])

    @property
    def rate(self) -> float:
        """Output tok/s."""
        return self.median(lambda point: point.output_rate)

    @property
    def requests(self) -> int:
        return sum(point.requests for point in self.points)

    @property
    def dtype(self) -> str:
        dtype: str = self.server.partition(", ")[2] or self.results.plan["dtypes"][0]
        return dtype

    def limit(self) -> str:
        engine = self.server.partition(",")[0]
        most = predicted(self.results, engine, self.workload, self.users, self.dtype)
        return f"{most:,.0f}" if most else ""

    def over_sequential(self) -> str:
        """With the most users who were tried: waiting does not make one request at a time
        slower."""
        base = [
            load.rate for load in closed(self.results) if load.point == (SEQUENTIAL, self.workload)
        ]
        return f"{self.rate / base[-1]:.1f}x" if base else ""

    @property
    def point(self) -> tuple[str, str]:
        return self.server, self.workload


def latency(name: str, percent: int) -> Column:
    """A percentile in ms, failures counted as infinite; the median of the repeats."""

    def text(load: Load) -> str:
        adjusted = name != metrics.ITL
        values = [point.at(name, percent, adjusted=adjusted) for point in load.points]
        known = [value for value in values if value is not None]
        if not known:
            return ""
        middle = median(known)
        return "inf" if math.isinf(middle) else f"{middle * 1e3:,.0f}"

    return text


def loads(results: Results) -> list[Load]:
    """All points, repeats together, by server, workload and load."""
    found: dict[tuple[str, str, float, str], list[Summary]] = {}
    for each in results["points"]:
        point = from_json(summary(each))
        size = float(point.users if point.users is not None else point.rate or 0.0)
        found.setdefault((each["server"], point.workload, size, point.kind), []).append(point)
    names = list(dict.fromkeys([*ENGINES, *(key[0] for key in found)]))
    kinds = list(workload.WORKLOADS)
    order = sorted(found, key=lambda key: (names.index(key[0]), kinds.index(key[1]), *key[2:]))
    return [Load(results, key[0], found[key]) for key in order]


def closed(results: Results) -> list[Load]:
    """Every closed loop in the first dtype."""
    return [load for load in loads(results) if load.users and load.server in ENGINES]


def opened(results: Results) -> list[Load]:
    """Arrivals that do not wait for answers."""
    return [load for load in loads(results) if not load.users]


def dtypes(results: Results) -> list[Load]:
    """The second dtype beside the first."""
    shown = {(SEQUENTIAL, "short"), (PAGED, "short")}
    wanted = [load for load in loads(results) if load.users in (1, results.plan["main_users"])]
    return [load for load in wanted if (load.server.partition(",")[0], load.workload) in shown]


def split(results: Results, name: str) -> dict[str, float]:
    """tok/s by engine with the main number of users; of those that work alone, with the most."""
    users = results.plan["main_users"]
    wanted = [load for load in closed(results) if load.workload == name]
    return {load.server: load.rate for load in wanted if alone(load.server) or load.users == users}


def steps(results: Results, name: str) -> list[dict[str, str]]:
    """What each step brings. transformers is the cache's peer, and no step."""
    found = split(results, name)
    base, before = found.get(SEQUENTIAL), None
    lines = []
    if name == "short" and base:
        naive = "none: stage 01, offline"
        found, before = {naive: results["naive"], **found}, 0.0
    for engine, rate in found.items():
        step = f"{rate / before:.2f}x" if before and engine != TRANSFORMERS else ""
        lines.append(
            {
                "server": engine,
                "what it brings": ENGINES.get(engine, "nothing"),
                "tok/s": f"{rate:,.1f}",
                "over the line before": step,
                "over sequential": f"{rate / base:.2f}x" if base else "",
            }
        )
        if engine != TRANSFORMERS:
            before = rate
    return lines


def span(values: Sequence[float], digits: int) -> str:
    """From the least to the most, and of how many points."""
    ends = f"{min(values):.{digits}f} to {max(values):.{digits}f}, " if values else ""
    return f"{ends}{len(values)} points"


def trust(results: Results) -> list[dict[str, str]]:
    """How far the measuring can be trusted, over all points."""
    every = [(load, point) for load in loads(results) for point in load.points]
    points = [point for _, point in every]
    flags = [(load, point, flag) for load, point in every for flag in point.flags]
    short = sum(flag.startswith(metrics.SHORT) for *_, flag in flags)
    marks = [str(sum(bool(point.flags) for point in points))]
    if short:
        least = f"{metrics.LEAST_REQUESTS} requests, in less than {metrics.LEAST_SECONDS:.0f} s"
        marks.append(f"{short} are short: fewer than {least}")
    marks += [
        f"{load.server}, {load.workload}, {point.load}: {flag}"
        for load, point, flag in flags
        if not flag.startswith(metrics.SHORT)
    ]
    proofs, ruler = results["proof"].values(), results["ruler"]
    tokens, ties = (sum(proof[key] for proof in proofs) for key in ("tokens", "near_ties"))
    steady = [p.steady.output_rate / p.output_rate for p in points if p.steady and p.output_rate]
    ratios = [point.little.ratio for point in points if point.little is not None]
    requests, good = (sum(getattr(p, key) for p in points) for key in ("requests", "succeeded"))
    match, back = (
        sum(getattr(p, key) is True for p in points) for key in ("tokens_match", "blocks_back")
    )
    known = [
        f"{name.upper()} {seconds * 1e3:,.0f} ms: {ruler['measured'][name] * 1e3:,.1f}"
        for name, seconds in ruler["known"].items()
    ]
    lines = {
        "a server of known latencies, p50": (
            f"{'; '.join(known)}; client CPU {ruler['client_cpu']:.0%}"
        ),
        "tokens proved": f"{tokens:,}, of {len(proofs)} servers; near ties: {ties}",
        "requests, and those that failed": f"{requests:,}; {requests - good}",
        "client CPU, share of a core, at most": f"{max(p.client_cpu for p in points):.0%}",
        "Little's law, L over lambda W": span(ratios, 3),
        "tokens received = counted by the server; blocks back to zero": (
            f"{match} and {back} of {len(points)} points"
        ),
        "tok/s of the steady part, over that of the whole point": span(steady, 2),
        "points with a mark against them": "; ".join(marks),
    }
    return [{"what": name, "found": text} for name, text in lines.items()]


def share_of_capacity(load: Load) -> str:
    every = [(one.server, point) for one in loads(load.results) for point in one.points]
    return f"{(load.first.rate or 0) / capacity(every):.0%}"


def spread(load: Load) -> str:
    rates = measure.summarize([point.output_rate for point in load.points])
    return rates.show() if len(load.points) > 1 else f"{rates.median:,.1f}"


NAMES = {"TTFT": metrics.TTFT_INTENDED, "TPOT": metrics.TPOT, "E2E": metrics.E2E_INTENDED}
COLUMNS: dict[str, Column] = {
    "server": "server",
    "dtype": "dtype",
    "workload": "workload",
    "users": "users",
    "requests": "requests",
    "success": lambda load: f"{sum(p.succeeded for p in load.points) / load.requests:.1%}",
    "tok/s": spread,
    "limit, tok/s": Load.limit,
    "over sequential": Load.over_sequential,
    **{f"{name} p{n}, ms": latency(key, n) for name, key in NAMES.items() for n in (50, 95)},
    "goodput, req/s": lambda load: f"{load.median(lambda point: point.goodput):.2f}",
    "client CPU": lambda load: f"{load.median(lambda point: point.client_cpu):.0%}",
    "arrivals": lambda load: load.first.kind,
    "of capacity": share_of_capacity,
    "offered, req/s": lambda load: f"{load.first.rate or 0:.2f}",
    "answered, req/s": lambda load: f"{load.first.request_rate:.2f}",
}
LATENCIES = " | ".join(f"{name} p{n}, ms" for name in NAMES for n in (50, 95))
TABLES = tables(
    COLUMNS,
    f"""
    load < closed: server | workload | users | requests | success | tok/s | limit, tok/s
      | over sequential | goodput, req/s
    load_latency < closed: server | workload | users | {LATENCIES} | client CPU
    open < opened: arrivals | of capacity | tok/s | TTFT p95, ms | E2E p95, ms | goodput, req/s
    open_latency < opened: arrivals | of capacity | requests | success | offered, req/s
      | answered, req/s | TTFT p50, ms | TPOT p50, ms | E2E p50, ms
    dtype < dtypes: server | dtype | users | success | tok/s | limit, tok/s | TTFT p50, ms
      | TPOT p50, ms | E2E p50, ms
    """,
    closed=closed,
    opened=opened,
    dtypes=dtypes,
    trust=trust,
    split=partial(steps, name="short"),
    split_mixed=partial(steps, name="mixed"),
)


def split_chart(results: Results) -> Figure:
    found = {name: split(results, name) for name in ("short", "mixed")}
    found = {name: rates for name, rates in found.items() if rates}
    engines = [engine for engine in ENGINES if any(engine in rates for rates in found.values())]
    best = found["short"][PAGED] / found["short"][SEQUENTIAL]
    title = f"{results.plan['main_users']} users: {best:.1f}x one request at a time"
    series = {n: [rates.get(e, math.nan) for e in engines] for n, rates in found.items()}
    return charts.bars(title, "output tok/s", engines, series, digits=0)


def short_points(results: Results) -> dict[str, list[Summary]]:
    """Points of short prompts by server, for charts.py."""
    found: dict[str, list[Summary]] = {}
    for load in loads(results):
        if load.workload == "short" and load.server in ENGINES:
            found.setdefault(load.server, []).extend(load.points)
    return found


def several(results: Results) -> dict[str, list[Summary]]:
    """Of the servers that were loaded by several numbers of users."""
    short = short_points(results)
    more = {n: ps for n, ps in short.items() if len({p.users for p in ps if p.users}) > 1}
    return more or short


def drawn(chart: Callable[..., Figure], *arguments: Any) -> Callable[[Results], Figure]:
    """A chart of charts.py over what paging did."""
    return lambda results: chart({PAGED: short_points(results)[PAGED]}, *arguments)


def distribution(name: str) -> Callable[[Results], Figure]:
    def draw(results: Results) -> Figure:
        points = short_points(results)[PAGED]
        shown = {point.load: point for point in points if point.users in (1, 8, 32, 64, 128)}
        return curves.distribution(shown, name)

    return draw


CHARTS: dict[str, Callable[[Results], Figure]] = {
    "split": split_chart,
    "throughput": lambda results: curves.throughput(
        several(results), "Short prompts: throughput against users"
    ),
    "latency": lambda results: curves.latency(
        several(results), metrics.E2E_INTENDED, 95, "What a user waits: E2E latency, p95"
    ),
    "offered": lambda results: curves.offered(
        {PAGED: short_points(results)[PAGED]},
        title="Paged: latency against offered load, short prompts",
    ),
    "goodput": drawn(curves.goodput),
    "ttft": distribution(metrics.TTFT_INTENDED),
    "itl": distribution(metrics.ITL),
}


def headline(results: Results) -> str:
    found, every = split(results, "short"), loads(results)
    points = [point for load in every for point in load.points]
    failed = sum(point.requests - point.succeeded for point in points)
    model = results.plan["models"][0]
    shown = "GPT-2 124M shape" if model == "gpt2" else model
    return (
        f"{results.plan['main_users']} users get {found[PAGED] / found[SEQUENTIAL]:.1f}x the tok/s "
        f"of one request at a time, and {failed} of {sum(p.requests for p in points):,} requests "
        f"failed ({shown}, {results.plan['dtypes'][0]})"
    )


ABOUT = "Measures every engine behind HTTP, under the load of 1 to 128 users."
BENCHMARK = Benchmark(STAGE, ABOUT, FULL, QUICK, run, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
