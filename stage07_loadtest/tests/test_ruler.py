"""Can the load test be trusted? The server of known latencies, checks of the load test against it,
and against the ways in which load tests mislead.

Client and mock use real sockets on a clock that stands still while either works: what is measured
must equal the mock's settings on any machine. The benchmark's table has the client's own time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pytest import approx

from shared.errors import UserError
from stage07_loadtest import metrics
from stage07_loadtest.metrics import Slo, summarize
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import closed, poisson

from . import helpers
from .helpers import asks


def paced(count, late=0.0, **behaviour):
    """The moments of the tokens of an answer that starts at 0, on a machine that is always `late`
    seconds late."""

    async def tokens():
        server, loop = Mock(Behaviour(**behaviour)), asyncio.get_running_loop()
        return [loop.time() async for _ in server.paced(count)]

    return helpers.run(tokens(), late, grace=0.0)


def test_the_pace_of_an_answer():
    moments = paced(50, late=0.004, ttft=0.5, itl=0.02)
    due = [0.504 + 0.02 * number for number in range(50)]
    assert moments == approx(due, abs=1e-6), "delays add up"
    frozen = paced(5, ttft=1, itl=1, stall=2.5, stall_every=4)
    assert frozen == approx([1, 2, 3, 4, 7.5])
    assert Behaviour(stall=2, stall_every=10).due(21.5, 0) == 22  # nothing is sent while frozen
    for every in (0, 1):  # it would never thaw
        with pytest.raises(UserError, match="longer --stall-every"):
            Behaviour(stall=1, stall_every=every)


def against(*load, **options):
    point, server = helpers.against(*load, **options)
    return point, summarize(point, Slo()), server


@pytest.mark.parametrize(
    ("ttft", "itl", "when"), [(0.02, 0.01, closed(6, 12)), (0.2, 0.05, poisson(30, 12, seed=3))]
)
def test_known_latencies_are_measured_within_5_percent_or_5_ms(ttft, itl, when):
    _, summary, _ = against({"ttft": ttft, "itl": itl}, asks(18, 8), when, warmup=6)
    known = {metrics.TTFT: ttft, metrics.ITL: itl, metrics.TPOT: itl, metrics.E2E: ttft + 7 * itl}
    known |= {metrics.TTFT_INTENDED: ttft, metrics.E2E_INTENDED: ttft + 7 * itl}
    assert not summary.failures
    for name, seconds in (known | {metrics.CLIENT_QUEUE: 0.0}).items():
        assert summary.at(name, 50) == approx(seconds, rel=0.05, abs=0.005), name


@pytest.mark.parametrize("when", [closed(6, 36), poisson(30, 36, seed=1)], ids=str)
def test_littles_law_fails_when_records_lack_requests(when):
    """L is sampled while the load runs, lambda and W come from the records: equal for any load."""
    point, summary, _ = against({"ttft": 0.1, "itl": 0.06}, asks(36, 3), when)
    assert summary.little and summary.little.ratio == approx(1, abs=metrics.MOST_OFF)
    lost = summarize(replace(point, records=point.records[::2]), Slo())
    assert lost.little and lost.little.ratio > 1.5 and "Little" in "; ".join(lost.flags)


def test_pitfall_an_open_loop_that_waits_for_answers():
    """Catches a pool, a semaphore or an await that holds a request back until another has ended:
    all 150 are sent within 0.2 s, before the first is answered."""
    when = poisson(750, 150, seed=0)
    point, summary, server = against({"ttft": 0.3, "itl": 0}, asks(150, 1), when)
    assert server.most_running == 150 and not summary.failures
    assert [record.index for record in point.records] == [*range(150)]
    assert [record.intended for record in point.records] == when.starts
    assert all(one.sent is not None and one.sent >= one.intended for one in point.records)


def test_pitfall_latencies_from_the_late_send():
    """Catches a generator that is late itself: it stops for 0.4 s, and the requests that were due
    then look fast from their sending. What their users waited counts from the intended start."""

    async def hiccup(server: Mock) -> None:
        while len(server.bodies) < 20:
            await asyncio.sleep(0.01)
        helpers.stop(0.4)

    when = poisson(100, 100, seed=4)
    point, summary, _ = against({"ttft": 0.002, "itl": 0}, asks(100, 1), when, hiccup)
    late = [record for record in point.records if (metrics.client_queue(record) or 0) >= 0.2]
    assert late, "requests due in the first half of the stop were sent at least half of it late"
    for record in late:
        queue, sent = metrics.client_queue(record) or 0.0, metrics.ttft(record) or 0.0
        assert sent > 0 and metrics.ttft_intended(record) == approx(queue + sent)
    assert [record.intended for record in point.records] == when.starts, "the schedule is kept"
    assert "late" in "; ".join(summary.flags)
