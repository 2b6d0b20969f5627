"""The cross-check reads the others' figures in their units, and compares medians of the rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared import measure
from shared.bench.rows import Results
from shared.bench.tests.tools import LIMITS
from shared.errors import UserError
from stage07_loadtest import crosscheck
from stage07_loadtest.crosscheck import GUIDELLM, OURS, VLLM
from stage07_loadtest.tests.helpers import mocked

PLAN = replace(crosscheck.FULL, users=2, requests=6, prompt=5, answer=4)
LOW, HIGH = {"p50": 0.1, "p90": 0.2, "p99": 0.3}, {"p50": 0.11, "p90": 0.21, "p99": 0.304}


def benchmark(count: int) -> dict[str, Any]:
    """What guidellm 0.8.1 writes, as far as it is read."""
    names = {"time_to_first_token_ms": 100.0, "inter_token_latency_ms": 20.0}
    names |= {"output_tokens_per_second": 170.0, "prompt_token_count": 32.0}
    metrics: dict[str, Any] = {"text": {"a": 1}}
    for name, value in (names | {"request_latency": 1.08}).items():
        percentiles = {f"p{percent}": value for percent in (50, 90, 99)}
        figures = {"percentiles": percentiles, "mean": value, "median": value, "count": count}
        metrics[name] = {"successful": figures}
    return {"metrics": metrics}


def test_their_figures_are_read_in_seconds_and_none_may_be_missing() -> None:
    found = crosscheck.read(benchmark(6), PLAN)
    figures = [found[name]["p99"] for name in ("TTFT", "TPOT", "E2E")]
    assert (*figures, found["rate"], found["prompt"]) == pytest.approx((0.1, 0.02, 1.08, 170, 32))
    with pytest.raises(UserError, match="1 requests of guidellm failed"):
        crosscheck.read(benchmark(5), PLAN)
    vllm = {"completed": 6, "output_throughput": 170.0, "total_input_tokens": 192}
    vllm |= {f"p{p}_{key}_ms": 100.0 for p in (50, 90, 99) for key in ("ttft", "tpot", "e2el")}
    found = crosscheck.read_vllm(vllm, PLAN)
    assert (found["rate"], found["prompt"], found["E2E"]["p90"]) == (170.0, 32.0, 0.1)
    with pytest.raises(UserError, match="2 requests of vLLM failed"):
        crosscheck.read_vllm(vllm | {"completed": 4}, PLAN)


def test_ours_has_the_same_figures_of_the_same_load() -> None:
    with mocked(ttft=0.02, itl=0.001) as running:
        found = crosscheck.ours(running.url, PLAN, 0)
        lengths = {(len(body["prompt"]), body["max_tokens"]) for body in running.bodies}
    assert lengths == {(5, 4)} and found["prompt"] == 5 and running.requests == 2 + 6
    assert 0.02 <= found["TTFT"]["p50"] <= found["TTFT"]["p99"] <= found["E2E"]["p99"]


def test_all_tools_are_compared_by_the_medians_of_their_rounds() -> None:
    runs = [
        {"server": "mock", "tool": tool, "rate": rate, "prompt": 32}
        | dict.fromkeys(("TTFT", "TPOT", "E2E"), times)
        for tool, rate, times in (
            *((OURS, 100.0, LOW), (OURS, 999.0, HIGH), (OURS, 100.0, LOW)),
            *((GUIDELLM, 90.0, HIGH), (VLLM, 100.0, LOW)) * 3,
        )
    ]
    content = measure.content("x", {}, {"runs": runs}, LIMITS)
    rows = crosscheck.compared(Results(content))
    cells = [[row[name] for name in (OURS, GUIDELLM, VLLM, "difference", "agree")] for row in rows]
    assert cells[:3] == cells[3:6] == cells[6:9]
    assert cells[0] == ["100.0", "110.0", "100.0", "+10.0%, +0.0%", "no, yes"]
    assert [cell[4] for cell in cells[1:3]] == ["yes, yes"] * 2  # 5 %, 1.3 %
    assert cells[9] == ["100.0", "90.0", "100.0", "-10.0%, +0.0%", "no, yes"]
    assert "in 16 of 20 figures" in crosscheck.headline(Results(content))
