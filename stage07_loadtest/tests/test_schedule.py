"""When requests are sent: seeded, fixed beforehand, and as documented."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from pytest import approx

from shared.errors import UserError
from stage07_loadtest.schedule import bursts, closed, poisson, trace
from stage07_loadtest.workload import Ask


def test_a_closed_loop_has_users_and_no_times():
    found = closed(4, 10)
    assert (found.kind, found.users, found.starts, found.rate) == ("closed", 4, None, None)
    assert str(found) == "4 users" and str(closed(1, 1)) == "1 user"


def test_poisson_arrivals_are_of_the_seed():
    assert poisson(2, 50, 1) == poisson(2, 50, 1) != poisson(2, 50, 2)
    assert str(poisson(2, 50, 1)) == "poisson, 2/s"


@pytest.mark.parametrize(("rate", "count"), [(0.5, 1), (4.0, 100), (37.5, 1001)])
def test_the_rate_is_exact_whatever_chance_says(rate: float, count: int):
    starts = poisson(rate, count, seed=3).starts
    assert starts is not None and len(starts) == count
    assert starts[-1] == approx(count / rate) and starts[0] > 0 and starts == sorted(starts)
    for bad in ((rate, 0), (0.0, count), (-rate, count)):
        with pytest.raises(ValueError, match="invalid schedule"):
            poisson(*bad, seed=3)


def test_twice_the_rate_is_the_same_pattern_in_half_the_time():
    slow, fast = poisson(3, 40, 7).starts, poisson(6, 40, 7).starts
    assert slow and fast and fast == approx([start / 2 for start in slow])


def test_gaps_are_exponential():
    """Mean, standard deviation and median 1, 1 and ln 2 (even gaps: 1, 0, 1), and no memory."""
    gaps = [later - earlier for earlier, later in pairwise(poisson(1, 20_000, 0).starts or [])]
    assert statistics.mean(gaps) == approx(1, rel=0.01)
    assert statistics.stdev(gaps) == approx(1, rel=0.05)
    assert statistics.median(gaps) == approx(0.693, rel=0.05)
    assert abs(statistics.correlation(gaps[1:], gaps[:-1])) < 0.03


def test_bursts_come_at_once_and_evenly():
    found = bursts(3, 2.0, 8)
    assert found.starts == [0, 0, 0, 2, 2, 2, 4, 4]
    assert found.kind == "bursts" and found.rate == 1.5


def test_a_trace_keeps_its_times():
    found = trace([Ask("b", 1, 1.5), Ask("a", 1, 0.25)])
    assert (str(found), found.kind, found.users) == ("trace", "trace", None)
    assert found.starts == [0.25, 1.5]
    for asks in ([], [Ask("a", 1, 0.0), Ask("b", 1)]):
        with pytest.raises(UserError, match="'at'"):
            trace(asks)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (closed, (5, 4)),
        (closed, (0, 4)),
        (poisson, (0, 3, 0)),
        (poisson, (1, 0, 0)),
        (bursts, (0, 1, 3)),
        (bursts, (1, 0, 3)),
    ],
)
def test_invalid_schedules_are_rejected(make, arguments):
    with pytest.raises(ValueError, match="invalid schedule|requests are too few"):
        make(*arguments)
