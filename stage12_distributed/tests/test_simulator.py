"""The simulator: its fit, the queues that theory knows, and what replicas behind a router do."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from operator import mul
from typing import Any

import pytest

from shared import models
from shared.errors import UserError
from shared.kit import greedy
from stage04_continuous.plan import Plan, Work
from stage04_continuous.request import Request
from stage05_paged.engine import make
from stage12_distributed.passes import Meter, PassTime, amounts

pytest.importorskip("simpy", reason="requirements-distributed.txt is not installed")

from stage12_distributed import simulator  # noqa: E402
from stage12_distributed.simulator import (  # noqa: E402
    Ask,
    Cell,
    Fleet,
    arrivals,
    capacity,
    chats,
    one_big_cache,
    traffic,
)

# About those of GPT-2 124M on two cores: 20 ms to read the weights, 0.7 ms a token of a prompt.
TIMES = PassTime((0.02, 0.0007, 0.0015, 2e-6, 1e-7), (0.9, 1.0, 1.1))
CELL = Cell(replicas=8, blocks=512)


def load(cell: Cell, kind: str, count: int = 400, share: float = 0.6) -> list[Ask]:
    """Traffic to a cell, as a share of what it can answer."""
    rate = share * cell.replicas * capacity(cell, TIMES)
    return traffic(kind, arrivals(rate, count), answer=20)


def test_a_pass_is_described_by_what_it_computes() -> None:
    prompt, decode = Request([1] * 10, greedy(4)), Request([1] * 6, greedy(4))
    plan = Plan(work=[Work(prompt, [], 2, 3, 0), Work(decode, [], 5, 1, 1)])
    # Tokens 2, 3, 4 see 3, 4 and 5 tokens; token 5 sees 6.
    assert amounts(plan) == (1, 2, 2, 5 + 6, 3 + 4 + 5 + 6)


def test_the_fit_finds_costs_that_were_planted_and_none_below_zero() -> None:
    rng, costs = random.Random(0), (0.01, 0.002, 0.0, 3e-5, 1e-6)
    steps = [[1.0, *(rng.randrange(1, 100) for _ in range(4))] for _ in range(50)]
    steps = [[*step, sum(map(mul, costs, step))] for step in steps]
    fitted = PassTime.fit(steps)
    assert fitted.costs == pytest.approx(costs, abs=1e-9)
    assert fitted.ratios == pytest.approx([1.0] * 100)
    fitted = PassTime.fit([[*step, s - 1e-4 * step[2]] for *step, s in steps])
    assert fitted.costs[2] == 0 and min(fitted.costs) >= 0


def test_the_simulator_makes_the_passes_of_the_real_engine() -> None:
    model: Any = models.load_model(models.load("tiny", random_weights=True))
    real: Any = make(model, contexts=6)
    rng, meter = random.Random(1), Meter()
    prompts = [rng.choices(range(101), k=rng.randint(3, 40)) for _ in range(12)]
    counts = [rng.randint(1, 15) for _ in prompts]
    real.observers.append(meter)
    real.generate(prompts, [greedy(count) for count in counts])

    seen: list[tuple[int, ...]] = []

    class Spy(PassTime):
        def seconds(self, plan: Plan, rng: random.Random) -> float:
            seen.append(amounts(plan))
            return super().seconds(plan, rng)

    settings = real.scheduler
    cell = Cell(
        blocks=settings.pool.count, sequences=settings.max_sequences, budget=settings.token_budget
    )
    asks = [Ask(prompt, count, 0.0) for prompt, count in zip(prompts, counts, strict=True)]
    Fleet(cell, Spy(TIMES.costs), asks).run()
    assert seen == [step[:-1] for step in meter.steps]
    assert all(step[-1] > 0 for step in meter.steps)


def test_one_server_waits_as_theory_says() -> None:
    """M/D/1: random arrivals, one server, equal times: the mean wait is rho D / 2 (1 - rho)."""
    every, rho = 0.01, 0.6
    asks = [Ask([1], 1, at) for at in arrivals(rho / every, 20_000)]
    fleet = Fleet(Cell(sequences=1, budget=1, blocks=4), PassTime((every, 0, 0, 0, 0)), asks).run()
    waits = [sim.tokens[0] - sim.ask.at - every for sim in fleet.requests]
    assert sum(waits) / len(waits) == pytest.approx(rho * every / 2 / (1 - rho), rel=0.05)
    assert min(waits) == pytest.approx(0, abs=1e-9)


def test_littles_law_holds() -> None:
    """Requests in flight, looked at from outside, are the arrival rate times the mean stay."""
    fleet, counts = Fleet(CELL, TIMES, load(CELL, "free")), []

    def look() -> Any:
        while True:
            counts.append(sum(one.requests for one in fleet.routing.replicas.values()))
            yield fleet.env.timeout(0.01)

    fleet.env.process(look())
    fleet.run()
    stays = [sim.tokens[-1] - sim.ask.at for sim in fleet.requests]
    assert sum(counts) / len(counts) == pytest.approx(sum(stays) / fleet.env.now, rel=0.01)
    assert all(server.scheduler.unfinished == 0 for server in fleet.servers.values())


def test_what_each_policy_finds_in_each_kind_of_traffic() -> None:
    """By prefix, as much as one big cache would; without common prefixes nothing, at no cost. One
    hot prefix keeps no request waiting."""
    counts = {"prefix": 900, "free": 300, "hot": 400}
    asks = {kind: load(CELL, kind, count) for kind, count in counts.items()}
    prefix, free, hot = (
        {
            name: Fleet(replace(CELL, policy=name), TIMES, each).run().summary()
            for name in simulator.POLICIES
        }
        for each in asks.values()
    )
    assert prefix["prefix"]["hits"] > 0.9 * one_big_cache(asks["prefix"])
    assert prefix["random"]["hits"] < 0.8 * prefix["prefix"]["hits"]
    assert prefix["prefix"]["ttft_p50"] < prefix["load"]["ttft_p50"] < prefix["random"]["ttft_p99"]
    assert {one["hits"] for one in free.values()} == {0.0}
    assert free["prefix"]["ttft_p50"] < free["random"]["ttft_p50"]
    assert hot["prefix"]["hits"] > 0.8
    assert hot["prefix"]["ttft_p99"] < hot["random"]["ttft_p99"]


def test_a_few_in_flight_do_not_send_a_chat_away_from_its_prefix() -> None:
    """At a tenth of the load of ten replicas, it finds nearly what one big cache would."""
    ours, least = chats(Cell(), TIMES, 160, [(10, 0.1)])
    assert ours["hits"] > 0.95 * ours["big"] > 2 * least["hits"]


def test_without_simpy_one_sentence_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(UserError, match="requirements-distributed.txt"):
        Fleet(Cell(), TIMES, [])
