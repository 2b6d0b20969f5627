"""The benchmark measures a tiny model for real, and its counts of batches are arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.bench.rows import Results
from shared.bench.tests.tools import check_drawn, measured
from shared.checkpoint import PRESETS
from stage03_batching import benchmark

TINY = replace(
    benchmark.FULL, models=("tiny",), prompt=6, answer=4, batches=(1, 2, 4), wide=8, wide_answer=3,
    single=((1, 1), (4, 1)), waste_rows=4, short=3, long_answer=12, long_prompt=20, repeats=1,
    profiled=(2, 2, 4),
)  # fmt: skip


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return measured(benchmark.BENCHMARK, TINY)


def test_each_batch_and_its_cache_have_their_size(content: dict[str, Any]) -> None:
    counts = {"limits": 1, "scaling": 8, "single": 4, "waste": 4, "profile": 6, "claims": 7}
    assert check_drawn(benchmark.BENCHMARK, content) == counts
    for row in Results(content).groups("scaling"):
        new = 3 if row.requests == 8 else 4
        assert {len(run) for run in row["decode"]} == {new - 1}
        each = PRESETS["tiny"].kv_bytes_per_token(row.kind)
        assert row["bytes"] == row.requests * (6 + new - 1) * each
        assert row["proof"]["tokens"] == row.tokens == row.requests * new


def test_waste_is_counted_as_arithmetic_counts_it(content: dict[str, Any]) -> None:
    found = {row["case"]: row for row in Results(content).groups("waste")}
    # 4 rows of 3 tokens, 11 passes of 4 rows; 3 of them have ended with the third token.
    answers, prompts = found["one long answer"], found["one long prompt"]
    assert [answers[key] for key in ("passes", "wasted", "useful")] == [12, 27, 4 * 3 + 3 * 2 + 11]
    # 3 prompts of 3 beside one of 20, then 2 passes.
    assert [prompts[key] for key in ("passes", "wasted", "useful")] == [3, 3 * 17, 29 + 2 * 4]
    assert found["equal answers"].tokens == answers.tokens
    assert sum(n for n, _ in found["equal prompts"].lengths) == 3 * 3 + 20
