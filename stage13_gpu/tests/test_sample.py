"""Tokens chosen on the GPU are those that stage 01 draws, and need no Triton."""

from __future__ import annotations

import pytest
import torch

from stage01_forward.generation import Row
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample
from stage13_gpu.sample import choose

OPTIONS: list[dict] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.3, "top_k": 10_000},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.5, "top_p": 0.95, "top_k": 40, "min_p": 0.02},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 1.0, "top_p": 0.01},
]


def rows_of(seed: int) -> list[Row]:
    return [Row(SamplingParams(seed=seed + i, **o)) for i, o in enumerate(OPTIONS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [1, 6])
def test_all_options_draw_the_tokens_of_stage_01(spread, dtype):
    torch.manual_seed(0)
    for seed in range(0, 400, 10):
        scores = spread * torch.randn(len(OPTIONS), 97, dtype=dtype)
        scores[3, 40:60] = scores[3, 7]  # a tie
        wanted, _ = sample(scores.clone(), rows_of(seed))
        assert choose(scores.clone(), rows_of(seed)) == wanted


def test_rows_without_options_are_not_sorted(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sort", None)
    rows = rows_of(0)
    assert len(choose(torch.randn(2, 97), [rows[1], rows[6]])) == 2
    assert choose(torch.eye(3), rows[:1] * 3) == [0, 1, 2]


def test_scores_that_are_not_finite_have_no_token():
    scores = torch.zeros(4, 9)
    scores[1, 3], scores[2, 3], scores[3, :] = torch.nan, torch.inf, -torch.inf
    assert choose(scores, rows_of(5)[:1] * 4) == [0, -1, -1, -1]
    assert choose(scores, [rows_of(5)[1] for _ in range(4)])[1:] == [-1, -1, -1]
