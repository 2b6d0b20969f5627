"""The sampler against a plain NumPy one, against the distribution it claims to draw from, and against bad input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from stage01_forward.sampling import History, Logprobs, SamplingParams, _first_above, sample

EMPTY: History = ((), ())


def draw(
    logits: torch.Tensor,
    params: SamplingParams,
    history: History = EMPTY,
    eos_ids: tuple[int, ...] = (),
) -> int:
    """One row, alone, with a new generator."""
    return int(sample(logits[None], [params], [history], [params.generator()], eos_ids)[0][0])


# ---- the reference: one row, NumPy, float64, every step spelled out, nothing clever ----


def reference_scores(
    logits: np.ndarray, params: SamplingParams, history: History, eos_ids: tuple[int, ...]
) -> np.ndarray:
    scores = logits.astype(np.float64)
    prompt, output = history
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = -np.inf
        scores[list(eos_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        scores[token] *= (
            1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        )
    for token in set(output):
        scores[token] -= (
            params.frequency_penalty * list(output).count(token) + params.presence_penalty
        )
    return scores


def reference_filtered(
    scores: np.ndarray, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray, float]:
    """The weights before top_p, which of them top_p lets through, and by how much the closest call was decided."""
    weights = np.exp((scores - scores.max()) / max(params.temperature, 0.01))
    weights[weights < params.min_p * weights.max()] = 0
    if 0 < params.top_k < len(weights):
        weights[weights < np.sort(weights)[-params.top_k]] = 0
    if params.top_p == 1:
        return weights, weights > 0, 1.0
    above = np.array([weights[weights > weight].sum() for weight in weights])
    wanted = params.top_p * weights.sum()
    return weights, (weights > 0) & (above < wanted), float(np.abs(above - wanted).min())


def reference_token(
    logits: np.ndarray, params: SamplingParams, history: History, eos_ids: tuple[int, ...]
) -> int:
    scores = reference_scores(logits, params, history, eos_ids)
    if params.temperature == 0:
        return int(np.argmax(scores))
    weights, inside, margin = reference_filtered(scores, params)
    assume(margin > 1e-9)  # else the order of additions decides
    generator = params.generator()
    while True:
        dart = torch.rand(1, dtype=torch.float64, generator=generator).item() * weights.sum()
        token = int(np.searchsorted(np.cumsum(weights), dart, side="right"))
        if inside[token]:
            return token
        weights[weights <= weights[token]] = 0


@st.composite
def rows(draw: Any, vocabulary: int) -> SamplingParams:
    ids = st.integers(0, vocabulary - 1)
    some = st.booleans()
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.005, 0.3, 1.0, 1.7, 2.0])),
        top_k=draw(st.integers(1, vocabulary))
        if draw(some)
        else draw(st.sampled_from([0, -1, 10**30])),
        top_p=draw(st.floats(0.01, 0.999)) if draw(some) else 1.0,
        min_p=draw(st.floats(0.001, 1)) if draw(some) else 0.0,
        repetition_penalty=draw(st.floats(0.5, 2)) if draw(some) else 1.0,
        presence_penalty=draw(st.floats(-2, 2)) if draw(some) else 0.0,
        frequency_penalty=draw(st.floats(-2, 2)) if draw(some) else 0.0,
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=4))
        if draw(some)
        else {},
        stop_token_ids=tuple(draw(st.lists(ids, max_size=1))),
        min_tokens=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32)),
    )


@st.composite
def batches(draw: Any) -> tuple[torch.Tensor, list[SamplingParams], list[History], tuple[int, ...]]:
    vocabulary = draw(st.sampled_from([4, 63, 64, 65, 200, 1000]))
    params = draw(st.lists(rows(vocabulary), min_size=1, max_size=4))
    random, spread = (
        np.random.default_rng(draw(st.integers(0, 2**32))),
        draw(st.sampled_from([0.5, 3.0])),
    )
    logits = random.normal(0, spread, (len(params), vocabulary))
    if draw(st.booleans()):
        logits = logits.round()  # many ties
    # Short ones, so that some are shorter than min_tokens; of few words, so that some come again and again.
    words = vocabulary if draw(st.booleans()) else 3
    lengths = random.integers(0, 9, (len(params), 2))
    histories = [
        tuple(random.integers(0, words, length).tolist() for length in pair) for pair in lengths
    ]
    return torch.from_numpy(logits), params, histories, draw(st.sampled_from([(), (0,), (0, vocabulary // 2)]))


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(batches())
def test_the_plain_reference_takes_the_same_tokens(batch: Any) -> None:
    logits, params, histories, eos_ids = batch
    before = logits.clone()
    tokens, _ = sample(logits, params, histories, [p.generator() for p in params], eos_ids)
    cases = zip(logits.numpy(), params, histories, strict=True)
    assert tokens.tolist() == [
        reference_token(row, p, history, eos_ids) for row, p, history in cases
    ]
    assert tokens.dtype == torch.int64 and torch.equal(logits, before)


# ---- the draw ----


DISTRIBUTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.5, top_k=30),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.3),  # mostly several draws
    SamplingParams(temperature=1.0, top_k=80, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize(
    "params", DISTRIBUTIONS, ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}"
)
def test_frequencies_follow_the_softmax(params: SamplingParams) -> None:
    draws, vocabulary = 20_000, 150
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * 1.5
    weights, inside, _ = reference_filtered(logits.double().numpy(), params)
    expected = np.where(inside, weights, 0) / weights[inside].sum() * draws
    generator = torch.Generator().manual_seed(
        11
    )  # one generator through all rows: 20,000 draws in one call
    tokens, _ = sample(
        logits.expand(draws, -1), [params] * draws, [EMPTY] * draws, [generator] * draws
    )
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert counts[~inside].sum() == 0
    # Pearson's test wants at least some five in every cell: rare tokens are counted as one cell.
    rare = inside & (expected < 5)
    cells = [(counts[i], expected[i]) for i in np.flatnonzero(inside & ~rare)]
    if rare.any():
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert upper_tail(statistic, len(cells) - 1) > 0.001


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic)."""
    return float(
        torch.special.gammaincc(
            torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()
        )
    )


