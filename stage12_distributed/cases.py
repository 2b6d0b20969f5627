"""The cases of the benchmark: functions of a model and a plan that give groups of results.

The simulator beside stage 06's server under stage 07's load; then, in simulated time, policies,
deaths, autoscaling and replicas that only prefill; prefill and decode apart, several ranks, and the
router, on this machine. All answers of real engines are proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from shared.bench import kit
from shared.bench.kit import Group, Output, Subject
from shared.bench.rows import percentile
from stage01_forward import families
from stage05_paged.make import make

from .apart import APART, TOGETHER, Job, Load, compare
from .gang import Gang, Setup
from .gang import make as make_ranks
from .measured import relay_seconds, routing_seconds
from .passes import PassTime
from .replay import Run, quantiles
from .replay import measure as measure_loads
from .routing import BLOCK_SIZE
from .simulate import TRAFFIC, arrivals, capacity, one_big_cache, simulate, traffic
from .simulator import POLICIES, Cell, Fleet

LATENCIES = ("ttft", "itl", "e2e")
SHARES = (0.5, 0.99)
SEQUENCES, BUDGET = 32, 256  # at a time, and tokens a pass: the server's defaults
COPYING = 10e9  # bytes a second, assumed for keys and values that are handed over
ONE, TWO = "one process", "two ranks"


@dataclass(frozen=True)
class Sizes(kit.Plan):
    dtypes: tuple[str, ...] = ("float32",)
    contexts: int = 8  # memory of a server, in whole contexts
    users: int = 32  # of the closed loop that finds the capacity
    fitted: float = 0.6  # share of the capacity at which pass times are fitted
    replayed: tuple[float, ...] = (0.4, 0.8)  # shares that they must predict
    requests: int = 200  # of an open loop
    replicas: int = 200
    cell: int = 10
    fleet: int = 1500  # requests to a cell
    load: float = 0.7  # of what the cell can answer
    deaths: int = 5
    ratios: tuple[int, ...] = (2, 4, 6)  # replicas of a cell that only prefill
    streams: int = 8
    answer: int = 96
    long: int = 6  # prompts of 512 tokens
    repeats: int = 2
    rows: tuple[int, ...] = (1, 8)
    routed: tuple[int, ...] = (2, 16, 64)  # replicas among which one is chosen
    events: int = 2000  # that the router passes on


FULL = Sizes()
QUICK = kit.quick(FULL, fitted=0.6, replayed=(0.8,), cell=4, ratios=(1,), fleet=300)


# ---- the simulator beside a server --------------------------------------------------------------


@cache
def measured(subject: Subject, plan: Sizes) -> tuple[list[Run], PassTime]:
    """A server under several loads, and the fit to its passes under the first two."""
    about, more = subject.about, {"engine": "paged", "device": "cpu", "max_queue": 1000}
    more |= {"linear": subject.about["linear"], "max_sequences": SEQUENCES}
    options = kit.server_options(about["model"], about["dtype"], plan.contexts, **more)
    runs = measure_loads(options, (plan.fitted, *plan.replayed), plan.users, plan.requests)
    return runs, PassTime.fit([step for run in runs[:2] for step in run.steps])


def cell_of(subject: Subject, plan: Sizes, replicas: int = 1) -> Cell:
    blocks = plan.contexts * subject.config.n_positions // BLOCK_SIZE
    return Cell(replicas, blocks=blocks, sequences=SEQUENCES, budget=BUDGET)


def replay(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Each load as it was measured, and simulated with pass times of other loads. What HTTP adds to
    the first token is that of the load at which the passes were fitted."""
    (_, *runs), times = measured(subject, plan)
    http = 0.0
    for run in runs:
        lives = Fleet(cell_of(subject, plan), times, run.asks).run().lives
        real = quantiles(run.times)
        made = quantiles((life.ask.at, life.tokens) for life in lives)
        http = http or real["ttft"][0] - made["ttft"][0]
        made |= {name: [value + http for value in made[name]] for name in ("ttft", "e2e")}
        group: Group = {"share": run.share, "rate": run.rate, "requests": len(lives), "http": http}
        group |= {"fitted": run is runs[0], "passes": len(run.steps)}
        yield group | {"costs": list(times.costs), "measured": real, "simulated": made}


