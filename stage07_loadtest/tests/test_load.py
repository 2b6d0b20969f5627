"""One point: what is sent when, what is counted, and what is kept if it ends early."""

from __future__ import annotations

from itertools import pairwise

from stage07_loadtest.schedule import closed, poisson
from stage07_loadtest.server import Counters

from .helpers import against, asks


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