def test_upper_tail_is_the_textbook_one() -> None:
    assert upper_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert upper_tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)


def many() -> tuple[torch.Tensor, list[SamplingParams], list[History]]:
    """A crowd in which every row wants something else."""
    random = np.random.default_rng(2)
    logits = torch.from_numpy(random.normal(0, 2, (24, 997))).float()
    params = [
        SamplingParams(
            temperature=[0.0, 0.7, 1.3][row % 3],
            top_k=[0, 40][row // 2 % 2],
            top_p=[1.0, 0.9, 0.2][row % 5 % 3],
            min_p=[0.0, 0.05][row // 3 % 2],
            repetition_penalty=[1.0, 1.2][row // 4 % 2],
            frequency_penalty=[0.0, 0.3][row // 6 % 2],
            logit_bias={} if row % 4 else {7: 3.0, 8: -100},
            seed=row,
            logprobs=[None, 0, 5][row % 3],
            min_tokens=[0, 50][row // 5 % 2],
            stop_token_ids=(1, 2),
        )
        for row in range(24)
    ]
    histories: list[History] = [
        (random.integers(0, 997, 30).tolist(), random.integers(0, 997, row)) for row in range(24)
    ]
    return logits, params, histories


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_alone_and_in_a_crowd_the_same(dtype: torch.dtype) -> None:
    logits, params, histories = many()
    logits = logits.to(dtype)
    crowd = [p.generator() for p in params]
    lonely = [p.generator() for p in params]
    for _ in range(5):  # the generators have to go on alike too
        tokens, logprobs = sample(logits, params, histories, crowd, (0,))
        for row in range(len(params)):
            token, logprob = sample(
                logits[row : row + 1],
                params[row : row + 1],
                histories[row : row + 1],
                [lonely[row]],
                (0,),
            )
            assert int(token[0]) == int(tokens[row])
            assert logprob[0] == logprobs[row]
        assert [g.get_state().tolist() for g in crowd] == [g.get_state().tolist() for g in lonely]


def test_a_seed_repeats_and_another_seed_differs() -> None:
    logits = torch.zeros(8, 5000)

    def run(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return sample(logits, [params] * 8, [EMPTY] * 8, [params.generator()] * 8)[0].tolist()

    assert run(3) == run(3) != run(4)
    assert run(None) != run(None)
    assert run(-1) != run(-1)
    assert len(set(run(3))) > 1  # one generator moves on from row to row


def test_greedy_takes_the_lowest_id_of_a_tie_and_no_random_number() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0], [2.0, 2.0, 2.0, 2.0]])
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tokens, logprobs = sample(
            logits.to(dtype), [SamplingParams()] * 2, [EMPTY] * 2, [generator, None]
        )
        assert tokens.tolist() == [1, 0]
        assert logprobs == [None, None]
    assert torch.equal(generator.get_state(), state)


def test_no_rows_no_tokens() -> None:
    tokens, logprobs = sample(torch.empty(0, 10), [], [], [])
    assert tokens.shape == (0,) and logprobs == []


def test_float64_is_not_rounded() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    for params in (
        SamplingParams(),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(temperature=1.0, top_k=1, seed=0),
    ):
        assert sample(logits, [params], [EMPTY], [params.generator()])[0].tolist() == [1]


def test_tokens_of_equal_weight_stay_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for params in ({"top_k": 2}, {"top_p": 0.5}):  # both limits fall among the three ones
        seen = {
            draw(logits, SamplingParams(temperature=1.0, seed=seed, **params))
            for seed in range(200)
        }
        assert seen == {0, 1, 2, 3}


# ---- the options, one at a time, by hand ----


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({}, EMPTY, 0),
        ({"logit_bias": {0: -100}}, EMPTY, 1),
        ({"logit_bias": {4: 5.5}}, EMPTY, 4),
        ({"repetition_penalty": 2.0}, ([0], []), 1),  # 4 / 2 < 3; the prompt counts
        ({"repetition_penalty": 2.0}, ([0, 0, 0, 0], []), 1),  # once, however often it occurred
        ({"repetition_penalty": 1.2}, ([0, 0, 0, 0], []), 0),
        ({"presence_penalty": 1.5}, ([0], []), 0),  # the prompt does not count
        ({"presence_penalty": 1.5}, ([], [0]), 1),
        ({"presence_penalty": 0.6}, ([], [0, 0, 0]), 0),  # once
        ({"frequency_penalty": 0.6}, ([], [0]), 0),
        ({"frequency_penalty": 0.6}, ([], [0, 0]), 1),  # each time
        ({"frequency_penalty": 0.6}, ([0, 0], []), 0),
        ({"min_tokens": 2, "stop_token_ids": (0,)}, ([], [5]), 1),
        ({"min_tokens": 2, "stop_token_ids": (0,)}, ([], [5, 5]), 0),
        (
            {"min_tokens": 2, "stop_token_ids": (0,), "logit_bias": {0: 100}},
            ([], []),
            1,
        ),  # a bias does not bring it back
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.02])  # at 0.02 the rest weighs less than 1e-8
def test_each_option(
    options: dict[str, Any], history: History, expected: int, temperature: float
) -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0])
    assert (
        draw(logits, SamplingParams(temperature=temperature, seed=0, **options), history)
        == expected
    )


