"""The simulator: its fit, the queues that theory knows, and what a cell of replicas does."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from shared import models
from shared.errors import UserError
from shared.testing import make_folder
from stage04_continuous.plan import Plan, Work
from stage04_continuous.request import Request
from stage05_paged.engine import make
from stage07_loadtest.client import Record
from stage07_loadtest.load import Point
from stage07_loadtest.metrics import Slo
from stage07_loadtest.results import Writer
from stage07_loadtest.schedule import Schedule

from ..simulation.passes import Meter, PassTime, amounts, greedy

pytest.importorskip("simpy", reason="requirements-distributed.txt is not installed")

from ..simulation import simulate, simulator  # noqa: E402
from ..simulation.simulate import arrivals, capacity, one_big_cache, traffic  # noqa: E402
from ..simulation.simulator import LOST, Ask, Cell, Fleet  # noqa: E402

# About those of GPT-2 124M on two cores: 20 ms to read the weights, 0.7 ms a token of a prompt.
TIMES = PassTime((0.02, 0.0007, 0.0015, 2e-6, 1e-7), (0.9, 1.0, 1.1))
CELL = Cell(replicas=8, blocks=512)


def engine() -> Any:
    model = models.load_model(models.load("tiny", random_weights=True))
    return make(model, contexts=6)


def load(cell: Cell, kind: str, count: int = 600, share: float = 0.6, **more: Any) -> list[Ask]:
    """Traffic to a cell, as a share of what it can answer."""
    rate = share * cell.replicas * capacity(cell, TIMES)
    return traffic(kind, arrivals(rate, count, **more), answer=20)


def planted(pass_time: PassTime) -> list[list[float]]:
    """Amounts and seconds of passes that take these times."""
    rng = random.Random(0)
    steps = [[1.0, *(rng.randrange(1, 100) for _ in range(4))] for _ in range(50)]
    return [[*step, sum(map(mul, pass_time.costs, step))] for step in steps]


# ---- the time of a pass -------------------------------------------------------------------------


def test_a_pass_is_described_by_what_it_computes() -> None:
    prompt, decode = Request([1] * 10, greedy(4)), Request([1] * 6, greedy(4))
    plan = Plan(work=[Work(prompt, [], 2, 3, 0), Work(decode, [], 5, 1, 1)])
    # Tokens 2, 3, 4 see 3, 4 and 5 tokens; token 5 sees 6.
    assert amounts(plan) == (1, 2, 2, 5 + 6, 3 + 4 + 5 + 6)


def test_the_fit_finds_costs_that_were_planted_and_none_below_zero() -> None:
    costs = (0.01, 0.002, 0.0, 3e-5, 1e-6)
    steps = planted(PassTime(costs))
    fitted = PassTime.fit(steps)
    assert fitted.costs == pytest.approx(costs, abs=1e-9)
    assert fitted.ratios == pytest.approx([1.0] * 100)
    fitted = PassTime.fit([[*step, s - 1e-4 * step[2]] for *step, s in steps])
    assert fitted.costs[2] == 0 and min(fitted.costs) >= 0


def test_the_simulator_makes_the_passes_of_the_real_engine() -> None:
    real, rng = engine(), random.Random(1)
    prompts = [rng.choices(range(101), k=rng.randint(3, 40)) for _ in range(12)]
    meter, counts = Meter(real), [rng.randint(1, 15) for _ in prompts]
    real.generate(prompts, [greedy(count) for count in counts])

    seen: list[tuple[int, ...]] = []

    class Spy(PassTime):
        def seconds(self, plan: Plan, rng: random.Random) -> float:
            seen.append(amounts(plan))
            return super().seconds(plan, rng)

    settings = real.scheduler
    sizes = settings.max_sequences, settings.token_budget
    cell = Cell(1, "prefix", settings.pool.count, *sizes)
    asks = [Ask(prompt, count, 0.0) for prompt, count in zip(prompts, counts, strict=True)]
    Fleet(cell, Spy(TIMES.costs), asks).run()
    assert seen == [step[:-1] for step in meter.steps]
    assert all(step[-1] > 0 for step in meter.steps)


# ---- queues that theory knows -------------------------------------------------------------------


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
            counts.append(sum(one.requests for one in fleet.front.replicas.values()))
            yield fleet.env.timeout(0.01)

    fleet.env.process(look())
    fleet.run()
    stays = [sim.tokens[-1] - sim.ask.at for sim in fleet.requests]
    assert sum(counts) / len(counts) == pytest.approx(sum(stays) / fleet.env.now, rel=0.01)
    assert all(server.scheduler.unfinished == 0 for server in fleet.servers.values())


# ---- fleets -------------------------------------------------------------------------------------


def summary(cell: Cell, asks: list[Ask]) -> dict[str, float]:
    return Fleet(cell, TIMES, asks).run().summary()


def test_what_each_policy_finds_in_each_kind_of_traffic() -> None:
    """By prefix, as much as one big cache would; without common prefixes nothing, at no cost. One
    hot prefix does not fill one of the 8 replicas."""
    counts = {"prefix": 900, "free": 300, "hot": 400}
    asks = {kind: load(CELL, kind, count) for kind, count in counts.items()}
    prefix, free, hot = (
        {name: summary(replace(CELL, policy=name), each) for name in simulator.POLICIES}
        for each in asks.values()
    )
    assert prefix["prefix"]["hits"] > 0.9 * one_big_cache(asks["prefix"])
    assert prefix["random"]["hits"] < 0.8 * prefix["prefix"]["hits"]
    assert prefix["prefix"]["ttft_p50"] < prefix["load"]["ttft_p50"] < prefix["random"]["ttft_p99"]
    assert {one["hits"] for one in free.values()} == {0.0}
    assert free["prefix"]["ttft_p50"] > 0.95 * free["load"]["ttft_p50"]
    assert hot["prefix"]["hits"] > 0.8 and hot["prefix"]["balance"] < 2


def test_a_death_loses_only_what_had_begun() -> None:
    asks = load(CELL, "prefix")
    last = asks[-1].at
    cell = replace(CELL, starting=1.0, failures=tuple(last * n / 10 for n in range(1, 9)))
    fleet = Fleet(cell, TIMES, asks).run()
    lost = [sim for sim in fleet.requests if sim.error]
    whole = [sim for sim in fleet.requests if not sim.error]
    assert lost and all(sim.error == LOST and (sim.tokens or sim.retried) for sim in lost)
    assert all(len(sim.tokens) == 20 for sim in whole)
    assert all(a < b for sim in whole for a, b in pairwise(sim.tokens))
    assert any(sim.retried for sim in whole)
    assert len(lost) < 8 * cell.sequences / 2  # others went on


def test_a_fleet_grows_and_shrinks_with_its_load() -> None:
    asks = load(CELL, "free", share=0.5, swing=0.9)
    cell = replace(CELL, starting=1.0, calm=2.0, target=4.0)
    fixed, scaled = (summary(one, asks) for one in (CELL, cell))
    assert scaled["lost"] == 0 and scaled["paid"] < 0.9 * fixed["paid"]
    assert scaled["ttft_p50"] > fixed["ttft_p50"]  # what it costs


def test_prefill_and_decode_apart_keep_the_time_between_tokens() -> None:
    asks = load(CELL, "free")
    together = summary(CELL, asks)
    fleet = Fleet(replace(CELL, prefill=4, replicas=4, handover=1e-5), TIMES, asks).run()
    assert all(len(sim.tokens) == 20 for sim in fleet.requests)
    assert fleet.summary()["itl_p99"] < 0.5 * together["itl_p99"]
    decoding = [fleet.servers[one].scheduler.counts for one in fleet.back.replicas.values()]
    assert all(one.hit_tokens > 0.9 * one.lookup_tokens for one in decoding)  # the blocks came


# ---- the command line ---------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model")
    words = ["--model", str(folder), "--requests", "50", "--cell", "5"]
    assert simulate.main(words) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "200 replicas as 40 cells of 5; one cell is simulated"
    cases = ["policies"] * 9 + ["deaths", "always", "scaled"] + ["ratio"] * 4
    assert [line.split()[0] for line in lines] == cases
    (tmp_path / "steps").write_text("[[1]]", encoding="utf-8")
    with pytest.raises(UserError, match="timed --keep"):
        simulate.main(["--steps", str(tmp_path / "steps")])


def test_a_run_of_the_load_test_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself was simulated, so its replay does not differ at all."""
    pass_time, cell = replace(TIMES, ratios=(1.0,)), Cell()
    asks = load(cell, "free", 150)
    records = [
        Record(
            *(index, sim.ask.at, sim.ask.max_tokens),
            chunks=sim.tokens,
            chunk_tokens=[1] * len(sim.tokens),
            end=sim.tokens[-1],
            prompt_tokens=len(sim.ask.prompt),
        )
        for index, sim in enumerate(Fleet(cell, pass_time, asks).run().requests)
    ]
    when = Schedule("poisson", None, [ask.at for ask in asks], 2.0)
    point = Point("free", when, records, 0.0, asks[-1].at, 0.0, None, [])
    Writer(tmp_path / "run", {}, slo=Slo(), seed=0).add(point)
    (tmp_path / "steps.json").write_text(json.dumps(planted(pass_time)), encoding="utf-8")
    words = ["--steps", str(tmp_path / "steps.json"), "--replay", str(tmp_path / "run")]
    assert simulate.main(words) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["TTFT", "ITL", "E2E"]
    assert all(line.count("(+0%)") + line.count("(-0%)") == 2 for line in lines), lines


def test_without_simpy_one_sentence_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(UserError, match="requirements-distributed.txt"):
        simulate.main([])
