"""What several processes buy and cost: `python -m stage12_distributed.benchmark`.

The simulator beside stage 06's server under stage 07's load; then, in simulated time, policies,
deaths, autoscaling and replicas that only prefill; prefill and decode apart, several ranks, and the
router, on this machine. All answers of real engines are proved.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from matplotlib.figure import Figure

from reports.peers.gateways import Chats
from reports.peers.gateways import compare as compare_routers
from shared import charts, cli, models
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster
from shared.bench.kit import Case, Group, Output, Subject
from shared.bench.rows import Results, Row, percentile
from shared.roofline import forward_cost, static_costs
from stage05_paged.engine import make

from .bench.apart import APART, TOGETHER, Load, compare
from .bench.loads import Run, loads
from .bench.streams import deaths, ray_seconds, relay_seconds
from .bench.streams import router as start_router
from .disaggregated.processes import Job
from .router.routing import BLOCK_SIZE, Routing
from .simulation.passes import PassTime
from .simulation.replay import quantiles
from .simulation.simulate import scenarios
from .simulation.simulator import Cell, Fleet
from .tensor.group import RankGroup, Setup
from .tensor.group import make as make_ranks

SUM = 0.2e-3  # seconds, assumed for a sum over a socket of this machine
LATENCIES = ("ttft", "itl", "e2e")
PERCENTS, SHARES = ("p50", "p99"), (0.5, 0.99)
SEQUENCES, BUDGET = 32, 256  # at a time, and tokens a pass: the server's defaults
COPYING = 10e9  # bytes a second, assumed for keys and values that are handed over
ONE, TWO = "one process", "two ranks"
PROMPT = 276  # tokens: a system prompt, and a question


FULL = kit.plan(
    models=("gpt2",), dtypes=("float32",), repeats=2,
    contexts=8,  # memory of a server, in whole contexts
    users=32,  # of the closed loop that finds the capacity
    fitted=0.6,  # share of the capacity at which pass times are fitted
    replayed=(0.4, 0.8), requests=180,  # shares that they must predict, in open loops
    replicas=200, cell=10, fleet=1500,  # requests to a cell
    load=0.7,  # of what the cell can answer
    deaths=5, ratios=(2, 4, 6),  # replicas of a cell that only prefill
    streams=8, answer=96, long=6,  # prompts of 512 tokens
    rows=(1, 8),
    routed=(2, 16, 64), events=2000,  # replicas among which one is chosen; passed on by the router
    kills=100, reserve=12,  # replicas, so that some are ready while others start
    chats=12, held=2,  # whole contexts in the memory of each server behind a router
)  # fmt: skip
FEW = {"fitted": 0.6, "replayed": (0.8,), "cell": 4, "ratios": (1,), "fleet": 300}
FEW |= {"kills": 2, "held": 2}


# ---- the simulator beside a server --------------------------------------------------------------


@cache
def measured(subject: Subject, plan: Any) -> tuple[list[Run], PassTime]:
    """A server under several loads, and the fit to its passes under the first two."""
    about, more = subject.about, {"engine": "paged", "device": "cpu", "max_queue": 1000}
    more |= {"linear": subject.about["linear"], "max_num_seqs": SEQUENCES}
    options = kit.server_options(about["model"], about["dtype"], plan.contexts, **more)
    runs = loads(options, (plan.fitted, *plan.replayed), plan.users, plan.requests)
    fitted = [run for run in runs if run.share in (0.0, plan.fitted)]
    return runs, PassTime.fit([step for run in fitted for step in run.steps])


def cell_of(subject: Subject, plan: Any, replicas: int = 1) -> Cell:
    blocks = plan.contexts * subject.config.n_positions // BLOCK_SIZE
    return Cell(replicas, blocks=blocks, sequences=SEQUENCES, budget=BUDGET)


def replay(subject: Subject, plan: Any) -> Iterator[Group]:
    """Each load as measured, and as simulated with pass times of other loads. What HTTP adds to the
    first token is taken from the load at which the passes were fitted."""
    runs, times = measured(subject, plan)
    cell, http = cell_of(subject, plan), 0.0
    for share in (plan.fitted, *plan.replayed):
        turns = [run for run in runs if run.share == share]
        sims = [sim for run in turns for sim in Fleet(cell, times, run.asks).run().requests]
        real = quantiles(moments for run in turns for moments in run.times)
        simulated = quantiles((sim.ask.at, sim.tokens) for sim in sims)
        http = http or real["ttft"][0] - simulated["ttft"][0]
        simulated |= {name: [v + http for v in simulated[name]] for name in ("ttft", "e2e")}
        group: Group = {"share": share, "rate": turns[0].rate, "requests": len(sims), "http": http}
        group |= {"fitted": share == plan.fitted, "passes": sum(len(run.steps) for run in turns)}
        yield group | {"costs": list(times.costs), "measured": real, "simulated": simulated}


def fleets(subject: Subject, plan: Any) -> Iterator[Group]:
    """A cell with the pass times of this machine, in simulated time."""
    times, kv = measured(subject, plan)[1], subject.config.kv_bytes_per_token(subject.dtype)
    cell = cell_of(subject, plan, plan.cell)
    yield from scenarios(
        cell, times, plan.fleet, plan.ratios, plan.load, plan.deaths, handover=kv / COPYING
    )


# ---- prefill and decode apart -------------------------------------------------------------------


def apart(subject: Subject, plan: Any) -> Iterator[Group]:
    """Streams alone and beside long prompts, on one engine, and on two processes with half the
    threads each."""
    about, threads = subject.about, torch.get_num_threads()
    job = Job(about["model"], about["model"] != "stories", about["dtype"], about["linear"], 2, 4)
    for long in (0, plan.long):
        load = Load(plan.streams, answer=plan.answer, long=long)
        turns = [compare(job, load, threads) for _ in range(plan.repeats)]
        ways = {name: [turn[name] for turn in turns] for name in (TOGETHER, APART)}
        outputs = [map(Output, load.prompts, run["ids"]) for runs in ways.values() for run in runs]
        yield {
            "long": long,
            "streams": plan.streams,
            "tokens": sum(map(len, turns[0][TOGETHER]["ids"])),
            "proof": kit.together(map(subject.prove, outputs)),
            "seconds": {name: [run["seconds"] for run in runs] for name, runs in ways.items()},
            "itl": {
                name: [[percentile(run["itl"], share) for share in SHARES] for run in runs]
                for name, runs in ways.items()
            },
        }


# ---- several ranks, and the router --------------------------------------------------------------


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
    group = RankGroup(Setup(load, 2, linear=about["linear"]))
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
    """The time of a choice among replicas, and the processor time of passing an event on."""
    relay, rate, _ = relay_seconds(count=plan.events)
    for replicas in plan.routed:
        seconds = routing_seconds(replicas)
        decision = [percentile(seconds, share) for share in SHARES]
        yield {"replicas": replicas, "decision": decision, "relay": relay, "events": rate}


def gateways(subject: Subject, plan: Any) -> Iterator[Group]:
    """Chats over two servers, behind our router and behind others."""
    about = subject.about
    options = kit.server_options(
        about["model"], about["dtype"], plan.held, threads=1, linear=about["linear"]
    )
    yield compare_routers(options, Chats(plan.chats), plan.repeats, plan.events)


def kills(subject: Subject, plan: Any) -> Iterator[Group]:
    """What becomes of streams when replicas are killed, one after the other."""
    with start_router("--replicas", str(plan.reserve), "--threads", "1") as server:
        ended = list(chain.from_iterable(deaths(server, plan.kills, plan.streams)))
    hows = Counter(stream.how for stream in ended)
    hit = [stream for stream in ended if stream.there]
    yield {
        "kills": plan.kills,
        "streams": len(ended),
        "hit": len(hit),
        "errors": hows["error"],
        "lost": hows["lost"],
        "untouched": sum(not stream.there and stream.how != "whole" for stream in ended),
        "last": max(stream.seconds for stream in hit),
    }


def ray(subject: Subject, plan: Any) -> Iterator[Group]:
    """Streams from replicas on Ray: by plain HTTP past it, and through its proxy."""
    for way, times in ray_seconds().items():
        first, event = (rows.median(pair[place] for pair in times) for place in (0, 1))
        yield {"way": way, "ttft": first, "event": event}


# ---- tables -------------------------------------------------------------------------------------


def replays(results: Results) -> Iterator[dict[str, str]]:
    """A line for each load and latency."""
    for row in results.groups("replay"):
        for name in LATENCIES:
            share = f"{row['share']:.0%}{', fitted' * row['fitted']}"
            line = {"of capacity": share, "latency": name.upper()}
            for place, percent in enumerate(PERCENTS):
                real, simulated = (row[way][name][place] for way in ("measured", "simulated"))
                line[f"{percent}, ms"] = f"{real * 1e3:,.1f}"
                line[f"simulated {percent}, ms"] = (
                    f"{simulated * 1e3:,.1f} ({simulated / real - 1:+.0%})"
                )
            yield line


def by_policy(results: Results) -> dict[tuple[str, str], Row]:
    return {(row["traffic"], row["policy"]): row for row in fleet("policies")(results)}


def rate(name: str) -> rows.Column:
    return lambda row: f"{row['tokens'] / row.of(name).median:,.1f}"


def fleet(*cases: str) -> Callable[[Results], list[Row]]:
    return lambda results: [row for row in results.groups("fleets") if row["case"] in cases]


def chunk(row: Row) -> float:
    """Least seconds of a pass over a whole budget of a long prompt."""
    return row.least([forward_cost(row.config, row.kind, BUDGET, BUDGET, sampled=0)])


def step(row: Row) -> float:
    """Least seconds of a decode step of the streams, with the whole machine."""
    return row.least([forward_cost(row.config, row.kind, 1, 80, rows=row["streams"])])


def itl(row: Row, name: str, place: int) -> float:
    """Seconds between two tokens of a stream: the median of the repeats' p50 or p99."""
    return rows.median(repeat[place] for repeat in row["itl"][name])


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
    free = policies["free", "load"]["ttft_p50"] / policies["free", "prefix"]["ttft_p50"]
    yield Claim("the same without common prefixes", 1.0, free, "x", "the control: no hits")
    busy = results.groups("apart")[-1]
    beside = "the pass has the streams' rows too, and products of 256 rows are below the peak"
    for name, least, why in (
        (TOGETHER, chunk(busy), beside),
        (APART, 2 * step(busy), "it has one processor of two, and both processes share the memory"),
    ):
        yield Claim(f"p99 between tokens, {name}", 1e3 * least, 1e3 * itl(busy, name, 1), "ms", why)
    why = "a single thread never waits for another; without prompts, apart is slower"
    yield faster("tok/s, apart over together", busy, (TOGETHER, APART), lambda _: 1.0, why)
    why = "a sum takes as long as the slower rank, and each waits for the other 25 times a pass"
    what, row = "two ranks over one process, 1 row", results.groups("ranks")[0]
    yield faster(what, row, (ONE, TWO), whole_seconds, why)
    row = results.groups("replay", fitted=False)[-1]
    simulated, real = (row[way]["e2e"][0] for way in ("simulated", "measured"))
    what = f"E2E p50 at {row['share']:.0%} of the capacity, over simulated"
    why = "the scheduler is the real one, and passes are fitted at another load"
    yield Claim(what, 1.0, real / simulated, "x", why)


