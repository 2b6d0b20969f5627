"""Tokens drawn in C against stage 01's plain sampler."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from stage01_forward import sampling
from stage01_forward.generation import Row
from stage01_forward.params import SamplingParams
from stage01_forward.tests.rows import FixedDart, batches, fresh
from stage04_continuous import fast_sampling
from stage09_kernels.sample import choose

sample = partial(fast_sampling.sample, choose=choose)
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.5},
    {"temperature": 1e-9},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


@settings(max_examples=150)
@given(batches((torch.float32, torch.float64)))
def test_the_same_tokens_as_the_plain_sampler(batch):
    logits, rows, eos_ids = batch
    expected, _ = sampling.sample(logits, fresh(rows), eos_ids)
    assert sample(logits.clone(), rows, eos_ids)[0] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_darts_at_either_end_hit_a_token_that_is_kept(options, dtype):
    """Next to 1, rounding can carry a dart past the sum of all weights: then the last one kept is
    hit, never one without weight. Without limits, and with tokens of next to no weight at the end,
    both samplers agree to the token."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(16, 1000, dtype=dtype)
    logits[:, ::3], logits[:, :5], logits[8:, 900:] = -math.inf, -math.inf, -90.0
    row = FixedDart(SamplingParams(seed=0, **options))
    for dart in (0.0, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53):
        row.fixed = dart
        allowed = [sampling.distribution(scores, row.params) > 0 for scores in logits]
        expected, _ = sampling.sample(logits, [row] * 16)
        for sampler in (fast_sampling.sample, sample):
            ids = sampler(logits.clone(), [row] * 16)[0]
            assert all(bool(keep[id]) for keep, id in zip(allowed, ids, strict=True))
            if dtype == torch.float64 and dart < 1 - 1e-12:
                assert ids == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, *OPTIONS], ids=str)
def test_a_row_that_is_not_finite_fails_alone(options, dtype):
    """Wherever in the row the number stands."""
    logits = torch.zeros(6, 100, dtype=dtype)
    logits[0, 0], logits[1, 99], logits[2, 50], logits[3] = math.nan, math.nan, math.inf, -math.inf
    logits[4:, 7] = 90.0
    rows = [Row(SamplingParams(seed=0, **options)) for _ in logits]
    assert sample(logits, rows)[0] == [-1] * 4 + [7, 7]