# ---- fleets in simulated time -------------------------------------------------------------------


def fleets(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A cell under three kinds of traffic by three policies; then with deaths, with autoscaling,
    and with replicas that only prefill."""
    times = measured(subject, plan)[1]
    cell = cell_of(subject, plan, plan.cell)
    rate = plan.load * plan.cell * capacity(cell, times)
    starts, copy = arrivals(rate, plan.fleet), subject.config.kv_bytes_per_token(subject.dtype)
    asks = {kind: traffic(kind, starts) for kind in TRAFFIC}
    last = starts[-1]
    cases = [("policies", kind, replace(cell, policy=p)) for kind in TRAFFIC for p in POLICIES]
    deaths = tuple(last * (n + 1) / (plan.deaths + 1) for n in range(plan.deaths))
    cases += [("deaths", "prefix", replace(cell, failures=deaths, starting=last / 20))]
    scaling = replace(cell, target=6.0, starting=last / 50, calm=last / 25)
    cases += [("always", "day", cell), ("scaled", "day", scaling)]
    asks["day"] = traffic("prefix", arrivals(rate / 2, plan.fleet, swing=0.9))
    for count in (0, *plan.ratios):
        some = replace(cell, prefill=count, replicas=plan.cell - count, handover=copy / COPYING)
        cases += [("ratio", "free", some)]
    for case, kind, own in cases:
        found = simulate(own, times, asks[kind])
        about = {"case": case, "traffic": kind, "policy": own.policy, "prefill": own.prefill}
        about |= {"replicas": own.replicas, "big": one_big_cache(asks[kind]), "rate": rate}
        yield about | found


# ---- prefill and decode apart -------------------------------------------------------------------


def apart(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """Streams alone, and beside long prompts: one engine, and two processes with half the threads
    each."""
    about, threads = subject.about, torch.get_num_threads()
    job = Job(about["model"], about["model"] != "stories", about["dtype"], about["linear"], 2, 4)
    for long in (0, plan.long):
        load = Load(plan.streams, answer=plan.answer, long=long)
        turns = [compare(job, load, threads) for _ in range(plan.repeats)]
        found = {name: [turn[name] for turn in turns] for name in (TOGETHER, APART)}
        outputs = [map(Output, load.prompts, one["ids"]) for each in found.values() for one in each]
        yield {
            "long": long,
            "streams": plan.streams,
            "tokens": sum(map(len, turns[0][TOGETHER]["ids"])),
            "proof": kit.together(map(subject.prove, outputs)),
            "seconds": {name: [one["seconds"] for one in runs] for name, runs in found.items()},
            "itl": {
                name: [[percentile(one["itl"], share) for share in SHARES] for one in runs]
                for name, runs in found.items()
            },
        }


# ---- several ranks, and the router --------------------------------------------------------------


def whole(name: str, dtype: str) -> Any:
    """The model that every rank loads."""
    return families.load_model(kit.shape(name), dtype=getattr(torch, dtype))


class Threads:
    """An engine whose process computes with this many threads."""

    def __init__(self, engine: Any, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.steps, self.runner = engine.steps, engine.runner

    def generate(self, prompts: Any, sampling: Any) -> Any:
        torch.set_num_threads(self.threads)
        return self.engine.generate(prompts, sampling)


def ranks(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """One process with all threads, and two ranks with half of them each."""
    about, threads = subject.about, torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # as many has each rank
    load = partial(whole, about["model"], about["dtype"])
    gang = Gang(Setup(load, 2, linear=about["linear"]))
    two = Threads(make_ranks(gang.model, plan.contexts), max(1, threads // 2))
    engines = {ONE: Threads(make(subject.model, plan.contexts), threads), TWO: two}
    try:
        for count in plan.rows:
            yield kit.compare(subject, engines, [(64, 32)] * count, plan.repeats)[0]
    finally:
        gang.close()
        torch.set_num_threads(threads)


def router(subject: Subject, plan: Sizes) -> Iterator[Group]:
    """A choice among replicas, and what passing an event on takes of the processor."""
    relay, rate = relay_seconds(plan.events)
    for replicas in plan.routed:
        seconds = [percentile(routing_seconds(replicas), share) for share in SHARES]
        yield {"replicas": replicas, "decision": seconds, "relay": relay, "events": rate}
