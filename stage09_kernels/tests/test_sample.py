"""Tokens drawn in C against stage 01's plain sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from stage01_forward import sampling
from stage01_forward.params import SamplingParams
from stage04_continuous import engine
from stage04_continuous.request import Request
from stage09_kernels.sample import draw, tokens

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.5},
    {"temperature": 1e-9},
    {"temperature": 1.0},
]


def requests(count: int) -> list[Request]:
    options = [OPTIONS[row % len(OPTIONS)] for row in range(count)]
    return [Request([1], SamplingParams(seed=row, **each)) for row, each in enumerate(options)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 211, 3000])
def test_the_same_tokens_as_the_plain_sampler(vocabulary, dtype):
    """Scores spread, coarse or all equal; in every second row a part of them is -inf."""
    torch.manual_seed(vocabulary)
    for spread, step in ((3.0, 0.0), (0.1, 0.0), (8.0, 0.5), (0.0, 0.0)):
        many = requests(24)
        logits = spread * torch.randn(24, vocabulary, dtype=dtype)
        logits = (logits / step).round() * step if step else logits
        if vocabulary > 1:
            logits[::2, 1::7] = -math.inf
        params = [request.sampling for request in many]
        own = [p.generator() for p in params]
        expected, _ = sampling.sample(logits, params, [([], [])] * 24, own)
        found = tokens(logits.clone(), many)
        assert found.tolist() == expected.tolist()
        assert torch.equal(own[1].get_state(), many[1].generator.get_state())


def test_rows_without_finite_scores_and_other_options_are_answered_by_stage_04():
    torch.manual_seed(0)
    many = requests(12)
    many[3] = Request([1], SamplingParams(logprobs=2))
    many[4] = Request([1], SamplingParams(temperature=1.0, min_p=0.2, seed=5))
    many[5] = Request([1], SamplingParams(logit_bias={7: 50.0}))
    many[6] = Request([1], SamplingParams(min_tokens=1, stop_token_ids=(2,)))
    logits = torch.randn(12, 100)
    logits[1, 99], logits[2, 50], logits[6, 2], logits[7] = math.nan, math.inf, 90, -math.inf
    again = [Request([1], request.sampling) for request in many]
    expected, found = engine.draw(again, logits.clone(), ()), draw(many, logits.clone(), ())
    for own, theirs in zip(found, expected, strict=True):  # with top_p stage 04 throws more darts
        assert own[1:] == theirs[1:] or own[0].sampling.top_p < 1
    assert [many.index(one[0]) for one in found] == [0, 3, 4, 5, 6, 8, 9, 10, 11]
    assert [request.output.finish_reason for request in many[1:3]] == ["error", "error"]


def test_a_token_depends_on_no_other_row_and_no_thread():
    logits, before = torch.randn(30, 5000), torch.get_num_threads()
    together = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        together.append(tokens(logits.clone(), requests(30)))
    torch.set_num_threads(before)
    alone = [tokens(logits[row : row + 1].clone(), [one]) for row, one in enumerate(requests(30))]
    for found in together:
        assert np.array_equal(found, np.concatenate(alone))