def test_min_tokens_holds_back_the_end_of_text_even_when_it_is_ignored() -> None:
    logits = torch.tensor([4.0, 3.0])
    for ignore_eos in (False, True):
        params = SamplingParams(min_tokens=1, ignore_eos=ignore_eos)
        assert draw(logits, params, EMPTY, eos_ids=(0,)) == 1
        assert draw(logits, params, ([], [1]), eos_ids=(0,)) == 0


def test_repetition_comes_before_presence_and_pushes_negative_scores_down() -> None:
    # (6 / 2) - 2 = 1 beats 0.9; the other way round, (6 - 2) / 2 = 2 would beat 1.5 as well.
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=2.0)
    assert draw(torch.tensor([6.0, 0.9]), params, ([], [0])) == 0
    assert draw(torch.tensor([6.0, 1.5]), params, ([], [0])) == 1
    assert draw(torch.tensor([-1.0, -1.5]), SamplingParams(repetition_penalty=2.0), ([0], [])) == 1


def test_bias_comes_before_the_penalties() -> None:
    params = SamplingParams(logit_bias={0: 4.0}, repetition_penalty=2.0)
    assert draw(torch.tensor([2.0, 3.5]), params, ([0], [])) == 1  # (2 + 4) / 2 < 3.5 < 2 / 2 + 4


