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
from stage07_loadtest.schedule import closed, poisson
from stage07_loadtest.workload import LENGTHS, make


def test_requests_depend_on_the_seed_alone_and_no_prompt_comes_twice():
    for name, usual in LENGTHS.items():
        asks = make(name, 300, 3)
        assert make(name, 20, 3) == asks[:20] != make(name, 20, 4)
        assert {id for ask in asks for id in ask.prompt} == set(range(workload.VOCABULARY))
        if name == "fixed":
            assert {(len(ask.prompt), ask.max_tokens) for ask in asks} == {usual}
    assert len({tuple(ask.prompt) for ask in make("fixed", 256, 0, prompt=1)}) == 256
    with pytest.raises(UserError, match="fewer than 257 prompts of 1 tokens: choose more"):
        make("fixed", 257, 0, prompt=1)


def test_mixed_lengths_are_lognormal_and_bounded():
    asks = make("mixed", 4000, 0)
    drawn = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    for lengths, median in zip(drawn, LENGTHS["mixed"], strict=True):
        assert min(lengths) >= 1 and max(lengths) <= workload.MOST * median
        assert statistics.median(lengths) == approx(median, rel=0.1)
        assert statistics.stdev(map(math.log, lengths)) == approx(workload.SPREAD, rel=0.05)
        assert statistics.mean(lengths) > 1.15 * median, "no long tail to the right"


def test_a_workload_must_fit_in_the_context():
    for name, need in {"fixed": 58, "mixed": 624, "shared": 326}.items():
        assert len(make(name, 200, 0, longest=need)) == 200
        with pytest.raises(UserError, match=f"need up to {need} tokens.* choose fewer"):
            make(name, 1, 0, longest=need - 1)


def test_the_rate_is_exact_whatever_chance_says():
    for rate, count in ((0.5, 1), (4.0, 100), (37.5, 1001)):
        starts = poisson(rate, count, seed=3).starts
        assert starts is not None and len(starts) == count
        assert starts[-1] == approx(count / rate) and starts[0] > 0 and starts == sorted(starts)
        twice = poisson(2 * rate, count, seed=3).starts  # the same pattern in half the time
        assert twice == approx([start / 2 for start in starts])
    invalid: Any = ((poisson, 0, 3, 0), (poisson, 1, 0, 0), (closed, 5, 4), (closed, 0, 4))
    for make_schedule, *arguments in invalid:
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
