"""Every engine of the staircase behind the same HTTP, under the same load: `python -m stage07_loadtest.benchmark`.

Writes reports/<machine>/stage07_loadtest.json, and every request beside it in stage07_loadtest.requests.jsonl.gz;
`python -m shared.bench.report` turns the first into tables and charts. The servers are
`python -m stage06_serving --engine ...`, all started at the beginning and loaded in turn, with the same weights, dtype, threads
and memory for keys and values. Answers have the same number of tokens everywhere.

Before anything is measured, each server must say what stage 01's engine says, for prompts of the workloads, many at a time.
"""

from __future__ import annotations

import asyncio
import gzip
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import torch
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, measure, parity, roofline
from shared.bench import benchmarks
from shared.bench.tables import limits_of, limits_table, median
from shared.checkpoint import PRESETS, Config
from shared.course import stages
from shared.errors import UserError
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
TRANSFORMERS, SEQUENTIAL, STATIC, CONTINUOUS, PAGED = (
    "transformers",
    "sequential",
    "static",
    "continuous",
    "paged",
)
ENGINES = (TRANSFORMERS, SEQUENTIAL, STATIC, CONTINUOUS, PAGED)
BROUGHT = {
    TRANSFORMERS: "transformers, one request at a time", SEQUENTIAL: "stage 02's cache, one request at a time",
    STATIC: "batching (stage 03)", CONTINUOUS: "continuity (stage 04)", PAGED: "paging (stage 05)",
}  # fmt: skip
BURSTS = 3
BLOCK = 16  # tokens, stage 05's default
WARM_TOKENS = 2  # of each answer while warming up
RULER_TTFT, RULER_ITL = 0.2, 0.05  # seconds that the mock takes, by which the ruler is checked
RULER_USERS, RULER_ROUNDS = 8, 4


@dataclass(frozen=True)
class Plan:
    """What is measured. A point is (workload, users); each starts no request after `seconds`, or has so many a user."""

    model: str = "gpt2"
    dtype: str = "float32"
    contexts: int = 8  # memory for keys and values: so many whole contexts
    sequences: int = 64  # at a time, where the memory allows it
    users: Mapping[str, Mapping[str, tuple[int, ...]]] | None = (
        None  # engine -> workload -> users; None is FULL_USERS
    )
    main_users: int = 64  # where the engines are compared
    rounds: int = 2  # of the comparison; all else is measured once
    seconds: float = 30.0
    a_user: int = 2  # requests, where that is more than one
    open_requests: int = 100
    burst: tuple[int, float] = (40, 8.0)
    other_dtype: str | None = "bfloat16"  # of SEQUENTIAL and PAGED, alone and at main_users
    prove_prompts: int = 3  # of each length

    def loads(self, engine: str) -> list[tuple[str, int]]:
        return [
            (name, each)
            for name, users in (self.users or FULL_USERS)[engine].items()
            for each in users
        ]