def between(name: str, place: int) -> rows.Column:
    return lambda row: f"{itl(row, name, place) * 1e3:,.1f}"


def absent(results: Results) -> str:
    """The routers that could not be measured, with the reasons."""
    missing = [pair for row in results.groups("gateways") for pair in row["missing"].items()]
    lines = [f"{name} was not measured: {why}." for name, why in missing]
    return "\n".join(lines)


COLUMNS: dict[str, rows.Column] = {
    "hits": "hits:.0%",
    "fleet, tok/s": lambda row: (
        f"{row['tokens'] * row.results.plan['replicas'] / row.results.plan['cell']:,.0f}"
    ),
    "one big cache": "big:.0%",
    "max/mean load": "balance:.2f",
    "prefill + decode": lambda row: f"{row['prefill']} + {row['replicas']}",
    "requests": lambda row: row.requests if "lengths" in row.group else row["requests"],
    "what": "case",
    "lost": "lost:.0f",
    "retried": "retried:.0f",
    "replica-seconds": "paid:,.0f",
    "a choice p50, us": lambda row: f"{row['decision'][0] * 1e6:,.0f}",
    "p99, us": lambda row: f"{row['decision'][1] * 1e6:,.0f}",
    "an event, us of processor": "relay * 1e6:,.0f",
    "together": rows.gain(ONE, None, TWO),
    "long prompts": "long",
    "router": "variant",
    "tok/s": lambda row: f"{row['tokens'] / row.median:,.1f}",
    "found": lambda row: f"{rows.median(row['found']):.0%}",
    "first token, ms": lambda row: f"{rows.median(row['first']) * 1e3:,.0f}",
    "added to it, ms": lambda row: f"{row['added'] * 1e3:,.2f}",
    "us of processor an event": lambda row: f"{row['processor'] * 1e6:,.0f}",
    "on dead replicas": "hit",
    "with an error": "errors",
    "just ended": "lost",
    "others not whole": "untouched",
    "the last after, s": "last:.2f",
    "TTFT, ms": "ttft * 1e3:,.1f",
    "an event, ms": "event * 1e3:,.2f",
    **{f"{name}, tok/s": rate(name) for name in (TOGETHER, APART)},
    **{
        f"{name}, ITL {percent}, ms": between(name, place)
        for name in (TOGETHER, APART)
        for place, percent in enumerate(PERCENTS)
    },
    **{
        f"{name.upper()} {percent}, ms": f"{name}_{percent} * 1e3:,.0f"
        for name in LATENCIES
        for percent in PERCENTS
    },
}
TABLES = rows.tables(
    COLUMNS,
    """
    policies: traffic | policy | hits | one big cache | max/mean load | TTFT p50, ms | TTFT p99, ms
      | ITL p99, ms | fleet, tok/s
    few: traffic | policy | hits | max/mean load | TTFT p50, ms | TTFT p99, ms
    deaths: what | requests | lost | retried | TTFT p99, ms
    scaling: what | requests | replica-seconds | TTFT p50, ms | TTFT p99, ms | lost
    ratios: prefill + decode | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | E2E p50, ms
    apart: long prompts | together, ITL p50, ms | together, ITL p99, ms | apart, ITL p50, ms
      | apart, ITL p99, ms | together, tok/s | apart, tok/s
    ranks: requests | one process, tok/s | two ranks, tok/s | together | same tokens
    kills: kills | streams | on dead replicas | with an error | just ended | others not whole
      | the last after, s
    gateways: router | found | tok/s | first token, ms | added to it, ms
      | us of processor an event
    ray: way | TTFT, ms | an event, ms
    router: replicas | a choice p50, us | p99, us | an event, us of processor
    """,
    policies=fleet("policies"),
    few=lambda results: [r for r in fleet("policies")(results) if r["traffic"] == "prefix"],
    deaths=fleet("deaths"),
    scaling=fleet("always", "scaled"),
    ratios=fleet("ratio"),
    gateways=lambda results: results.rows("gateways"),
    absent=absent,
    replays=replays,
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
        f"{chance['hits']:.0%}, in a simulated cell of {results.plan['cell']} replicas"
    )


WORK = kit.cases(
    Case(replay),
    Case(fleets),
    Case(apart),
    Case(ranks),
    Case(router),
    Case(gateways),
    Case(kills),
    Case(ray),
)
BENCHMARK = kit.Benchmark("stage12_distributed", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
