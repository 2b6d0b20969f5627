"""What is requested, and when: exact lengths and times, the same for the same seed."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

import pytest
from pytest import approx

from shared.errors import UserError
from stage07_loadtest import workload
from stage07_loadtest.schedule import bursts, closed, poisson
from stage07_loadtest.workload import WORKLOADS, make


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_depend_on_the_seed_alone(name):
    asks = make(name, 300, 3, vocab=101)
    assert make(name, 20, 3, vocab=101) == asks[:20] != make(name, 20, 4, vocab=101)
    assert {id for ask in asks for id in ask.prompt} == set(range(101))
    if length := {"short": 8, "medium": 32, "long": 64}.get(name):
        assert {(len(ask.prompt), ask.max_tokens) for ask in asks} == {(length, 50)}
    # No prompt comes twice, even if few are possible.
    prompts = [ask.prompt for ask in make(name, 8, 0, vocab=2, prompts=workload.lengths("3"))]
    assert len(set(map(tuple, prompts))) == 8


def test_mixed_lengths_are_lognormal_and_bounded():
    asks = make("mixed", 4000, 0)
    for lengths, (median, _, least, most) in (
        ([len(ask.prompt) for ask in asks], workload.MIXED_PROMPT),
        ([ask.max_tokens for ask in asks], workload.MIXED_ANSWER),
    ):
        assert least <= min(lengths) and max(lengths) <= most
        assert statistics.median(lengths) == approx(median, rel=0.1)
        assert statistics.mean(lengths) > 1.15 * median, "no long tail to the right"


def test_a_workload_must_fit_in_the_context():
    """The shared one begins all prompts alike, and then they differ."""
    asks, (least, most) = make("shared", 60, 0), workload.QUESTION
    assert len({tuple(ask.prompt[: workload.SYSTEM]) for ask in asks}) == 1
    questions = {len(ask.prompt) - workload.SYSTEM for ask in asks}
    assert least <= min(questions) and max(questions) <= most and len(questions) > 5
    for name, need in {"short": 58, "long": 114, "mixed": 584, "shared": 338}.items():
        assert len(make(name, 200, 0, longest=need)) == 200
        with pytest.raises(UserError, match=f"needs {need} tokens.* choose another one"):
            make(name, 1, 0, longest=need - 1)


def test_the_rate_is_exact_whatever_chance_says():
    for rate, count in ((0.5, 1), (4.0, 100), (37.5, 1001)):
        starts = poisson(rate, count, seed=3).starts
        assert starts is not None and len(starts) == count
        assert starts[-1] == approx(count / rate) and starts[0] > 0 and starts == sorted(starts)
        twice = poisson(2 * rate, count, seed=3).starts  # the same pattern in half the time
        assert twice == approx([start / 2 for start in starts])
    invalid: Any = ((poisson, 0, 3, 0), (poisson, 1, 0, 0), (bursts, 0, 1, 3), (bursts, 1, 0, 3))
    for make_schedule, *arguments in (*invalid, (closed, 5, 4), (closed, 0, 4)):
        with pytest.raises(ValueError):
            make_schedule(*arguments)


def test_gaps_are_exponential_and_of_the_seed():
    """Mean, standard deviation and median 1, 1 and ln 2 (even gaps: 1, 0, 1), and no memory."""
    assert poisson(2, 50, 1) == poisson(2, 50, 1) != poisson(2, 50, 2)
    gaps = [later - earlier for earlier, later in pairwise(poisson(1, 20_000, 0).starts or [])]
    assert statistics.mean(gaps) == approx(1, rel=0.01)
    assert statistics.stdev(gaps) == approx(1, rel=0.05)
    assert statistics.median(gaps) == approx(0.693, rel=0.05)
    assert abs(statistics.correlation(gaps[1:], gaps[:-1])) < 0.03


def test_bursts_come_at_once_and_evenly():
    assert bursts(3, 2.0, 8).starts == [0, 0, 0, 2, 2, 2, 4, 4] and bursts(3, 2.0, 8).rate == 1.5


def test_lengths_are_drawn_as_they_are_spelled():
    fixed, uniform, lognormal = map(workload.lengths, ("12", "16:256", "lognormal:64:0.8"))
    assert list(map(str, (fixed, uniform, lognormal))) == ["12", "16:256", "lognormal:64:0.8"]
    asks = make("short", 2000, 0, prompts=uniform, answers=lognormal)
    prompts, answers = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    assert (min(prompts), max(prompts)) == (16, 256)
    assert statistics.mean(prompts) == approx(136, rel=0.05)
    assert statistics.median(answers) == approx(64, rel=0.1)
    assert statistics.stdev(map(math.log, answers)) == approx(0.8, rel=0.05)
    asks = make("shared", 9, 0, prompts=fixed, answers=fixed)
    assert {(len(ask.prompt), ask.max_tokens) for ask in asks} == {(workload.SYSTEM + 12, 12)}


def test_lognormal_lengths_are_cut_to_the_context_and_others_must_fit():
    wide, fixed = workload.lengths("lognormal:40:2"), workload.lengths("60")
    for prompts, answers in ((wide, wide), (wide, fixed), (fixed, wide)):
        asks = make("short", 500, 0, prompts=prompts, answers=answers, longest=100)
        totals = [len(ask.prompt) + ask.max_tokens for ask in asks]
        assert max(totals) == 100 and all(ask.prompt and ask.max_tokens for ask in asks)
    with pytest.raises(UserError, match="60 and answers of 60 tokens need 120 .* 100: ask for few"):
        make("short", 1, 0, prompts=fixed, answers=fixed, longest=100)
    with pytest.raises(UserError, match="fewer than 300 different prompts of 1 tokens: ask"):
        make("short", 300, 0, prompts=workload.lengths("1"))