FULL_USERS: dict[str, dict[str, tuple[int, ...]]] = {
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
FULL = Plan()
QUICK = Plan(
    users={
        TRANSFORMERS: {"short": (1,)}, SEQUENTIAL: {"short": (1,)}, STATIC: {"short": (16,)}, CONTINUOUS: {"short": (16,)},
        PAGED: {"short": (1, 16)},
    },
    main_users=16, rounds=1, seconds=6.0, a_user=1, open_requests=12, burst=(8, 4.0), other_dtype=None, prove_prompts=1,
)  # fmt: skip


# ---- servers and their proof ----------------------------------------------------------------------------------------------


def options(plan: Plan, engine: str, dtype: str, config: Config) -> list[str]:
    """The command line of a server. `stories` has weights of its own; those of other models are random, with the same seed."""
    memory = plan.contexts * config.n_positions * config.kv_bytes_per_token(getattr(torch, dtype))
    weights = [] if plan.model == "stories" else ["--random-weights"]
    return [
        "--engine", engine, "--model", plan.model, *weights, "--device", "cpu", "--dtype", dtype,
        "--threads", str(torch.get_num_threads()), "--kv-memory", str(memory), "--max-sequences", str(plan.sequences),
        "--max-queue", "1000", "--request-timeout", "3600",
    ]  # fmt: skip


@dataclass
class Said:
    """An answer, with the names that `parity.compare` reads."""

    token_ids: list[int]
    finish_reason: str


async def answers(url: str, asks: Sequence[Ask]) -> list[Said]:
    """What a server says to all of them at once. Raises UserError if it does not."""
    async with open_session(Target(url)) as session:

        async def one(ask: Ask) -> Said:
            body = {
                "prompt": ask.prompt,
                "max_tokens": ask.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                async with session.post(
                    f"{url}/v1/completions", json=body | {"return_token_ids": True}
                ) as response:
                    (choice,) = (await response.json())["choices"]
                    return Said(choice["token_ids"], choice["finish_reason"])
            except (aiohttp.ClientError, KeyError) as error:
                raise UserError(
                    f"The server at {url} did not answer ({error}): try its command line by hand."
                ) from None

        return list(await asyncio.gather(*map(one, asks)))


class Oracle:
    """What stage 01's engine says to some prompts of each length, and how long it takes."""

    def __init__(self, plan: Plan, bar: Callable[[str], object]) -> None:
        self.asks = [
            ask for name in LENGTHS for ask in workload.make(name, plan.prove_prompts, "proof")
        ]
        self.expected: dict[str, list[Any]] = {}
        seconds = 0.0
        for dtype in filter(None, (plan.dtype, plan.other_dtype)):
            weights = checkpoint.load(plan.model, random_weights=plan.model != "stories")
            model = stages.load_model(weights, dtype=getattr(torch, dtype))
            engine = stages.oracle(model)
            sampling = stages.sampling_params()(
                max_tokens=ANSWER, ignore_eos=True, logprobs=parity.LIKELIEST
            )
            engine.generate([self.asks[0].prompt], replace(sampling, max_tokens=WARM_TOKENS))
            found = []
            for number, ask in enumerate(self.asks):
                started = time.perf_counter()
                found += engine.generate([ask.prompt], sampling)
                if dtype == plan.dtype and number < plan.prove_prompts:
                    seconds += time.perf_counter() - started
                bar(f"stage 01 says what is right, {dtype}")
            self.expected[dtype] = found
        self.naive = (
            plan.prove_prompts * ANSWER / seconds
        )  # tok/s, without HTTP, over the short prompts

    def prove(self, name: str, url: str, dtype: str) -> dict[str, Any]:
        """Ask the server at `url` the same, all at once. Raises parity.ParityError if it says something else."""
        found = parity.Parity()
        parity.compare(
            name,
            self.expected[dtype],
            asyncio.run(answers(url, self.asks)),
            getattr(torch, dtype),
            found,
        )
        return asdict(found)


def check_ruler() -> dict[str, Any]:
    """What the load test measures of a server whose latencies are known: both in seconds, and the client's share of a core."""
    known = {
        metrics.TTFT: RULER_TTFT,
        metrics.ITL: RULER_ITL,
        metrics.E2E: RULER_TTFT + (ANSWER - 1) * RULER_ITL,
    }
    asks = workload.make("short", RULER_USERS * (1 + RULER_ROUNDS), "ruler")
    when = schedule.closed(RULER_USERS, RULER_USERS * RULER_ROUNDS)
    with mock.process("--ttft", str(RULER_TTFT), "--itl", str(RULER_ITL)) as url:
        found = metrics.summarize(
            asyncio.run(run_point(Target(url), asks, when, warmup=RULER_USERS)), Slo()
        )
    return {
        "known": known,
        "measured": {name: found.at(name, 50) for name in known},
        "client_cpu": found.client_cpu,
    }


# ---- measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """One that runs. `name` is the engine, with the dtype if that is not the plan's."""

    name: str
    url: str
    dtype: str


def alone(name: str) -> bool:
    """Whether the server of this name takes one request at a time."""
    return name.startswith((SEQUENTIAL, TRANSFORMERS))


def comparison(plan: Plan) -> list[tuple[str, str, int]]:
    """The points that are measured in rounds: the same workload and number of users for every engine that has them."""
    return [
        (engine, name, users)
        for engine in ENGINES
        for name, users in plan.loads(engine)
        if users == plan.main_users
    ]


def measure_all(
    plan: Plan, keep: Callable[[str], object]
) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Configuration, results, limits; `keep` is given the requests of each point, a line of JSON each. Raises UserError for a
    server that does not start, ParityError for one that is wrong."""
    limits = measure.limits(refresh=True)
    config = PRESETS[plan.model]
    main = comparison(plan)
    others = [
        (engine, *load)
        for engine in ENGINES
        for load in plan.loads(engine)
        if (engine, *load) not in main
    ]
    turns = [
        turn
        for number in range(plan.rounds)
        for turn in main[number % len(main) :] + main[: number % len(main)]
    ] + others
    extra = [(SEQUENTIAL, 1), (PAGED, 1), (PAGED, plan.main_users)] if plan.other_dtype else []
    proofs = 3 * plan.prove_prompts * (2 if plan.other_dtype else 1)
    results: dict[str, Any] = {"points": [], "proof": {}, "ruler": check_ruler()}
    with (
        tqdm(total=proofs + len(turns) + len(extra) + len(SHARES) + 1, unit="point") as bar,
        ExitStack() as stack,
    ):

        def tell(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        oracle = Oracle(plan, tell)
        results["naive"] = oracle.naive

        def start(engine: str, dtype: str) -> Server:
            name = engine if dtype == plan.dtype else f"{engine}, {dtype}"
            ours = stack.enter_context(own_server(options(plan, engine, dtype, config), quiet=True))
            found = Server(name, ours.url, dtype)
            results["proof"][name] = oracle.prove(name, found.url, dtype)
            return found

        def point(
            server: Server, name: str, when: schedule.Schedule, count: int, seconds: float | None
        ) -> None:
            number = len(results["points"])
            warmup = min(when.users or plan.sequences, plan.sequences)
            if alone(server.name):
                warmup = 1
            asks = workload.make(
                name, warmup + count, f"point {number}", longest=config.n_positions
            )
            asks = [replace(ask, max_tokens=WARM_TOKENS) for ask in asks[:warmup]] + asks[warmup:]
            found = asyncio.run(
                run_point(
                    Target(server.url), asks, when, workload=name, warmup=warmup, seconds=seconds
                )
            )
            if found.interrupted:
                raise KeyboardInterrupt
            summary = metrics.summarize(found, SLO)
            keep(request_lines(number, found.records))
            results["points"].append({"server": server.name} | to_json(summary))
            tell(f"{server.name}, {name}, {when}: {summary.output_rate:.0f} tok/s")

        def closed(server: Server, name: str, users: int) -> None:
            if users >= plan.main_users:
                count = users * (
                    1 if alone(server.name) else plan.a_user
                )  # one at a time is as fast whoever else waits
                point(server, name, schedule.closed(users, count), count, None)
            else:
                count = math.ceil(users * (1 + MOST_A_SECOND * plan.seconds))
                point(server, name, schedule.closed(users, count), count, plan.seconds)

        servers = {engine: start(engine, plan.dtype) for engine in ENGINES}
        for engine, name, users in turns:
            closed(servers[engine], name, users)
        capacity = max(
            each["request_rate"]
            for each in results["points"]
            if each["server"] == PAGED and each["workload"] == "short"
        )
        for share in SHARES:
            when = schedule.poisson(share * capacity, plan.open_requests, seed=round(100 * share))
            point(servers[PAGED], "short", when, plan.open_requests, None)
        size, every = plan.burst
        point(
            servers[PAGED],
            "short",
            schedule.bursts(size, every, BURSTS * size),
            BURSTS * size,
            None,
        )
        for engine, users in extra:
            name = f"{engine}, {plan.other_dtype}"
            if name not in servers:
                servers[name] = start(engine, str(plan.other_dtype))
            closed(servers[name], "short", users)
    return {"plan": asdict(plan)}, results, limits


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes; else every request is written
    down beside the results."""
    requests: list[str] = []
    configuration, results, limits = measure_all(QUICK if quick else FULL, requests.append)
    if not quick:
        path = measure.results_file(STAGE).with_suffix(".requests.jsonl.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(requests).encode(), mtime=0))
    return {"quick": quick, **configuration}, results, limits


# ---- predictions ----------------------------------------------------------------------------------------------------------


def rows_of(plan: Mapping[str, Any], config: Config, engine: str, name: str, users: int) -> int:
    """Sequences that can be in one pass: by the memory, by the settings, and by who is there."""
    if alone(engine):
        return 1
    slots = plan["contexts"]
    if engine.startswith(PAGED):
        blocks = -(-(LENGTHS[name] + ANSWER) // BLOCK)
        slots = plan["contexts"] * config.n_positions // (blocks * BLOCK)
    return min(slots, plan["sequences"], users)


def predicted(
    results: Mapping[str, Any], engine: str, name: str, users: int, dtype: str
) -> float | None:
    """Output tok/s if every pass took what its operations and bytes need, and nothing else took time. None for lengths that
    vary."""
    if name not in LENGTHS:
        return None
    plan, limits, kind = results["configuration"]["plan"], limits_of(results), getattr(torch, dtype)
    config = PRESETS[plan["model"]]
    rows = rows_of(plan, config, engine, name, users)
    seconds = roofline.forward_cost(config, kind, LENGTHS[name], rows=rows).seconds(limits, kind)
    for number in range(1, ANSWER):
        seconds += roofline.forward_cost(
            config, kind, 1, LENGTHS[name] + number - 1, rows=rows
        ).seconds(limits, kind)
    return rows * ANSWER / seconds


# ---- from results to tables and charts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """All repeats of one point."""

    server: str
    points: list[Summary]

    @property
    def name(self) -> str:
        return self.points[0].workload

    def median(self, of: Callable[[Summary], float]) -> float:
        return median([of(point) for point in self.points])

    @property
    def rate(self) -> float:
        """Output tok/s."""
        return self.median(lambda point: point.output_rate)

    def rate_text(self) -> str:
        rates = measure.summarize([point.output_rate for point in self.points])
        return rates.show() if len(self.points) > 1 else f"{rates.median:,.1f}"

    @property
    def requests(self) -> int:
        return sum(point.requests for point in self.points)

    def success_text(self) -> str:
        return f"{sum(point.succeeded for point in self.points) / self.requests:.1%}"

    def ms(self, name: str, percent: int) -> str:
        """A percentile of a latency, failures counted as infinite; the median of the repeats."""
        values = [point.at(name, percent, adjusted=name != metrics.ITL) for point in self.points]
        known = [value for value in values if value is not None]
        return (
            ""
            if not known
            else "inf"
            if math.isinf(median(known))
            else f"{median(known) * 1e3:,.0f}"
        )


def loads_of(results: Mapping[str, Any], wanted: Callable[[Summary], bool]) -> list[Load]:
    """The points that are `wanted`, repeats together, by server, workload and load."""
    found: dict[tuple[str, str, float, str], list[Summary]] = {}
    for each in results["results"]["points"]:
        content = {key: value for key, value in each.items() if key != "server"}
        point = from_json(content)
        if wanted(point):
            size = float(point.users if point.users is not None else point.rate or 0.0)
            found.setdefault((each["server"], point.workload, size, point.kind), []).append(point)
    names = list(dict.fromkeys([*ENGINES, *(key[0] for key in found)]))
    kinds = list(workload.WORKLOADS)
    order = sorted(found, key=lambda key: (names.index(key[0]), kinds.index(key[1]), *key[2:]))
    return [Load(key[0], found[key]) for key in order]


def closed_loads(results: Mapping[str, Any]) -> list[Load]:
    return loads_of(results, lambda point: point.users is not None)


def load_table(results: dict[str, Any]) -> str:
    """Every closed loop in the plan's dtype."""
    lines = [
        "| server | workload | users | requests | success | tok/s | predicted at most | x sequential | TTFT p50, ms | p95, ms "
        "| TPOT p50, ms | p95, ms | E2E p50, ms | p95, ms | goodput, req/s | client CPU |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    dtype = results["configuration"]["plan"]["dtype"]
    loads = [load for load in closed_loads(results) if load.server in ENGINES]
    # With the most users that were tried, who come last: whoever waits does not make one request at a time slower.
    sequential = {load.name: load.rate for load in loads if load.server == SEQUENTIAL}
    for load in loads:
        users = load.points[0].users or 0
        most = predicted(results, load.server, load.name, users, dtype)
        base = sequential.get(load.name)
        cells = [
            load.server, load.name, str(users), str(load.requests), load.success_text(), load.rate_text(),
            f"{most:,.0f}" if most else "", f"{load.rate / base:.1f}x" if base else "",
            load.ms(metrics.TTFT_INTENDED, 50), load.ms(metrics.TTFT_INTENDED, 95),
            load.ms(metrics.TPOT, 50), load.ms(metrics.TPOT, 95), load.ms(metrics.E2E_INTENDED, 50),
            load.ms(metrics.E2E_INTENDED, 95), f"{load.median(lambda point: point.goodput):.2f}",
            f"{load.median(lambda point: point.client_cpu):.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def split(results: Mapping[str, Any], name: str) -> list[tuple[str, float]]:
    """Engine and tok/s, in the order of the staircase, with the plan's main number of users; those that work alone with the most
    they had."""
    users = results["configuration"]["plan"]["main_users"]
    measured = {
        load.server: load.rate for load in closed_loads(results)
        if load.server in ENGINES and load.name == name and (alone(load.server) or load.points[0].users == users)
    }  # fmt: skip
    return list(measured.items())


def split_table(results: dict[str, Any]) -> str:
    """What each step brings, where all are asked by as many users. transformers has a cache too, so it is the cache's peer and
    no step."""
    naive = results["results"]["naive"]
    lines = [
        "| workload | server | what it brings | tok/s | over the line before | over sequential |",
        "|---|---|---|--:|--:|--:|",
    ]
    for name in ("short", "mixed"):
        found = split(results, name)
        base = dict(found).get(SEQUENTIAL)
        before = None
        if name == "short" and base:
            before = naive
            lines.append(
                f"| {name} | none: stage 01, offline | nothing | {naive:,.1f} |  | {naive / base:.2f}x |"
            )
        for engine, rate in found:
            step = f"{rate / before:.2f}x" if before and engine != TRANSFORMERS else ""
            over = f"{rate / base:.2f}x" if base else ""
            lines.append(
                f"| {name} | {engine} | {BROUGHT[engine]} | {rate:,.1f} | {step} | {over} |"
            )
            if engine != TRANSFORMERS:
                before = rate
    return "\n".join(lines)


def open_table(results: dict[str, Any]) -> str:
    """Arrivals that do not wait for answers."""
    capacity = max(
        point.request_rate
        for load in closed_loads(results)
        if (load.server, load.name) == (PAGED, "short")
        for point in load.points
    )
    lines = [
        "| arrivals | of capacity | requests | success | offered, req/s | answered, req/s | tok/s | TTFT p50, ms | p95, ms "
        "| TPOT p50, ms | E2E p50, ms | p95, ms | goodput, req/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load in loads_of(results, lambda point: point.users is None):
        point = load.points[0]
        rate = point.rate or 0.0
        cells = [
            point.kind, f"{rate / capacity:.0%}", str(point.requests), f"{point.success_rate:.1%}", f"{rate:.2f}",
            f"{point.request_rate:.2f}", f"{point.output_rate:,.1f}", load.ms(metrics.TTFT_INTENDED, 50),
            load.ms(metrics.TTFT_INTENDED, 95), load.ms(metrics.TPOT, 50), load.ms(metrics.E2E_INTENDED, 50),
            load.ms(metrics.E2E_INTENDED, 95), f"{point.goodput:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def dtype_table(results: dict[str, Any]) -> str:
    """The other dtype beside the plan's."""
    plan = results["configuration"]["plan"]
    lines = [
        "| server | users | success | tok/s | predicted at most | TTFT p50, ms | TPOT p50, ms | E2E p50, ms |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load in closed_loads(results):
        engine, _, dtype = load.server.partition(", ")
        users = load.points[0].users or 0
        if (
            load.name != "short"
            or engine not in (SEQUENTIAL, PAGED)
            or users not in (1, plan["main_users"])
        ):
            continue
        most = predicted(results, engine, "short", users, dtype or plan["dtype"])
        cells = [
            f"{engine}, {dtype or plan['dtype']}", str(users), load.success_text(), load.rate_text(), f"{most:,.0f}",
            *(load.ms(each, 50) for each in (metrics.TTFT_INTENDED, metrics.TPOT, metrics.E2E_INTENDED)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def span(values: Sequence[float], digits: int) -> str:
    """From the least to the most, and of how many points."""
    return (
        f"{min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} points"
        if values
        else "0 points"
    )


def ruler_lines(results: Mapping[str, Any]) -> list[str]:
    """Known latencies beside what was measured of them; nothing in results that are older than this check."""
    found = results["results"].get("ruler")
    if found is None:
        return []
    pairs = [
        f"{name.upper()} {known * 1e3:,.0f} ms: {found['measured'][name] * 1e3:,.1f}"
        for name, known in found["known"].items()
    ]
    return [
        f"| a server of known latencies, as measured (p50) | {'; '.join(pairs)}; client CPU {found['client_cpu']:.0%} |"
    ]


def trust_table(results: dict[str, Any]) -> str:
    """How far the ruler is to be trusted, over all points."""
    measured = [
        (load, point) for load in loads_of(results, lambda point: True) for point in load.points
    ]
    points = [point for _, point in measured]
    ratios = [point.little.ratio for point in points if point.little is not None]
    flags = [(load, point, flag) for load, point in measured for flag in point.flags]
    short = sum(flag.startswith(metrics.SHORT) for _, _, flag in flags)
    marks = [str(sum(bool(point.flags) for point in points))]
    if short:
        marks += [
            f"{short} are short: fewer than {metrics.LEAST_REQUESTS} requests, in less than {metrics.LEAST_SECONDS:.0f} s"
        ]
    marks += [
        f"{load.server}, {load.name}, {point.load}: {flag}"
        for load, point, flag in flags if not flag.startswith(metrics.SHORT)
    ]  # fmt: skip
    steady = [
        point.steady.output_rate / point.output_rate
        for point in points
        if point.steady and point.output_rate
    ]
    proofs = results["results"]["proof"].values()
    ties = sum(len(each["near_ties"]) for each in proofs)
    tokens = sum(each["tokens"] for each in proofs)
    requests, failed = (
        sum(point.requests for point in points),
        sum(point.requests - point.succeeded for point in points),
    )
    lines = [
        "| what | found |",
        "|---|---|",
        *ruler_lines(results),
        f"| tokens proved against stage 01 | {tokens:,}, of {len(proofs)} servers; answers that parted at a near tie: {ties} |",
        f"| requests, and those that failed | {requests:,}; {failed} |",
        f"| client CPU, share of a core, at most | {max(point.client_cpu for point in points):.0%} |",
        f"| Little's law, L over lambda W | {span(ratios, 3)} |",
        f"| tokens received = tokens the server counts | {sum(p.tokens_match is True for p in points)} of {len(points)} points |",
        f"| blocks back to zero | {sum(p.blocks_back is True for p in points)} of {len(points)} points |",
        f"| tok/s of the steady part, over that of the whole point | {span(steady, 2)} |",
        f"| points with a mark against them | {'; '.join(marks)} |",
    ]
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "load": load_table(results),
        "split": split_table(results),
        "open": open_table(results),
        "dtype": dtype_table(results),
        "trust": trust_table(results),
    }


def servers_of(
    results: Mapping[str, Any], wanted: Callable[[Load], bool]
) -> dict[str, list[Summary]]:
    """Points by server, for charts.py."""
    found: dict[str, list[Summary]] = {}
    for load in loads_of(results, lambda point: True):
        if wanted(load):
            found.setdefault(load.server, []).extend(load.points)
    return found


def split_chart(results: dict[str, Any]) -> Any:
    names = [name for name in ("short", "mixed") if split(results, name)]
    values = {name: dict(split(results, name)) for name in names}
    engines = [engine for engine in ENGINES if any(engine in each for each in values.values())]
    base = values["short"][SEQUENTIAL]
    best = values["short"][PAGED] / base
    return draw.bars(
        f"{results['configuration']['plan']['main_users']} users: {best:.1f}x one request at a time", "output tok/s", engines,
        {name: [values[name].get(engine, math.nan) for engine in engines] for name in names}, digits=0,
    )  # fmt: skip


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    short = servers_of(results, lambda load: load.name == "short" and load.server in ENGINES)
    several = {
        name: points
        for name, points in short.items()
        if len({p.users for p in points if p.users is not None}) > 1
    }
    paged = {PAGED: short[PAGED]}
    spread = {point.load: point for point in short[PAGED] if point.users in (1, 8, 32, 64, 128)}
    found: dict[str, Callable[[], Any]] = {
        "split": partial(split_chart, results),
        "throughput": partial(
            curves.throughput, several or short, "Short prompts: throughput against users"
        ),
        "latency": partial(
            curves.latency,
            several or short,
            metrics.E2E_INTENDED,
            95,
            "What a user waits: E2E latency, p95",
        ),
        "offered": partial(
            curves.offered, paged, title="Paged: latency against offered load, short prompts"
        ),
        "goodput": partial(curves.goodput, paged),
        "ttft": partial(curves.distribution, spread, metrics.TTFT_INTENDED),
        "itl": partial(curves.distribution, spread, metrics.ITL),
    }
    return found


def headline(results: dict[str, Any]) -> str:
    """One line for the table of stages."""
    plan = results["configuration"]["plan"]
    found = dict(split(results, "short"))
    points = [point for load in loads_of(results, lambda point: True) for point in load.points]
    failed = sum(point.requests - point.succeeded for point in points)
    return (
        f"{plan['main_users']} users get {found[PAGED] / found[SEQUENTIAL]:.1f}x the tok/s of one request at a time, and "
        f"{failed} of {sum(p.requests for p in points):,} requests failed ({shape_of(plan)}, {plan['dtype']})"
    )


def shape_of(plan: Mapping[str, Any]) -> str:
    return "GPT-2 124M shape" if plan["model"] == "gpt2" else plan["model"]


def main(argv: list[str] | None = None) -> None:
    benchmarks.main(
        STAGE,
        "Measures every engine behind HTTP, under the load of 1 to 128 users.",
        run,
        tables,
        argv,
    )


if __name__ == "__main__":
    cli.run(main)
