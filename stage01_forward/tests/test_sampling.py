"""The sampler against sums by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import UserError
from stage01_forward.generation import Logprobs, Row
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import draw, sample
from stage01_forward.tests.rows import FixedDart, close

EMPTY: tuple[list[int], list[int]] = ([], [])


def one(logits, history=EMPTY, eos_ids=(), **options):
    """The token that `sample` takes for one row."""
    row = Row(SamplingParams(**options), history[0], history[1])
    return sample(torch.tensor(logits)[None], [row], eos_ids)[0][0]


FILTERS: list[dict[str, Any]] = [
    *({"temperature": 0.6}, {"temperature": 1.5, "top_k": 6}, {"top_p": 0.3}),
    {"top_k": 7, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_frequencies_follow_the_softmax(options):
    count, vocabulary = 1_000, 9
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits = torch.arange(vocabulary) * 2 % 9 / 3  # two thirds between neighbours
    weights = np.exp(logits.double().numpy() / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0
    weights[weights < np.sort(weights)[-(params.top_k or vocabulary)]] = 0
    heavier = np.array([weights[weights > weight].sum() for weight in weights])
    weights[heavier >= params.top_p * weights.sum()] = 0
    expected = weights / weights.sum() * count
    rows = [FixedDart(params) for _ in range(count)]
    for place, row in enumerate(rows):
        row.fixed = (place + 0.5) / count  # darts at equal distances, in place of random ones
    counts = np.bincount(sample(logits.repeat(count, 1), rows)[0], minlength=vocabulary)
    assert (counts[expected == 0] == 0).all() and np.abs(counts - expected).max() <= 1


def test_a_seed_repeats_and_another_seed_differs():
    def run(seed):
        rows = [Row(SamplingParams(temperature=1.0, seed=seed))] * 8
        return sample(torch.zeros(8, 5000), rows)[0]

    assert run(3) == run(3) != run(4)
    assert run(None) != run(None)
    assert run(-1) != run(-1)
    assert len(set(run(3))) > 1  # one generator advances from row to row


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_lowest_id_of_a_tie_and_no_random_number(dtype):
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [2.0, 2.0, 2.0, 2.0]], dtype=dtype)
    rows = [Row(SamplingParams()), Row(SamplingParams())]
    assert sample(logits, rows) == ([1, 0], [None, None])
    assert rows[0].generator is None
    near = np.array([1.0, 1.0 + 1e-12])  # float64 is not rounded
    options: dict[str, Any]
    for options in ({}, {"presence_penalty": 1.0}, {"temperature": 1.0, "top_k": 1}):
        assert one(near, **options) == 1


TIED, FOUR = [2.0, 1.0, 1.0, 1.0, 0.0], np.log([0.4, 0.3, 0.2, 0.1])
HALF = np.log([0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [  # equal weights stay together
        *((TIED, {"top_k": 2}, {0, 1, 2, 3}), (TIED, {"top_p": 0.5}, {0, 1, 2, 3})),
        *(([1.0, 1.0, 0.0], {"min_p": 1.0}, {0, 1}), (FOUR, {"top_k": 50}, {0, 1, 2, 3})),
        # top_k leaves 0.4 and 0.3, of which the first alone is 0.57.
        *((FOUR, {"top_k": 2, "top_p": 0.55}, {0}), (FOUR, {"top_p": 0.55}, {0, 1})),
        # The first alone is exactly half: no more are needed.
        *((HALF, {"top_p": 0.5}, {0}), (HALF, {"top_p": 0.501}, {0, 1, 2})),
        ([-math.inf] * 70 + [-3.0, -math.inf, -3.0], {"top_k": 50, "top_p": 0.99}, {70, 72}),
    ],
)
def test_what_the_filters_keep(logits, options, expected):
    seeds = range(60)
    kept = {one(logits, temperature=1.0, seed=seed, **options) for seed in seeds}
    assert kept == expected


LOW: dict[int, float] = dict.fromkeys(range(4), -100)
TWICE: dict[str, Any] = {"repetition_penalty": 2.0}
SHORT: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (0,)}
ENDS: dict[str, Any] = {"min_tokens": 1, "eos_ids": (0, 1)}


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({}, EMPTY, 0),
        *(({"logit_bias": {0: -100}}, EMPTY, 1), ({"logit_bias": {4: 5.5}}, EMPTY, 4)),
        *((TWICE, ([0], []), 1), (TWICE, ([], [0]), 1)),  # 4 / 2 < 3; the prompt counts
        (TWICE, ([0, 0, 0, 0], []), 1),  # once, however often it occurred
        ({"presence_penalty": 1.5}, ([0], []), 0),  # the prompt does not count
        ({"presence_penalty": 1.5}, ([], [0]), 1),
        ({"frequency_penalty": 0.6}, ([], [0]), 0),
        ({"frequency_penalty": 0.6}, ([], [0, 0]), 1),  # each time
        ({"frequency_penalty": 0.6}, ([0, 0], []), 0),
        *((SHORT, ([], [5]), 1), (SHORT, ([], [5, 5]), 0)),
        (SHORT | {"logit_bias": {0: 100}}, EMPTY, 1),
        *((ENDS, EMPTY, 2), (ENDS | {"ignore_eos": True}, EMPTY, 2), (ENDS, ([], [1]), 0)),
        # 6 / 2 - 2 = 1; the other way round, (6 - 2) / 2 = 2.
        (TWICE | {"logit_bias": {0: 2, 1: -1.5}, "presence_penalty": 2.0}, ([], [0]), 2),
        (TWICE | {"logit_bias": LOW | {4: -0.6}}, ([4], []), 5),  # -0.6 * 2 < -1
    ],
)
def test_each_option(options, history, expected):
    logits = [4.0, 3.0, 2.0, 1.0, 0.0, -1.0]
    for temperature in (0.0, 0.02):  # at 0.02 all others weigh less than 1e-4
        chosen = options | {"temperature": temperature, "seed": 0}
        assert one(logits, history, **chosen) == expected


def test_a_tiny_temperature_is_raised_to_a_hundredth():
    """At 0.01 the second weighs 0.6 of the first."""
    drawn = {one([0.0, -0.005], temperature=1e-9, seed=seed) for seed in range(40)}
    assert drawn == {0, 1}


@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_logprobs_are_those_of_the_unmodified_logits(count):
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 100] = logits[:, 20]  # a tie
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={9: 100.0}, logprobs=count, seed=0)
    tokens, logprobs = sample(logits.clone(), [Row(params), Row(SamplingParams()), Row(params)])
    assert logprobs[1] is None
    for row in (0, 2):
        expected = logits[row].double().log_softmax(-1).tolist()
        likeliest = sorted(enumerate(expected), key=lambda pair: (-pair[1], pair[0]))[:count]
        assert tokens[row] == 9
        result = logprobs[row]
        assert result is not None and result.highest == float(logits[row].max())
        assert close(result, Logprobs(expected[9], likeliest, 0.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [(math.nan, 1), (1, math.nan), (math.inf, 1), (-math.inf,) * 2])
def test_scores_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(UserError):
        one(bad, temperature=temperature)
    assert sample(torch.empty(0, 10), []) == ([], [])


@pytest.mark.parametrize("dart", [0.0, 0.5, 1 - 1e-9, 1 - 2**-53])
@pytest.mark.parametrize("kept", [(2,), (1, 70), (3, 5, 64, 90)])
def test_a_dart_at_either_end_hits_a_token_that_has_weight(dart, kept):
    """Next to 1, rounding carries it to the end of all: the last token is hit, if it has next to no
    weight too."""
    weights = torch.zeros(100, dtype=torch.float64)
    weights[[*kept]] = 1.0
    weights[kept[-1]] = 1e-30
    hit = draw(weights, dart)
    assert hit in kept and (dart < 1 - 1e-9 or hit >= kept[-2:][0])
    assert draw(weights / 3, 1.0) == kept[-1]
