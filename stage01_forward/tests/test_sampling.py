"""The samplers: fast against plain, both against sums by hand, and the draw against chance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from stage01_forward import fast_sampling, sampling
from stage01_forward.generation import Logprobs
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import History, distribution, draw

EMPTY: History = ([], [])
SAMPLERS = {"plain": sampling.sample, "fast": fast_sampling.sample}
both = pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)


def one(sample, logits, history=EMPTY, eos_ids=(), **options):
    """The token that `sample` takes for one row."""
    params = SamplingParams(**options)
    row = torch.as_tensor(logits)[None]
    return int(sample(row, [params], [history], [params.generator()], eos_ids)[0])


def plain_token(row, params, history, eos_ids):
    """The token that the fast sampler must take: darts at all tokens, until one hits the
    nucleus."""
    generator = params.generator()
    whole = distribution(row, [replace(params, top_p=1.0)], [history], eos_ids)
    nucleus = distribution(row, [params], [history], eos_ids)
    while True:
        (token,) = draw(whole, [generator]).tolist()
        if nucleus[0, token] > 0:
            return token
        whole[whole <= whole[0, token]] = 0


@st.composite
def rows(draw, vocabulary):
    some, ids = st.sampled_from([True, False, False]), st.integers(0, vocabulary - 1)

    def either(off, on):
        return draw(on) if draw(some) else off

    return SamplingParams(
        max_tokens=10,
        temperature=either(0.0, st.floats(0.005, 2)) or either(0.0, st.just(1.0)),
        top_k=either(0, st.integers(1, vocabulary)),
        top_p=either(1.0, st.floats(0.01, 0.999)),
        min_p=either(0.0, st.floats(0, 1)),
        repetition_penalty=either(1.0, st.floats(0.5, 2)),
        presence_penalty=either(0.0, st.floats(-2, 2)),
        frequency_penalty=either(0.0, st.floats(-2, 2)),
        logit_bias=either({}, st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=1))),
        min_tokens=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32)),
        logprobs=either(None, st.integers(0, 4)),
    )


@st.composite
def batches(draw):
    vocabulary = draw(st.sampled_from([4, 63, 64, 65, 200, 1000]))
    params = draw(st.lists(rows(vocabulary), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(0, draw(st.sampled_from([0.5, 3.0])), (len(params), vocabulary))
    if draw(st.booleans()):
        logits = logits.round()  # many ties
    # Short histories, some shorter than min_tokens; of few ids, so that some occur several times.
    ids = vocabulary if draw(st.booleans()) else 3
    lengths = random.integers(0, 9, (len(params), 2))
    histories = [tuple(random.integers(0, ids, n).tolist() for n in pair) for pair in lengths]
    eos_ids = draw(st.sampled_from([(), (0,), (0, vocabulary // 2)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    return torch.from_numpy(logits).to(dtype), params, histories, eos_ids


def close(one, other):
    """Whether two log probabilities are the same, up to float32."""
    if one is None or other is None:
        return one is other
    top = [(token, pytest.approx(value, abs=1e-5)) for token, value in other.top]
    return one.token == pytest.approx(other.token, abs=1e-5) and one.top == top


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches())
def test_the_fast_sampler_takes_the_tokens_of_the_plain_one(batch):
    """With its log probabilities, and as for a row alone, whose generator advances alike."""
    logits, params, histories, eos_ids = batch
    before, generators = logits.clone(), [p.generator() for p in params]
    tokens, logprobs = fast_sampling.sample(logits, params, histories, generators, eos_ids)
    plain = [p.generator() for p in params]
    expected, scores = sampling.sample(logits, params, histories, plain, eos_ids)
    for row, p in enumerate(params):
        own, alone = slice(row, row + 1), [p.generator()]
        single = fast_sampling.sample(logits[own], [p], histories[own], alone, eos_ids)
        assert (single[0][0], single[1][0]) == (tokens[row], logprobs[row])
        assert torch.equal(alone[0].get_state(), generators[row].get_state())
        if p.top_p == 1:
            assert tokens[row] == expected[row] and close(logprobs[row], scores[row])
        assert int(tokens[row]) == plain_token(logits[own], p, histories[row], eos_ids)
    assert tokens.dtype == expected.dtype == torch.int64
    assert torch.equal(logits, before)


FILTERS: list[dict[str, Any]] = [  # with top_p 0.3 the fast sampler mostly throws several darts
    *({"temperature": 0.6}, {"temperature": 1.5, "top_k": 6}, {"top_p": 0.3}),
    {"top_k": 7, "top_p": 0.8, "min_p": 0.1},
]


@both
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_frequencies_follow_the_softmax(sample, options):
    count, vocabulary = 4_000, 9
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits = torch.arange(vocabulary) * 2 % 9 / 3  # two thirds between neighbours
    weights = np.exp(logits.double().numpy() / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0
    weights[weights < np.sort(weights)[-(params.top_k or vocabulary)]] = 0
    heavier = np.array([weights[weights > weight].sum() for weight in weights])
    weights[heavier >= params.top_p * weights.sum()] = 0
    expected = weights / weights.sum() * count
    generator = torch.Generator().manual_seed(11)  # one for all rows
    many = [params] * count, [EMPTY] * count, [generator] * count
    counts = np.bincount(sample(logits.expand(count, -1), *many)[0].numpy(), minlength=vocabulary)
    possible = expected > 0
    assert counts[~possible].sum() == 0 and expected[possible].min() > 5  # for Pearson's test
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    halves = torch.tensor([possible.sum() - 1, statistic], dtype=torch.float64) / 2
    assert torch.special.gammaincc(*halves) > 0.001  # P(chi-square > statistic)


@both
def test_a_seed_repeats_and_another_seed_differs(sample):
    def run(seed):
        params = SamplingParams(temperature=1.0, seed=seed)
        generators = [params.generator()] * 8
        return sample(torch.zeros(8, 5000), [params] * 8, [EMPTY] * 8, generators)[0].tolist()

    assert run(3) == run(3) != run(4)
    assert run(None) != run(None)
    assert run(-1) != run(-1)
    assert len(set(run(3))) > 1  # one generator advances from row to row


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_lowest_id_of_a_tie_and_no_random_number(sample, dtype):
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [2.0, 2.0, 2.0, 2.0]], dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    tokens, logprobs = sample(logits, [SamplingParams()] * 2, [EMPTY] * 2, [generator] * 2)
    assert (tokens.tolist(), logprobs) == ([1, 0], [None, None])
    assert sample is sampling.sample or torch.equal(generator.get_state(), state)
    near = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)  # float64 is not rounded
    options: dict[str, Any]
    for options in ({}, {"presence_penalty": 1.0}, {"temperature": 1.0, "top_k": 1}):
        assert one(sample, near, **options) == 1


TIED, FOUR = [2.0, 1.0, 1.0, 1.0, 0.0], np.log([0.4, 0.3, 0.2, 0.1])
HALF = np.log([0.5, 0.25, 0.25])


@both
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
def test_what_the_filters_keep(sample, logits, options, expected):
    seeds = range(60)
    kept = {one(sample, logits, temperature=1.0, seed=seed, **options) for seed in seeds}
    assert kept == expected


LOW: dict[int, float] = dict.fromkeys(range(4), -100)
TWICE: dict[str, Any] = {"repetition_penalty": 2.0}
SHORT: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (0,)}
ENDS: dict[str, Any] = {"min_tokens": 1, "eos_ids": (0, 1)}


@both
@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({}, EMPTY, 0),
        *(({"logit_bias": {0: -100}}, EMPTY, 1), ({"logit_bias": {4: 5.5}}, EMPTY, 4)),
        *((TWICE, ([0], []), 1), (TWICE, ([], [0]), 1)),  # 4 / 2 < 3; the prompt counts
        (TWICE, ([0, 0, 0, 0], []), 1),  # once, however often it occurred
        ({"repetition_penalty": 1.2}, ([0, 0, 0, 0], []), 0),
        ({"presence_penalty": 1.5}, ([0], []), 0),  # the prompt does not count
        ({"presence_penalty": 1.5}, ([], [0]), 1),
        ({"presence_penalty": 0.6}, ([], [0, 0, 0]), 0),  # once
        ({"frequency_penalty": 0.6}, ([], [0]), 0),
        ({"frequency_penalty": 0.6}, ([], [0, 0]), 1),  # each time
        ({"frequency_penalty": 0.6}, ([0, 0], []), 0),
        *((SHORT, ([], [5]), 1), (SHORT, ([], [5, 5]), 0)),
        (SHORT | {"logit_bias": {0: 100}}, EMPTY, 1),
        *((ENDS, EMPTY, 2), (ENDS | {"ignore_eos": True}, EMPTY, 2), (ENDS, ([], [1]), 0)),
        # 6 / 2 - 2 = 1; the other way round, (6 - 2) / 2 = 2.
        (TWICE | {"logit_bias": {0: 2, 1: -1.5}, "presence_penalty": 2.0}, ([], [0]), 2),
        (TWICE | {"logit_bias": {1: 2.5}}, ([1], []), 0),  # 5.5 / 2, not 3 / 2 + 2.5
        (TWICE | {"logit_bias": LOW}, ([4], []), 4),
        (TWICE | {"logit_bias": LOW | {4: -0.6}}, ([4], []), 5),  # -0.6 * 2 < -1
    ],
)
def test_each_option(sample, options, history, expected):
    logits = [4.0, 3.0, 2.0, 1.0, 0.0, -1.0]
    for temperature in (0.0, 0.02):  # at 0.02 all others weigh less than 1e-4
        chosen = options | {"temperature": temperature, "seed": 0}
        assert one(sample, logits, history, **chosen) == expected


@both
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_logprobs_are_those_of_the_unmodified_logits(sample, count):
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 100] = logits[:, 20]  # a tie
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={9: 100.0}, logprobs=count, seed=0)
    tokens, logprobs = sample(
        logits, [params, SamplingParams(), params], [EMPTY] * 3, [params.generator()] * 3
    )
    assert logprobs[1] is None
    for row in (0, 2):
        expected = logits[row].double().log_softmax(-1).tolist()
        likeliest = sorted(enumerate(expected), key=lambda pair: (-pair[1], pair[0]))[:count]
        assert tokens[row] == 9
        assert close(logprobs[row], Logprobs(expected[9], likeliest, 0.0))
        assert logprobs[row].highest == float(logits[row].max())


@both
def test_scores_that_are_not_finite_and_rows_that_do_not_match_are_refused(sample):
    for bad in ([math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]):
        for temperature in (0.0, 1.0):
            with pytest.raises(UserError, match="NaN or infinite"):
                one(sample, bad, temperature=temperature)
    tokens, logprobs = sample(torch.empty(0, 10), [], [], [])
    assert tokens.shape == (0,) and logprobs == []
    with pytest.raises(ValueError, match="one row each"):
        sample(torch.zeros(2, 5), [SamplingParams()], [EMPTY], [None])


def test_a_dart_at_either_end_hits_a_token_that_has_weight():
    cumulative = torch.tensor([[0.0, 0.0, 1.0, 1.0, 3.0, 3.0]], dtype=torch.float64)
    darts = torch.tensor([0.0, 0.99, 1.0, 3.0, 3.1], dtype=torch.float64)
    hits = [int(fast_sampling._first_above(cumulative, dart.view(1, 1))) for dart in darts]
    assert hits == [2, 2, 4, 4, 4]  # places 2 and 4 have weight
