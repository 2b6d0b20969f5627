"""Every engine of the staircase behind the same HTTP, under the same load:
`python -m stage07_loadtest.benchmark`.

The servers are those of stage 06, some with an earlier stage's engine, all started at the beginning
and loaded in turn, with the same weights, dtype, threads, memory and tokens. Before one is
measured, it answers many prompts of the workloads at a time, and the answers are proved. Every
request of a full run is kept in stage07_loadtest.requests.jsonl.gz.
"""

from __future__ import annotations

import asyncio
import gzip
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from reports.staircase import ask_all
from shared import charts, cli, measure, testing
from shared.bench import kit
from shared.bench.claims import Claim, closing
from shared.bench.forecast import static_costs
from shared.bench.kit import Output, Subject
from shared.bench.rows import Results, median, tables
from shared.checkpoint import PRESETS, Config
from shared.server import own_server

from . import charts as curves
from . import metrics, mock, schedule, workload
from .__main__ import MOST_A_SECOND
from .client import Record
from .load import load
from .metrics import Slo, Summary
from .results import from_json, request_lines, to_json
from .workload import ANSWER, LENGTHS

STAGE = "stage07_loadtest"
SLO = Slo(ttft=1.0, tpot=0.2)
ENGINES = {
    "transformers": "transformers, one request at a time",
    "sequential": "stage 02's cache, one request at a time",
    "static": "batching (stage 03)",
    "continuous": "continuity (stage 04)",
    "paged": "paging (stage 05)",
}
TRANSFORMERS, SEQUENTIAL, STATIC, CONTINUOUS, PAGED = ENGINES
EARLIER = "reports.peers.earlier"  # the server of all but the last
BLOCK = 16  # tokens, stage 05's default
WARM = 2  # tokens of each answer while warming up
LATENCIES = {"TTFT": metrics.TTFT_INTENDED, "TPOT": metrics.TPOT, "E2E": metrics.E2E_INTENDED}


# A closed loop below `main_users` starts no request after `seconds`; from there on each user has
# `a_user` requests, or one where the server takes one at a time.
FULL = kit.plan(
    models=("gpt2",), dtypes=("float32",),  # of the servers that name no dtype
    users={  # by server and workload; a server is an engine, or "engine, dtype"
        TRANSFORMERS: {"short": (1,)},
        SEQUENTIAL: {"short": (1, 8), "medium": (1,), "long": (1,), "mixed": (1,)},
        STATIC: {"short": (1, 8, 64), "mixed": (64,)},
        CONTINUOUS: {"short": (1, 8, 64), "mixed": (64,)},
        PAGED: {"short": (1, 8, 16, 32, 64, 128), "medium": (64,), "long": (64,), "mixed": (64,)},
        f"{SEQUENTIAL}, bfloat16": {"short": (1,)},
        f"{PAGED}, bfloat16": {"short": (1, 64)},
    },
    contexts=8, sequences=64,  # memory in whole contexts; at a time, where the memory allows it
    main_users=64,  # where the engines are compared
    repeats=2,  # of the comparison over short prompts; all else is measured once
    seconds=10.0, a_user=2.0,
    a_user_mixed=1.5,  # static batches of mixed lengths take two minutes at 2.0
    flood=(1.5, 500),  # of the closed loops' best rate, requests: the capacity
    shares=(0.5, 0.9, 1.1, 1.3),  # of the capacity, as Poisson arrivals
    open_requests=1000,  # enough for a queue to grow above the capacity
    slices=20,  # of these requests, for the waiting over time
    burst=(40, 8.0, 2),  # requests, seconds to the next, how many
    prove_prompts=2,  # of each length
)  # fmt: skip
FEW = {
    "users": {
        SEQUENTIAL: {"short": (1,)},
        **{engine: {"short": (16,)} for engine in (STATIC, CONTINUOUS)},
        PAGED: {"short": (1, 16)},
    },
    "contexts": 8, "seconds": 3.0, "a_user": 1.0,
    "flood": (1.5, 20), "shares": (0.5, 1.1), "open_requests": 20,
}  # fmt: skip


