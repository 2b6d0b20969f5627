"""One point: what is sent when, what is counted, and what is kept if it ends early."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from stage07_loadtest import load, mock
from stage07_loadtest.client import REFUSED, Target
from stage07_loadtest.load import run_point
from stage07_loadtest.mock import Behaviour
from stage07_loadtest.schedule import closed, poisson
from stage07_loadtest.server import Counters

from .helpers import QUICK, against, asks


def test_a_closed_loop_has_as_many_requests_in_hand_as_users():
    """Catches a load that never forms a batch: a pool that is too small, users who take turns. A
    baseline that does serve one at a time has the same users, in its queue."""
    _, server = against({"max_num_seqs": 1}, asks(20), closed(4, 20))
    assert server.most_running == 1
    found, server = against({}, asks(20), closed(4, 20))
    assert (server.most_running, len(server.bodies)) == (4, 20)
    assert [record.index for record in found.records] == list(range(20))
    assert {record.failure for record in found.records} == {None}
    assert found.schedule == closed(4, 20) and not found.interrupted and found.client_cpu > 0


def test_a_user_sends_when_the_last_answer_has_ended():
    found, _ = against({}, asks(6), closed(1, 6))
    assert found.records[0].intended == 0
    for earlier, later in pairwise(found.records):
        assert later.intended == earlier.end
        assert later.sent is not None and later.sent >= earlier.end


def test_a_load_may_end_by_time():
    when = poisson(100, 30, 0)
    found, server = against({}, asks(30), when, seconds=0.1)
    due = sum(start <= 0.1 for start in when.starts or [])
    assert len(server.bodies) == len(found.records) == due
    found, server = against({}, asks(400), closed(2, 400), seconds=0.1)
    assert 2 <= len(found.records) < 40 and len(server.bodies) == len(found.records)
    assert all(record.sent is not None and record.intended <= 0.1 for record in found.records)


def test_warming_up_is_sent_and_not_counted():
    found, server = against({}, asks(9), closed(2, 6), warmup=3)
    assert len(server.bodies) == 9 and len(found.records) == 6 and found.records[0].index == 0
    assert sorted(body["prompt"][2] for body in server.bodies[:3]) == [0, 1, 2]
    assert found.server == Counters(30, 6, running=0, waiting=0, kv_cache_usage=0.0)
    assert all(record.sent is not None and record.sent >= 0 for record in found.records)
    with pytest.raises(ValueError, match="30 starts, but 29 requests after 1 to warm up"):
        against({}, asks(30), poisson(100, 30, 0), warmup=1)


def test_without_a_server_all_requests_fail_and_nothing_is_counted():
    found = asyncio.run(run_point(Target("http://127.0.0.1:1"), asks(4), closed(2, 4)))
    assert [record.failure for record in found.records] == [REFUSED] * 4 and found.server is None


def test_requests_in_flight_are_sampled_evenly():
    found, _ = against({"itl": 0.005}, asks(6, 30), closed(3, 6))
    times = [at for at, _ in found.in_flight]
    assert times == sorted(times) and len(times) >= 10
    assert max(count for _, count in found.in_flight) == 3
    # Each sample is taken at its place on a grid or later: a late one does not delay the next.
    late = [at - number * load.SAMPLING for number, at in enumerate(times)]
    assert min(late) >= -1e-4 and max(late) <= 2 * load.SAMPLING


def interrupted(when, count, enough, warmup=0, **behaviour):
    """A point that is cancelled as soon as the mock has seen `enough`."""

    async def run():
        async with mock.serving(Behaviour(**QUICK | behaviour)) as server:
            work = run_point(Target(server.url), asks(count), when, warmup=warmup)
            task = asyncio.create_task(work)
            while len(server.bodies) < enough:
                await asyncio.sleep(0.002)
            task.cancel()
            return await task, server

    return asyncio.run(run())


@pytest.mark.parametrize("when", [closed(2, 1000), poisson(100, 1000, 0)])
def test_cancelled_it_keeps_what_was_measured(when):
    found, server = interrupted(when, 1000, 10)
    assert found.interrupted and found.server is None
    assert 1 <= len(found.records) <= len(server.bodies) < 1000
    assert {record.failure for record in found.records} == {None}  # aborted ones are left out
    assert found.records == sorted(found.records, key=lambda record: record.index)
    with pytest.raises(asyncio.CancelledError):  # while it warms up
        interrupted(closed(2, 2), 4, 2, warmup=2, ttft=60)
