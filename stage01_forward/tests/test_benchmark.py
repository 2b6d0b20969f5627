"""The benchmark measures a tiny model for real, after proving it against `transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.bench.kit import Subject
from shared.bench.rows import Results
from shared.bench.tests.tools import check_drawn, measured
from shared.checkpoint import Checkpoint
from stage01_forward import benchmark

TINY = replace(
    benchmark.FULL, models=("tiny", "tiny"), lengths=(1, 2, 3, 5), attention=(4, 8), answer=6,
    repeats=2, profiled=(1, 8, 3),
)  # fmt: skip


def test_everything_is_measured_proved_and_drawn() -> None:
    content = measured(benchmark.BENCHMARK, TINY)
    counts = {"limits": 1, "forward": 8, "attention": 4, "linear": 8, "generation": 4, "profile": 6}
    counts["claims"] = 5
    assert check_drawn(benchmark.BENCHMARK, content) == counts
    results = Results(content)
    for row in results.groups("generation"):
        assert {proof["tokens"] for proof in row["proof"].values()} == {TINY.answer}
    for row in results.groups("forward") + results.groups("attention"):
        assert {len(taken) for taken in row["seconds"].values()} == {TINY.repeats}
    assert [row["bytes"] for row in results.groups("attention", dtype="float32")] == [128, 512]


@pytest.mark.parametrize(
    ("case", "wrong"),
    [(benchmark.forward, "last_logits"), (benchmark.attention, "fused_attention")],
)
def test_wrong_numbers_stop_the_benchmark(
    case: Any, wrong: str, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(benchmark, wrong)
    monkeypatch.setattr(benchmark, wrong, lambda *given: right(*given) + 0.001)
    with pytest.raises(AssertionError, match="not close"):
        list(case(Subject(tiny, torch.float32), TINY))
