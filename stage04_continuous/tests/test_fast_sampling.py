"""The fast sampler against stage 01's, which it must equal to the token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from stage01_forward import sampling
from stage01_forward.generation import Row
from stage01_forward.params import SamplingParams
from stage01_forward.tests.rows import batches, close, fresh
from stage04_continuous import fast_sampling


@settings(max_examples=150)
@given(batches())
def test_the_fast_sampler_takes_the_tokens_of_the_plain_one(batch):
    """With its log probabilities, and as for a row alone, whose generator advances alike."""
    logits, rows, eos_ids = batch
    plain, alone = fresh(rows), fresh(rows)
    expected, scores = sampling.sample(logits, plain, eos_ids)
    single = [
        fast_sampling.sample(logits[i : i + 1].clone(), [row], eos_ids)
        for i, row in enumerate(alone)
    ]
    tokens, logprobs = fast_sampling.sample(logits.clone(), rows, eos_ids)
    assert tokens == expected and all(map(close, logprobs, scores))
    assert single == [([id], [score]) for id, score in zip(tokens, logprobs, strict=True)]
    for row, other, third in zip(rows, plain, alone, strict=True):
        assert (row.generator is None) == row.params.greedy == (other.generator is None)
        if row.generator is not None and other.generator is not None:
            assert row.dart() == other.dart() == third.dart()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_have_no_token(temperature, dtype):
    bad = [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]]
    rows = [Row(SamplingParams(temperature=temperature, seed=0, logprobs=1)) for _ in range(5)]
    logits = torch.tensor([*bad, [1.0, 90.0]], dtype=dtype)
    tokens, logprobs = fast_sampling.sample(logits, rows)
    assert tokens == [-1, -1, -1, -1, 1] and logprobs[:4] == [None] * 4


def test_top_k_keeps_what_min_p_drops_dropped():
    options: dict[str, Any] = {"temperature": 1.0, "min_p": 0.5, "top_k": 3}
    rows = [Row(SamplingParams(seed=seed, **options)) for seed in range(40)]
    logits = torch.tensor([[0.0, -1.2, -1.6, -2.3]] * 40)
    assert {*fast_sampling.choose(logits, rows)} == {0}