def turns(plan: Any) -> list[tuple[str, str, int]]:
    """The closed loops in order: first the comparison, in rotated rounds."""
    loads = [(engine, *load) for engine, many in plan.users.items() for load in many.items()]
    every = [(engine, name, users) for engine, name, many in loads for users in many]
    compared = [(engine, "short", plan.main_users) for engine in ENGINES]
    main = [point for point in every if point in compared]
    rotated = [main[at % len(main) :] + main[: at % len(main)] for at in range(plan.repeats)]
    return [*sum(rotated, []), *(point for point in every if point not in main)]


# ---- servers and their proof --------------------------------------------------------------------


def options(plan: Any, engine: str, dtype: str) -> list[str]:
    """The command line of a server. Random weights have the same seed everywhere."""
    more = {"max_num_seqs": plan.sequences, "max_queue": 1000, "request_timeout": 3600}
    return kit.server_options(
        plan.models[0], dtype, plan.contexts, engine=engine, device="cpu", **more
    )


def prove(subject: Subject, url: str, count: int) -> dict[str, Any]:
    """Prove that a server answers `count` prompts of each length at once as stage 01 would. Raises
    AssertionError for a wrong token, UserError for a wrong number of them."""
    prompts = subject.prompts(length for length in LENGTHS.values() for _ in range(count))
    answers = asyncio.run(ask_all(url, prompts, [ANSWER] * len(prompts)))["ids"]
    return subject.prove(map(Output, prompts, answers))


def check_ruler(ttft: float = 0.2, itl: float = 0.05) -> dict[str, Any]:
    """What the load test measures at a server of known latencies, in seconds."""
    known = {metrics.TTFT: ttft, metrics.ITL: itl, metrics.E2E: ttft + (ANSWER - 1) * itl}
    asks, when = workload.make("short", 24, "ruler"), schedule.closed(8, 16)
    with mock.process("--ttft", str(ttft), "--itl", str(itl)) as url:
        point = load(url, asks, when, warmup=8)
    summary = metrics.summarize(point, Slo())
    measured = {name: summary.at(name, 50) for name in known}
    return {"known": known, "measured": measured, "client_cpu": summary.client_cpu}


# ---- measuring ----------------------------------------------------------------------------------


def alone(server: str) -> bool:
    """Whether the server of this name takes one request at a time."""
    return server.startswith((SEQUENTIAL, TRANSFORMERS))


@dataclass
class Bench:
    """The running servers, and the points measured at them."""

    plan: Any
    stack: ExitStack
    bar: tqdm
    points: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # a line of JSON each
    waits: list[list[float]] = field(default_factory=list)  # of open loops, in seconds
    urls: dict[str, str] = field(default_factory=dict)

    def begin(self, text: str) -> None:
        """Begin the next step of the run."""
        self.bar.set_postfix_str(text)
        self.bar.update()

    def start(self, server: str, subject: Subject) -> None:
        """Start a server of the subject, and prove it."""
        self.begin(f"start and prove {server}")
        engine = server.partition(", ")[0]
        command = options(self.plan, engine, subject.about["dtype"])
        module = None if engine == PAGED else EARLIER
        running = own_server(command, quiet=True, module=module)
        self.urls[server] = self.stack.enter_context(running).url
        self.proof[server] = prove(subject, self.urls[server], self.plan.prove_prompts)

    def measure(
        self, server: str, name: str, when: schedule.Schedule, count: int, seconds: float | None
    ) -> None:
        self.begin(f"{server}, {name}, {when}")
        number, most = len(self.points), self.plan.sequences
        longest = PRESETS[self.plan.models[0]].n_positions
        warmup = 1 if alone(server) else min(when.users or most, most)
        asks = workload.make(name, warmup + count, f"point {number}", longest=longest)
        asks = [replace(ask, max_tokens=WARM) for ask in asks[:warmup]] + asks[warmup:]
        how: dict[str, Any] = {"workload": name, "warmup": warmup, "seconds": seconds}
        point = load(self.urls[server], asks, when, **how)
        self.requests.append(request_lines(number, point.records))
        self.points.append({"server": server} | to_json(metrics.summarize(point, SLO)))
        if when.kind == "poisson":
            self.waits.append(waiting(point.records, self.plan.slices))

    def closed(self, server: str, name: str, users: int) -> None:
        """A load of `users`, each of whom sends the next request when the last one has ended."""
        plan, seconds = self.plan, None
        if users >= plan.main_users:  # one at a time is as fast with any number waiting
            a_user = plan.a_user_mixed if name == "mixed" else plan.a_user
            count = users if alone(server) else max(users, round(users * a_user))
        else:
            count, seconds = math.ceil(users * (1 + MOST_A_SECOND * plan.seconds)), plan.seconds
        self.measure(server, name, schedule.closed(users, count), count, seconds)

    def opened(self, when: schedule.Schedule) -> None:
        """An open loop to the paged server: requests arrive whether or not others have ended."""
        self.measure(PAGED, "short", when, len(when.starts or ()), None)