def test_top_p_judges_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # top_k leaves 0.4 and 0.3, so 0.57 of the rest is the first alone; of the whole, the nucleus would be both.
    assert {
        draw(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55, seed=s))
        for s in range(60)
    } == {0}
    assert {
        draw(logits, SamplingParams(temperature=1.0, top_p=0.55, seed=s)) for s in range(60)
    } == {0, 1}


# ---- log probabilities ----


@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_logprobs_are_those_of_the_unmodified_logits(count: int) -> None:
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 100] = logits[:, 20]  # a tie
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={9: 100.0}, logprobs=count, seed=0)
    tokens, answers = sample(
        logits, [params, SamplingParams(), params], [EMPTY] * 3, [params.generator()] * 3
    )
    assert answers[1] is None
    for row in (0, 2):
        expected = logits[row].double().log_softmax(-1)
        order = sorted(range(130), key=lambda token: (-float(logits[row, token]), token))[:count]  # noqa: B023
        answer = answers[row]
        assert isinstance(answer, Logprobs)
        assert tokens[row] == 9 and answer.token == pytest.approx(float(expected[9]), abs=1e-5)
        assert [token for token, _ in answer.top] == order
        assert [value for _, value in answer.top] == pytest.approx(
            expected[order].tolist(), abs=1e-5
        )
        assert answer.highest == float(logits[row].max())


def test_logprobs_of_the_likeliest_when_nearly_all_tie() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    logits[0, 500] = 1
    (answer,) = sample(logits, [SamplingParams(logprobs=4)], [EMPTY], [None])[1]
    assert answer is not None and [token for token, _ in answer.top] == [500, 0, 1, 2]
    assert answer.token == answer.top[0][1] == pytest.approx(1 - math.log(999 + math.e), abs=1e-6)


# ---- bad input ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", None),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e6),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.5),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", True),
        ("logit_bias", [1, 2]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101}),
        ("seed", 1.0),
        ("seed", 2**63),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.0,)),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("min_tokens", 65),  # more than max_tokens
        ("logprobs", -1),
        ("logprobs", 1.0),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^(A token id in )?{name} .*\.$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {100: 1.0}}, {"stop_token_ids": (3, 100)}, {"top_k": 101}, {"logprobs": 101}],
    ids=lambda options: next(iter(options)),
)
def test_check_vocabulary(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    params.check_vocabulary(101)
    with pytest.raises(UserError, match=rf"{next(iter(options))} .* for this model.*\.$"):
        params.check_vocabulary(100)


def test_a_checked_object_stays_as_it_was_checked() -> None:
    bias, stops = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)  # type: ignore[arg-type]
    bias[1] = math.nan
    stops.append(-7)
    assert params.logit_bias == {1: 2.0} and params.stop_token_ids == (3,)
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop_token_ids=(3,)))


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_are_refused(bad: Sequence[float], temperature: float) -> None:
    with pytest.raises(UserError, match="NaN or infinite"):
        draw(torch.tensor(bad), SamplingParams(temperature=temperature))


def test_forbidden_tokens_with_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((200,), -math.inf)
    logits[130] = logits[70] = -3.0
    assert {
        draw(logits, SamplingParams(temperature=2.0, top_k=50, top_p=0.99, seed=s))
        for s in range(40)
    } == {70, 130}


def test_a_dart_at_either_end_hits_something_that_weighs_something() -> None:
    cumulative = torch.tensor(
        [[0.0, 0.0, 1.0, 1.0, 3.0, 3.0]], dtype=torch.float64
    )  # places 2 and 4 weigh something
    hits = [
        int(_first_above(cumulative, torch.tensor([[dart]], dtype=torch.float64)))
        for dart in (0.0, 0.99, 1.0, 3.0, 3.1)
    ]
    assert hits == [2, 2, 4, 4, 4]


def test_rows_that_do_not_match_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="one row each"):
        sample(torch.zeros(2, 5), [SamplingParams()], [EMPTY], [None])
