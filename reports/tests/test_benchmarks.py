"""Every benchmark runs with `--quick`, proves its tokens, and draws its tables and its headline."""

from __future__ import annotations

import importlib
import json
from functools import partial
from typing import Any

import pytest
import torch

from reports import draw
from shared import kit
from shared.kit import Bench, Results, Row, claim, spread, table

STAGES = [name for name in draw.modules() if name.startswith("stage")]
SPEEDS = {"memory": 30.0, "float32": 100.0, "bfloat16": 200.0}


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.measure, "speeds", lambda device: dict(SPEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_quick_run_is_proved_and_drawn(stage: str, still: None) -> None:
    benchmark: Any = importlib.import_module(f"{stage}.benchmark")
    bench = Bench(quick=True)
    benchmark.measure(bench)
    content = json.loads(json.dumps(kit.content_of(stage, bench), allow_nan=False))
    for lines in benchmark.tables(Results(content)).values():
        for cells in (line.split("|") for line in table(lines).splitlines()):
            assert "nan" not in cells
    assert next(benchmark.headline(Results(content)), kit.UNMEASURED)


def test_ways_take_turns_and_warm_up_does_not_count() -> None:
    ran: list[str] = []
    run = lambda name: ran.append(name) or {"place": len(ran)}  # type: ignore  # noqa: E731
    kept = kit.turns({name: partial(run, name) for name in "ABC"}, 2, warmup=1)
    assert "".join(ran) == "CAB" + "ABC" + "BCA"
    assert kept["place"] == {"A": [4, 9], "B": [5, 7], "C": [6, 8]}


def test_a_row_keeps_what_its_variants_returned_and_the_limits_beside_them(still: None) -> None:
    bench = Bench()
    ways: dict[str, Any] = {"a": lambda: {"seconds": 2.0, "steps": 3}, "b": int}
    row = bench.row("case", ways, 4, dtype="float32")
    assert row is not None and row["seconds"]["a"] == [2.0] * 4 and row["steps"] == {"a": [3] * 4}
    assert row.limits["memory"] == 30 and row["limits"]["tries"] == 1
    assert Results({"results": bench.results}).rows("case", dtype="float32") == [row]


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter(range(100, 1000, 50))
    speeds = lambda device: dict.fromkeys(SPEEDS, float(next(rates)))  # noqa: E731
    monkeypatch.setattr(kit.measure, "speeds", speeds)


def test_a_row_is_refused_when_the_machine_moves_in_every_try(moving: None) -> None:
    bench = Bench()
    assert bench.row("case", {"a": int}, 1, 0) is None
    assert bench.results["case"][0]["limits"]["tries"] == kit.TRIES
    assert not Results({"results": bench.results}).rows("case")


def test_a_quick_run_says_that_the_machine_is_busy(moving: None, capsys: Any) -> None:
    run = lambda bench: bench.row("case", {"a": int}, 1, 0)  # noqa: E731
    kit.main("stage02_kv_cache", "", run, lambda results: {}, ["--quick"])
    assert "The machine is busy: beside a row its limits moved by 50%." in capsys.readouterr().out


def test_a_verdict_judges_the_prediction_made_by_hand_alone() -> None:
    assert claim("x", 4.0, 9.9, 5.0)["result"] == "held"
    assert claim("x", 4.0, 5.1, 5.1)["result"] == "**missed**"
    assert claim("x", 4.0, 4.0, 12.34, "ms")["measured"] == "12.3 ms"


def test_cells() -> None:
    assert (spread([0.001, 0.002]), spread([3, 1, 2], 0)) == ("0.0", "2 (1 to 3)")
    assert table([{"a": 1, "b": "2.5x (1 to 3)"}]) == "| a | b |\n|--:|--:|\n| 1 | 2.5x (1 to 3) |"
    assert table([]) == kit.UNMEASURED
    assert Row({"seconds": {"a": [4.0, 2.0, 3.0], "b": [1.0]}}).gain("a", "b") == 3


def test_a_wrong_token_is_no_near_tie() -> None:
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0 - 1e-4]])
    proof = kit.prove(scores, torch.tensor([0, 1]), torch.float32)
    assert (proof["tokens"], proof["near_ties"]) == (2, 1)
    with pytest.raises(AssertionError):
        kit.prove(scores, torch.tensor([1, 0]), torch.float32)