def run(plan: Any) -> dict[str, Any]:
    """Raises UserError for a server that does not start, AssertionError for one that is wrong."""
    total = 4 + len(plan.users) + len(turns(plan)) + len(plan.shares)
    with tqdm(total=total, unit="step") as bar, ExitStack() as stack:
        bench = Bench(plan, stack, bar)
        bench.begin("a server of known latencies")
        ruler = check_ruler()
        bench.begin("stage 01, without a server")
        subject = cache(lambda dtype: Subject(kit.shape(plan.models[0]), getattr(torch, dtype)))
        first = subject(plan.dtypes[0])
        engine, prompts = testing.oracle(first.model), first.prompts([LENGTHS["short"]] * 2)
        engine.generate(prompts[:1], kit.greedy(WARM))
        seconds = measure.seconds(lambda: engine.generate(prompts, kit.greedy(ANSWER)))
        for server in plan.users:
            dtype = server.partition(", ")[2] or plan.dtypes[0]
            bench.start(server, subject(dtype))
        for turn in turns(plan):
            bench.closed(*turn)
        over, count = plan.flood
        wanted = [point for point in bench.points if point["server"] == PAGED]
        best = max(point["request_rate"] for point in wanted if point["workload"] == "short")
        bench.opened(schedule.poisson(over * best, count, seed=0))
        most, count = capacity(bench.points), plan.open_requests
        for share in plan.shares:
            bench.opened(schedule.poisson(share * most, count, seed=round(100 * share)))
        size, every, times = plan.burst
        bench.opened(schedule.bursts(size, every, times * size))
    if plan == FULL:
        path = measure.results_file(STAGE).with_suffix(".requests.jsonl.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(bench.requests).encode(), mtime=0))
    naive = len(prompts) * ANSWER / seconds
    results = {"points": bench.points, "waits": bench.waits, "proof": bench.proof}
    return results | {"naive": naive, "ruler": ruler}


def waiting(records: Sequence[Record], slices: int) -> list[float]:
    """Median TTFT in seconds of each of `slices` equal parts of the answered requests, in the order
    in which they were due."""
    ordered = sorted(records, key=lambda record: record.intended)
    delays = [wait for wait in map(metrics.ttft_intended, ordered) if wait is not None]
    edges = [len(delays) * part // slices for part in range(slices + 1)]
    return [median(delays[low : max(high, low + 1)]) for low, high in pairwise(edges)]


def capacity(points: Sequence[Mapping[str, Any]]) -> float:
    """Requests per second with short prompts that paging answers when far more arrive at random:
    the rate in the steady part of the flood, which is the first of the open loops. If that part is
    too short for a token, the rate of the whole flood."""
    flood = next(point for point in points if point["kind"] == "poisson")
    steady = flood["steady"] or flood
    return float(steady["output_rate"] or flood["output_rate"]) / ANSWER


def rows_of(plan: Any, config: Config, engine: str, name: str, users: int) -> int:
    """Sequences that a step can have, limited by the memory, the settings, and the users."""
    if alone(engine):
        return 1
    blocks = -(-(LENGTHS[name] + ANSWER) // BLOCK)
    reserved = blocks * BLOCK if engine.startswith(PAGED) else config.n_positions  # by each
    most = plan["contexts"] * config.n_positions // reserved
    return int(min(most, plan["sequences"], users))


def predicted(results: Results, engine: str, name: str, users: int, dtype: str) -> float | None:
    """Output tok/s if steps took only the time that their operations and bytes need, and nothing
    else took any. None for lengths that vary."""
    if name not in LENGTHS:
        return None
    config, kind = PRESETS[results.plan["models"][0]], getattr(torch, dtype)
    rows = rows_of(results.plan, config, engine, name, users)
    passes = static_costs(config, kind, [(LENGTHS[name], ANSWER)] * rows, rows)
    return rows * ANSWER / sum(cost.seconds(results.limits, kind) for cost in passes)


# ---- tables and charts --------------------------------------------------------------------------


def cells(results: Results, server: str, points: list[Summary]) -> dict[str, Any]:
    """All repeats of one point, by column; "points" and "rate" (output tok/s) are for charts.
    Latencies are medians of the repeats, failures counted as infinite."""
    first, (engine, _, dtype) = points[0], server.partition(", ")
    users, dtype = first.users, dtype or results.plan["dtypes"][0]
    most = predicted(results, engine, first.workload, users, dtype) if users else None
    rates = measure.summarize([point.output_rate for point in points])
    requests, good = (sum(getattr(p, key) for p in points) for key in ("requests", "succeeded"))

    def ms(name: str, percent: int) -> str:
        return f"{1e3 * median(p.at(name, percent, True) or math.inf for p in points):,.0f}"

    return {
        **{"server": server, "points": points, "workload": first.workload, "users": users},
        "arrivals": first.kind,
        **{"requests": requests, "failed": requests - good, "rate": rates.median},
        "success": f"{good / requests:.1%}",
        "tok/s": rates.show() if len(points) > 1 else f"{rates.median:,.1f}",
        "limit, tok/s": f"{most:,.0f}" if most else "",
        **{f"{n} p{p}, ms": ms(key, p) for n, key in LATENCIES.items() for p in (50, 95)},
        "goodput, req/s": f"{median(point.goodput for point in points):.2f}",
        "client CPU": f"{median(point.client_cpu for point in points):.0%}",
        "of capacity": f"{(first.rate or 0) / capacity(results['points']):.0%}",
        "offered, req/s": f"{first.rate or 0:.2f}",
        "answered, req/s": f"{first.request_rate:.2f}",
    }


def loads(results: Results) -> list[dict[str, Any]]:
    """All points, repeats together, by server, workload and load."""
    groups: dict[tuple[str, str, float, str], list[Summary]] = {}
    for fields in results["points"]:
        point = from_json({key: value for key, value in fields.items() if key != "server"})
        size = float(point.users if point.users is not None else point.rate or 0.0)
        groups.setdefault((fields["server"], point.workload, size, point.kind), []).append(point)
    names = list(dict.fromkeys([*ENGINES, *(key[0] for key in groups)]))
    kinds = list(workload.WORKLOADS)
    order = sorted(groups, key=lambda key: (names.index(key[0]), kinds.index(key[1]), *key[2:]))
    rows = [cells(results, key[0], groups[key]) for key in order]
    # With the most users tried: waiting does not slow down a server of one request at a time.
    base = {row["workload"]: row["rate"] for row in rows if row["server"] == SEQUENTIAL}
    for row in rows:
        known = row["workload"] in base
        row["over sequential"] = f"{row['rate'] / base[row['workload']]:.1f}x" if known else ""
    return rows


def closed(results: Results) -> list[dict[str, Any]]:
    """Every closed loop."""
    return [row for row in loads(results) if row["users"]]


def split(results: Results, name: str) -> dict[str, float]:
    """tok/s by engine with the main number of users; with the most for one request at a time."""
    main, rates = results.plan["main_users"], dict[str, float]()
    for row in closed(results):
        wanted = row["workload"] == name and row["server"] in ENGINES
        if wanted and (alone(row["server"]) or row["users"] == main):
            rates[row["server"]] = row["rate"]
    return rates


def steps(results: Results, name: str) -> Iterator[dict[str, str]]:
    """What each step gains. transformers is the cache's peer, not a step."""
    rates, before = split(results, name), 0.0
    base = rates.get(SEQUENTIAL)
    naive = {"none: stage 01, offline": results["naive"]} if name == "short" and base else {}
    for engine, rate in (naive | rates).items():
        peer = engine == TRANSFORMERS
        yield {
            "server": engine,
            "what it brings": ENGINES.get(engine, "nothing"),
            "tok/s": f"{rate:,.1f}",
            "over the line before": f"{rate / before:.2f}x" if before and not peer else "",
            "over sequential": f"{rate / base:.2f}x" if base else "",
        }
        before = before if peer else rate


def trust(results: Results) -> list[dict[str, str]]:
    """How far the measurements can be trusted, over all points."""
    rows, proofs, ruler = loads(results), results["proof"].values(), results["ruler"]
    points = [(f"{r['server']}, {r['workload']}, {p.load}", p) for r in rows for p in r["points"]]
    tokens, ties = (sum(proof[key] for proof in proofs) for key in ("tokens", "near_ties"))
    known = [
        f"{name.upper()} {seconds * 1e3:,.0f} ms: {ruler['measured'][name] * 1e3:,.1f}"
        for name, seconds in ruler["known"].items()
    ]
    cpu = f"client CPU {ruler['client_cpu']:.0%}"
    lines = {"a server of known latencies, p50": "; ".join([*known, cpu])}
    lines["tokens proved"] = f"{tokens:,}, of {len(proofs)} servers; near ties: {ties}"
    return [{"what": n, "found": text} for n, text in (lines | metrics.trust(points)).items()]


def rate(results: Results, engine: str, users: int = 0) -> float:
    """tok/s of short prompts by the machine's limits, with `users` or the main number of them."""
    many, dtype = users or results.plan["main_users"], results.plan["dtypes"][0]
    return predicted(results, engine, "short", many, dtype) or 0.0


def claims(results: Results) -> Iterator[Claim]:
    """The lesson's predictions."""
    rates, most = split(results, "short"), {name: rate(results, name) for name in ENGINES}
    for what, engine, why in (
        ("one request at a time", SEQUENTIAL, "one row does not read at full bandwidth"),
        ("eight slots", CONTINUOUS, "products of eight rows are far from both limits"),
        ("blocks", PAGED, "the gather, attention and Python beside the products"),
    ):
        yield Claim(what, most[engine], rates[engine], "tok/s", why)
    for what, engine, base, why in (
        ("batching", CONTINUOUS, SEQUENTIAL, "eight rows cost more than one"),
        ("continuity, equal lengths", CONTINUOUS, STATIC, "the null control"),
        ("paging", PAGED, CONTINUOUS, "many rows use the arithmetic better than eight"),
    ):
        yield Claim(what, most[engine] / most[base], rates[engine] / rates[base], "x", why)
    # The greatest throughput over latency, which is users / throughput.
    many = range(1, results.plan["main_users"] + 1)
    knee = max(many, key=lambda users: rate(results, PAGED, users) ** 2 / users)
    best = metrics.knee([point for point in short(results)[PAGED] if point.users])
    users = float((best and best.users) or math.nan)
    yield Claim("knee", knee, users, "users", "few numbers were tried")
    # As if the limits were the capacity, and the fastest arrivals as far above it as they were.
    fastest, why = arrivals(results)[-2], "the first arrivals fill the batch before a queue grows"
    over = 1 - capacity(results["points"]) / (fastest.rate or math.inf)
    waits = 0.95 * fastest.requests * over / (most[PAGED] / ANSWER)
    late = fastest.at(metrics.TTFT_INTENDED, 95, True) or math.inf
    yield Claim("TTFT p95 above the capacity", waits, late, "s waited", why)


TABLES = tables(
    {"tok/s": "tok/s"},
    """
    load < closed: server | workload | users | requests | success | tok/s | limit, tok/s
      | over sequential | goodput, req/s
    load_latency < closed: server | workload | users | TTFT p50, ms | TTFT p95, ms | TPOT p50, ms
      | TPOT p95, ms | E2E p50, ms | E2E p95, ms | client CPU
    open < opened: arrivals | of capacity | tok/s | TTFT p95, ms | E2E p95, ms | goodput, req/s
    open_latency < opened: arrivals | of capacity | requests | success | offered, req/s
      | answered, req/s | TTFT p50, ms | TPOT p50, ms | E2E p50, ms
    """,
    closed=closed,
    opened=lambda results: [row for row in loads(results) if not row["users"]],
    trust=trust,
    loop=closing(claims),
    split=partial(steps, name="short"),
    split_mixed=partial(steps, name="mixed"),
)


def split_chart(results: Results) -> Figure:
    rates_of = {name: split(results, name) for name in ("short", "mixed")}
    best = rates_of["short"][PAGED] / rates_of["short"][SEQUENTIAL]
    title = f"{results.plan['main_users']} users: {best:.1f}x one request at a time"
    series = {
        n: [rates.get(e, math.nan) for e in ENGINES] for n, rates in rates_of.items() if rates
    }
    return charts.bars(title, "output tok/s", list(ENGINES), series, digits=0)


def short(results: Results, least: int = 1) -> dict[str, list[Summary]]:
    """Points of short prompts by server, for charts.py: only servers loaded with at least `least`
    different numbers of users."""
    points: dict[str, list[Summary]] = {}
    for row in loads(results):
        if row["workload"] == "short" and row["server"] in ENGINES:
            points.setdefault(row["server"], []).extend(row["points"])
    return {n: ps for n, ps in points.items() if len({p.users for p in ps if p.users}) >= least}


def arrivals(results: Results) -> list[Summary]:
    """Open loops of random arrivals, by their rate; the flood comes last."""
    return [point for point in short(results)[PAGED] if point.kind == "poisson"]


def waiting_chart(results: Results) -> Figure:
    points = [point for point in results["points"] if point["kind"] == "poisson"]
    most, parts = capacity(points), results.plan["slices"]
    series = {
        f"{point['rate'] / most:.0%} of capacity": waits
        for point, waits in zip(points, results["waits"], strict=True)
    }
    places = [100 * (part + 0.5) / parts for part in range(parts)]
    title = "Random arrivals: the wait for the first token, as time goes on"
    return charts.lines(title, "% of the requests, as they come", "TTFT, s", places, series)


CHARTS: dict[str, Callable[[Results], Figure]] = {
    "split": split_chart,
    "throughput": lambda results: curves.throughput(
        short(results, 2), "Short prompts: throughput against users"
    ),
    "latency": lambda results: curves.latency(
        short(results, 2), metrics.E2E_INTENDED, 95, "What a user waits: E2E latency, p95"
    ),
    "goodput": lambda results: curves.goodput(arrivals(results)),
    "waiting": waiting_chart,
}


def headline(results: Results) -> str:
    rates, model = split(results, "short"), results.plan["models"][0]
    total, failed = (sum(row[key] for row in loads(results)) for key in ("requests", "failed"))
    return (
        f"{results.plan['main_users']} users get {rates[PAGED] / rates[SEQUENTIAL]:.1f}x the tok/s "
        f"of one request at a time, and {failed} of {total:,} requests failed "
        f"({'GPT-2 124M shape' if model == 'gpt2' else model}, {results.plan['dtypes'][0]})"
    )


BENCHMARK = kit.Benchmark(STAGE, __doc__, FULL, run, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
