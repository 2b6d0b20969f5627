"""The cross-check reads guidellm's figures in their units, and compares medians of the rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared import measure
from shared.bench.rows import Results
from shared.bench.tests.tools import LIMITS
from shared.errors import UserError
from stage07_loadtest import crosscheck
from stage07_loadtest.crosscheck import OURS, THEIRS
from stage07_loadtest.tests.helpers import mocked

PLAN = replace(crosscheck.FULL, users=2, requests=6, prompt=5, answer=4)
LOW, HIGH = {"p50": 0.1, "p90": 0.2, "p99": 0.3}, {"p50": 0.11, "p90": 0.21, "p99": 0.304}


def benchmark(count: int) -> dict[str, Any]:
    """What guidellm 0.8.1 writes, as far as it is read."""

    def found(value: float, **more: Any) -> dict[str, Any]:
        percentiles = {f"p{percent}": value for percent in (50, 90, 99)}
        return {"successful": {"percentiles": percentiles, "mean": value, "median": value} | more}

    names = {"time_to_first_token_ms": 100.0, "inter_token_latency_ms": 20.0}
    names |= {"output_tokens_per_second": 170.0, "prompt_token_count": 32.0}
    metrics = {name: found(value) for name, value in names.items()}
    return {"metrics": metrics | {"request_latency": found(1.08, count=count), "text": {"a": 1}}}


def test_its_figures_are_read_in_seconds_and_none_may_be_missing() -> None:
    found = crosscheck.read(benchmark(6), PLAN)
    assert [found[name]["p99"] for name in ("TTFT", "TPOT", "E2E")] == pytest.approx(
        [0.1, 0.02, 1.08]
    )
    assert (found["rate"], found["prompt"]) == (170.0, 32.0)
    with pytest.raises(UserError, match="1 requests of guidellm failed"):
        crosscheck.read(benchmark(5), PLAN)


def test_ours_has_the_same_figures_of_the_same_load() -> None:
    with mocked(ttft=0.02, itl=0.001) as running:
        found = crosscheck.ours(running.url, PLAN, 0)
        lengths = {(len(body["prompt"]), body["max_tokens"]) for body in running.bodies}
    assert lengths == {(5, 4)} and found["prompt"] == 5 and running.requests == 2 + 6
    assert 0.02 <= found["TTFT"]["p50"] <= found["TTFT"]["p99"] <= found["E2E"]["p99"]


def test_both_tools_are_compared_by_the_medians_of_their_rounds() -> None:
    runs = [
        {"server": "mock", "tool": tool, "rate": rate, "prompt": 32}
        | dict.fromkeys(("TTFT", "TPOT", "E2E"), times)
        for tool, rate, times in (
            *((OURS, 100.0, LOW), (OURS, 999.0, HIGH), (OURS, 100.0, LOW)),
            *((THEIRS, 90.0, HIGH),) * 3,
        )
    ]
    content = measure.content("x", {}, {"runs": runs}, LIMITS)
    rows = crosscheck.compared(Results(content))
    cells = [[row[name] for name in (OURS, THEIRS, "difference", "agree")] for row in rows]
    assert cells[:3] == cells[3:6] == cells[6:9]
    assert cells[0] == ["100.0", "110.0", "+10.0%", "no"]
    assert [cell[3] for cell in cells[:3]] == ["no", "yes", "yes"]  # 10 %, 5 %, 1.3 %
    assert cells[9] == ["100.0", "90.0", "-10.0%", "no"]
    assert crosscheck.headline(Results(content)) == "stage07 and guidellm agree in 6 of 10 figures"
