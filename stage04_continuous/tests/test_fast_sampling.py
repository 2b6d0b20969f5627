"""The fast sampler against stage 01's, which it must equal to the token."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from stage01_forward import sampling
from stage01_forward.generation import Row
from stage01_forward.params import SamplingParams
from stage01_forward.tests.rows import batches, close, edges, fresh
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


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 3.0, 20.0])
@pytest.mark.parametrize(
    ("dtype", "top_p"),
    [*product((np.float32, np.float64), (1e-9, 0.3, 0.95)), (np.float64, 1 - 1e-9)],
)
def test_the_nucleus_is_found_wherever_its_edge_lies(top_p, spread, dtype):
    weights = np.exp(spread * np.random.default_rng(0).normal(0, 1, 9_000)).astype(dtype)
    heaviest = np.sort(weights)[::-1].astype(np.float64)
    heavier = np.append(0, heaviest.cumsum()[:-1])
    edge = heaviest[(heavier < top_p * heaviest.sum()).sum() - 1]
    assert fast_sampling._lightest_of_nucleus(weights, top_p) == edge


FILTERS: list[dict[str, Any]] = [
    *({"temperature": 0.7}, {"temperature": 1.3, "top_k": 20}, {"temperature": 2.0, "top_p": 0.6}),
    *({"min_p": 0.1}, {"temperature": 1.1, "top_k": 60, "top_p": 0.9, "min_p": 0.01}),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_darts_just_before_and_after_every_edge(options):
    """Temperature, filters and sums agree to eleven digits."""
    logits = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, expected = edges(logits, SamplingParams(**{"temperature": 1.0, **options}))
    for sampler in (sampling.sample, fast_sampling.sample):
        assert sampler(logits.repeat(len(rows), 1), rows)[0] == expected


def drawn(logits, **options):
    """The tokens that forty seeds draw."""
    rows = [Row(SamplingParams(seed=seed, **options)) for seed in range(40)]
    return {*fast_sampling.choose(torch.tensor([logits] * 40, dtype=torch.float64), rows)}


def test_top_k_keeps_what_min_p_drops_dropped_and_looks_into_every_block():
    assert drawn([0.0, -1.2, -1.6, -2.3], temperature=1.0, min_p=0.5, top_k=3) == {0}
    blocks = [0.0, *[-1.0] * 63, -0.1, *[-5.0] * 191]  # of 64 weights
    assert drawn(blocks, temperature=1.0, top_k=2) == {0, 64}
