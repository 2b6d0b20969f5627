"""When requests are sent: seeded, worked out beforehand, and as the words promise."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from shared.errors import UserError
from stage07_loadtest.schedule import bursts, closed, poisson, trace
from stage07_loadtest.workload import Ask


def test_a_closed_loop_knows_its_users_and_no_times():
    found = closed(4, 10)
    assert (found.kind, found.users, found.starts, found.rate) == ("closed", 4, None, None)
    assert str(found) == "4 users" and str(closed(1, 1)) == "1 user"
    for users, count in ((5, 4), (0, 4)):
        with pytest.raises(ValueError, match="too few|requests are"):
            closed(users, count)


def test_poisson_arrivals_are_of_the_seed():
    assert poisson(2, 50, 1) == poisson(2, 50, 1)
    assert poisson(2, 50, 1) != poisson(2, 50, 2)
    assert str(poisson(2, 50, 1)) == "poisson, 2/s"


@pytest.mark.parametrize(("rate", "count"), [(0.5, 1), (4.0, 100), (37.5, 1001)])
def test_the_rate_is_exact_whatever_chance_says(rate: float, count: int):
    for seed in range(5):
        starts = poisson(rate, count, seed).starts
        assert starts is not None and len(starts) == count
        assert starts[-1] == pytest.approx(count / rate)
        assert starts[0] > 0 and starts == sorted(starts)


def test_twice_the_rate_is_the_same_pattern_in_half_the_time():
    slow, fast = poisson(3, 40, 7).starts, poisson(6, 40, 7).starts
    assert slow and fast and fast == pytest.approx([start / 2 for start in slow])


def test_gaps_are_exponential():
    starts = poisson(1, 20_000, 0).starts
    assert starts is not None
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    # Mean, standard deviation and median of an exponential distribution: 1, 1, ln 2. Even gaps would have 1, 0, 1.
    assert statistics.mean(gaps) == pytest.approx(1, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(1, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(0.693, rel=0.05)
    # And without memory: a long gap says nothing of the next.
    assert abs(statistics.correlation(gaps[1:], gaps[:-1])) < 0.03


def test_bursts_come_at_once_and_evenly():
    found = bursts(3, 2.0, 8)
    assert found.starts == [0, 0, 0, 2, 2, 2, 4, 4]
    assert found.kind == "bursts" and found.rate == 1.5


def test_a_trace_keeps_its_times():
    found = trace([Ask("b", 1, 1.5), Ask("a", 1, 0.25)])
    assert (found.kind, found.starts, found.users) == ("trace", [0.25, 1.5], None)
    assert str(found) == "trace"
    for asks in ([], [Ask("a", 1, 0.0), Ask("b", 1)]):
        with pytest.raises(UserError, match="'at'"):
            trace(asks)


@pytest.mark.parametrize(
    "make",
    [
        lambda: poisson(0, 3, 0),
        lambda: poisson(1, 0, 0),
        lambda: bursts(0, 1, 3),
        lambda: bursts(1, 0, 3),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(ValueError, match="no schedule"):
        make()
