"""What several processes buy and cost: `python -m stage12_distributed.benchmark`.

In simulated time: policies, deaths, and bounds of the load at three loads on few and many replicas.
On this machine: several ranks, and the time of a choice. All answers of real engines are proved.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from shared import charts, cli, models
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, percentile
from shared.roofline import forward_cost, static_costs
from stage05_paged.engine import make

from .passes import PassTime, calibrate
from .routing import BLOCK_SIZE, Routing
from .simulator import Cell, bounds, scenarios
from .tensor.group import RankGroup, Setup
from .tensor.group import make as make_ranks

SUM = 0.2e-3  # seconds, assumed for a sum over a socket of this machine
SHARES = (0.5, 0.99)
ONE, TWO = "one process", "two ranks"
PROMPT = 276  # tokens: a system prompt, and a question
FULL = kit.plan(
    models=("gpt2",), dtypes=("float32",), repeats=2,
    contexts=8,  # memory of a server, in whole contexts
    cell=10, fleet=1500, load=0.7, deaths=5,  # requests to the replicas; share of their capacity
    bounded=600,  # requests, for each load and number of replicas
    rows=(1, 8), routed=(2, 16, 64),
)  # fmt: skip
FEW = {"cell": 4, "fleet": 300, "bounded": 50, "rows": (1,)}


def simulated(subject: Subject, plan: Any) -> tuple[Cell, PassTime]:
    """Replicas with the pass times of this machine."""
    steps = calibrate(make(subject.model, plan.contexts))
    blocks = plan.contexts * subject.config.n_positions // BLOCK_SIZE
    return Cell(plan.cell, blocks=blocks), PassTime.fit(steps)


def fleets(subject: Subject, plan: Any) -> Iterator[Group]:
    yield from scenarios(*simulated(subject, plan), plan.fleet, plan.load, plan.deaths)


def bounded(subject: Subject, plan: Any) -> Iterator[Group]:
    yield from bounds(*simulated(subject, plan), plan.bounded)


def whole(name: str, dtype: str) -> Any:
    """The model that every rank loads."""
    return models.load_model(kit.shape(name), dtype=getattr(torch, dtype))


class Threads:
    """An engine whose process computes with this many threads."""

    def __init__(self, engine: Any, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.steps, self.runner = engine.steps, engine.runner

    def generate(self, prompts: Any, sampling: Any) -> Any:
        torch.set_num_threads(self.threads)
        return self.engine.generate(prompts, sampling)


def ranks(subject: Subject, plan: Any) -> Iterator[Group]:
    """One process with all threads, and two ranks with half of them each."""
    about, threads = subject.about, torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # as many as each rank has
    load = partial(whole, about["model"], about["dtype"])
    group = RankGroup(Setup(load, 2, timeout=60.0, linear="auto"))
    two = Threads(make_ranks(group.model, plan.contexts), max(1, threads // 2))
    engines = {ONE: Threads(make(subject.model, plan.contexts), threads), TWO: two}
    try:
        for count in plan.rows:
            yield kit.compare(subject, engines, [(64, 32)] * count, plan.repeats)[0]
    finally:
        group.close()
        torch.set_num_threads(threads)


def routing_seconds(replicas: int) -> list[float]:
    """Seconds of each of 4,000 choices among `replicas`. Prompts have 1,024 tokens and share half
    of them with other prompts; up to 8 requests a replica are in flight."""
    generator, routing = random.Random(0), Routing(seed=0)
    for number in range(replicas):
        routing.add(f"replica-{number}")
    starts = [generator.choices(range(50_000), k=512) for _ in range(4 * replicas)]
    times, running = [], []
    for _ in range(4000):
        prompt = generator.choice(starts) + generator.choices(range(50_000), k=512)
        before = time.perf_counter()
        route = routing.choose(routing.digests(prompt), len(prompt), 64)
        assert route is not None
        routing.start(route)
        running.append(route)
        if len(running) > 8 * replicas:
            routing.finish(running.pop(0))
        times.append(time.perf_counter() - before)
    return times


def router(subject: Subject, plan: Any) -> Iterator[Group]:
    """The time of a choice among replicas."""
    for replicas in plan.routed:
        seconds = routing_seconds(replicas)
        yield {"replicas": replicas, "decision": [percentile(seconds, share) for share in SHARES]}


# ---- tables -------------------------------------------------------------------------------------


def fleet(*cases: str) -> Callable[[Results], list[Row]]:
    return lambda results: [row for row in results.groups("fleets") if row["case"] in cases]


def by_policy(results: Results) -> dict[tuple[str, str], Row]:
    return {(row["traffic"], row["policy"]): row for row in fleet("policies")(results)}


def whole_seconds(row: Row) -> float:
    """Least seconds of a load on one process; two ranks on one machine add their sums."""
    least = row.least(static_costs(row.config, row.kind, row.lengths))
    sums = row.of(ONE)["passes"] * (2 * row.config.n_layer + 1) if row.variant == TWO else 0
    return least + sums * SUM


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts."""
    policies = by_policy(results)
    prefix, chance = policies["prefix", "prefix"], policies["prefix", "random"]
    why = "a prefix whose replica is too busy is computed by another one too"
    yield Claim("prompts found, by prefix", 100 * prefix["big"], 100 * prefix["hits"], "%", why)
    half, most = (
        prefix.least([forward_cost(prefix.config, prefix.kind, PROMPT // part)]) for part in (2, 9)
    )
    gain = chance["ttft_p50"] / prefix["ttft_p50"]
    tail = chance["ttft_p99"] / prefix["ttft_p99"]
    why = (
        f"at random {chance['hits']:.0%} of the tokens are found, so the median request has its "
        f"prefix by either policy; p99: {tail:.2f}x"
    )
    yield Claim("TTFT, at random over by prefix", half / most, gain, "x", why)
    free = policies["free", "random"]["ttft_p50"] / policies["free", "prefix"]["ttft_p50"]
    yield Claim("the same without common prefixes", 1.0, free, "x", "the control: no hits")
    why = "a sum takes as long as the slower rank, and each waits for the other 25 times a pass"
    what, row = "two ranks over one process, 1 row", results.groups("ranks")[0]
    yield faster(what, row, (ONE, TWO), whole_seconds, why)


COLUMNS: dict[str, rows.Column] = {
    "hits": "hits:.0%",
    "one big cache": "big:.0%",
    "max/mean load": "balance:.2f",
    "requests": lambda row: row.requests if "lengths" in row.group else row["requests"],
    "what": "case",
    "load": "load:.0%",
    "lost": "lost:.0f",
    "retried": "retried:.0f",
    "a choice p50, us": lambda row: f"{row['decision'][0] * 1e6:,.0f}",
    "p99, us": lambda row: f"{row['decision'][1] * 1e6:,.0f}",
    "together": rows.gain(ONE, None, TWO),
    **{
        f"{name.upper()} {percent}, ms": f"{name}_{percent} * 1e3:,.0f"
        for name in ("ttft", "itl", "e2e")
        for percent in ("p50", "p99")
    },
}
TABLES = rows.tables(
    COLUMNS,
    """
    few: traffic | policy | hits | max/mean load | TTFT p50, ms | TTFT p99, ms
    bounds < bounded: traffic | replicas | load | policy | hits | one big cache | max/mean load
      | TTFT p50, ms | TTFT p99, ms | E2E p99, ms
    deaths: what | requests | lost | retried | TTFT p99, ms
    ranks: requests | one process, tok/s | two ranks, tok/s | together | same tokens
    router: replicas | a choice p50, us | p99, us
    """,
    few=fleet("policies"),
    deaths=fleet("deaths"),
    claims=closing(claims),
)


def found_chart(results: Results) -> Figure:
    policies = fleet("policies")(results)
    traffics = dict.fromkeys(row["traffic"] for row in policies)
    names = {"prefix": "64 prefixes", "free": "no common\nprefix", "hot": "one hot\nprefix"}
    kinds = [names.get(traffic, traffic) for traffic in traffics]
    shares = {row["policy"]: list[float]() for row in policies}
    for row in policies:
        shares[row["policy"]].append(100 * row["hits"])
    title, label = "Common prefixes: what each policy finds", "% of the prompts' tokens (simulated)"
    return charts.bars(title, label, kinds, shares, digits=0)


CHARTS = {"policies": found_chart}


def headline(results: Results) -> str:
    policies = by_policy(results)
    prefix, chance = policies["prefix", "prefix"], policies["prefix", "random"]
    return (
        f"by prefix {prefix['hits']:.0%} of the prompts' tokens are found, at random "
        f"{chance['hits']:.0%}, on {results.plan['cell']} simulated replicas"
    )


WORK = kit.cases(Case(fleets), Case(bounded), Case(ranks), Case(router))
BENCHMARK = kit.Benchmark("stage12_distributed", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
