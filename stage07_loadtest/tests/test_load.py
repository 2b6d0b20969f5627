"""One point: who is sent when, what is counted and what is not, and what is left if it ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from stage07_loadtest import load, mock, schedule
from stage07_loadtest.client import CUT, HTTP_503, REFUSED, TIMEOUT, Target
from stage07_loadtest.load import Point, ServerDelta, delta, run_point
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import Counters
from stage07_loadtest.tests import virtual
from stage07_loadtest.tests.test_client import whole, with_server
from stage07_loadtest.workload import Ask, make

QUICK: dict[str, Any] = {"ttft": 0.005, "itl": 0.001}


def asks(count: int, tokens: int = 5) -> list[Ask]:
    return [Ask([1, 2, number], tokens) for number in range(count)]


def point(
    when: Schedule, what: list[Ask], behaviour: dict[str, Any] | None = None, **options: Any
) -> tuple[Point, Mock]:
    async def run() -> tuple[Point, Mock]:
        async with mock.serving(Behaviour(**QUICK | (behaviour or {}))) as server:
            target = Target(server.url, timeout=options.pop("timeout", 20))
            return await run_point(target, what, when, **options), server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "time", virtual.TIME)
        return virtual.run(run())


# ---- closed loops -------------------------------------------------------------------------------------------------------


def test_a_closed_loop_has_as_many_requests_in_hand_as_users():
    found, server = point(schedule.closed(4, 20), asks(20), workload="mine")
    assert server.most_running == 4 and server.requests == 20
    assert [record.index for record in found.records] == list(range(20))
    assert {record.failure for record in found.records} == {None}
    assert (found.workload, found.schedule, found.interrupted) == (
        "mine",
        schedule.closed(4, 20),
        False,
    )
    assert found.duration >= max(record.end for record in found.records)
    assert found.client_cpu > 0 and found.started_unix > 1.6e9


def test_a_user_sends_when_the_last_answer_has_ended():
    found, _ = point(schedule.closed(1, 6), asks(6))
    assert found.records[0].intended == 0
    for earlier, later in pairwise(found.records):
        assert later.intended == earlier.end
        assert later.sent is not None and later.sent >= earlier.end


def test_a_closed_loop_may_end_by_time():
    found, server = point(schedule.closed(2, 400), asks(400), seconds=0.3)
    assert 2 <= len(found.records) < 100 and server.requests == len(
        found.records
    )  # an answer takes 9 ms at least
    assert all(record.sent is not None and record.intended <= 0.3 for record in found.records)


# ---- open loops -----------------------------------------------------------------------------------------------------------


def test_an_open_loop_does_not_wait_for_answers():
    """Nobody is answered before all have asked: who waits for an answer before it sends the next request waits for ever."""
    everybody = asyncio.Barrier(8)

    async def handle(request: web.Request) -> web.Response:
        await everybody.wait()
        return whole()

    when = schedule.poisson(200, 8, 0)
    found: Point = with_server(
        handle, lambda url: run_point(Target(url, timeout=20), asks(8, 6), when)
    )
    assert [record.intended for record in found.records] == when.starts
    assert {record.failure for record in found.records} == {None}
    assert all(
        record.sent is not None and record.sent >= record.intended for record in found.records
    )


def test_requests_of_a_burst_and_of_a_trace_start_at_their_times():
    found, _ = point(schedule.bursts(4, 0.2, 8), asks(8))
    assert [record.intended for record in found.records] == [0.0] * 4 + [0.2] * 4
    assert all(
        record.sent is not None and record.sent >= record.intended for record in found.records
    )
    traced = [Ask([1], 5, 0.0), Ask([2, 2], 3, 0.05)]
    found, _ = point(schedule.trace(traced), traced)
    assert [
        (record.intended, record.prompt_tokens, record.completion_tokens)
        for record in found.records
    ] == [(0.0, 1, 5), (0.05, 2, 3)]


def test_an_open_loop_may_end_by_time():
    found, server = point(schedule.poisson(100, 100, 0), asks(100), seconds=0.2)
    starts = schedule.poisson(100, 100, 0).starts
    assert starts is not None
    assert server.requests == len(found.records) == sum(start <= 0.2 for start in starts)


def test_as_many_requests_as_starts():
    with pytest.raises(ValueError, match="8 starts, and 7 requests after 1 to warm up"):
        point(schedule.poisson(1, 8, 0), asks(8), warmup=1)


# ---- what is counted --------------------------------------------------------------------------------------------------------


def test_warming_up_is_sent_and_counted_nowhere():
    found, server = point(schedule.closed(2, 6), asks(9), warmup=3)
    assert server.requests == 9 and len(found.records) == 6 and found.records[0].index == 0
    first = [body["prompt"][2] for body in server.bodies][:3]
    assert sorted(first) == [0, 1, 2]  # sent together, they may overtake each other
    assert found.server == ServerDelta(
        prompt_tokens=18, generation_tokens=30, success=6, running=0, waiting=0, kv_cache_usage=0.0
    )
    assert found.server.idle
    assert all(record.sent is not None and record.sent >= 0 for record in found.records)


def test_failures_are_counted_and_not_repeated():
    found, server = point(schedule.closed(2, 9), asks(9), {"fault": "503", "fault_every": 3})
    assert [record.failure for record in found.records].count(
        HTTP_503
    ) == 3 and server.requests == 9
    found, server = point(schedule.poisson(100, 4, 0), asks(4), {"fault": "cut"})
    assert {record.failure for record in found.records} == {CUT} and server.requests == 4
    found, _ = point(schedule.closed(2, 4), asks(4), {"fault": "refused"})
    assert {record.failure for record in found.records} == {REFUSED} and found.server is None
    found, _ = point(schedule.closed(2, 4), asks(4), {"fault": "hang"}, timeout=0.2)
    assert {record.failure for record in found.records} == {TIMEOUT}
    assert (
        found.server is not None and found.server.idle
    )  # the server has seen that the client left


def test_blocks_that_do_not_come_back_are_seen(monkeypatch):
    monkeypatch.setattr(load.settled, "__defaults__", (0.1,))
    found, _ = point(schedule.closed(1, 1), asks(1), {"fault": "leak"})
    assert found.server is not None and found.server.kv_cache_usage > 0 and not found.server.idle


def test_a_difference_of_counters():
    before, after = Counters(1, 2, 3, 4, 5, 0.5), Counters(11, 22, 33, 1, 0, 0.25)
    assert delta(before, after) == ServerDelta(10, 20, 30, 1, 0, 0.25)
    assert delta(None, after) is None and delta(before, None) is None


def test_a_server_without_metrics_is_measured_all_the_same():
    async def handle(request: web.Request) -> web.Response:
        return whole()

    found: Point = with_server(
        handle, lambda url: run_point(Target(url), asks(3, 6), schedule.closed(1, 3))
    )
    assert found.server is None and [record.failure for record in found.records] == [None] * 3


def test_requests_in_flight_are_sampled_evenly():
    found, _ = point(schedule.closed(3, 6), make("short", 6, 0), {"itl": 0.005})
    times = [at for at, _ in found.in_flight]
    assert times == sorted(times) and len(times) >= 10
    assert (
        max(count for _, count in found.in_flight) == 3
        and min(count for _, count in found.in_flight) >= 0
    )
    # Not drifting: each sample is taken at its place on a grid or later, and a late one does not put off the next.
    assert all(at >= number * load.SAMPLING * 0.99 for number, at in enumerate(times))


# ---- ending early -----------------------------------------------------------------------------------------------------------


def interrupted(
    when: Schedule, what: list[Ask], enough: Callable[[Mock], bool], **behaviour: Any
) -> tuple[Point, Mock]:
    """A point that is cancelled as soon as the mock has seen `enough`."""

    async def run() -> tuple[Point, Mock]:
        async with mock.serving(Behaviour(**QUICK | behaviour)) as server:
            task = asyncio.create_task(run_point(Target(server.url), what, when))
            while not enough(server):
                await asyncio.sleep(0.002)
            task.cancel()
            return await task, server

    return asyncio.run(run())


@pytest.mark.parametrize("when", [schedule.closed(2, 1000), schedule.poisson(100, 1000, 0)])
def test_cancelled_it_keeps_what_was_measured(when: Schedule):
    found, server = interrupted(when, asks(1000), lambda server: server.requests >= 10)
    assert found.interrupted and found.server is None
    assert 1 <= len(found.records) <= server.requests < 1000
    assert all(
        record.failure is None for record in found.records
    )  # what the client broke off is no failure of the server
    assert found.duration >= max(record.end for record in found.records)
    assert [record.index for record in found.records] == sorted(
        record.index for record in found.records
    )


def test_cancelled_before_any_answer_there_is_nothing_and_no_error():
    found, _ = interrupted(
        schedule.closed(2, 4), asks(4), lambda server: server.requests >= 2, ttft=60
    )
    assert found.interrupted and found.records == [] and found.duration > 0


def test_cancelled_while_the_server_comes_to_rest_the_point_is_whole():
    """The answers are there, but the blocks never come back: whoever does not wait for that loses no request."""

    async def run() -> Point:
        async with mock.serving(Behaviour(**QUICK, fault="leak")) as server:
            task = asyncio.create_task(
                run_point(Target(server.url), asks(4), schedule.closed(4, 4))
            )
            while server.requests < 4 or server.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            task.cancel()
            return await task

    found = asyncio.run(run())
    assert found.interrupted and len(found.records) == 4 and found.server is None


def test_cancelled_while_warming_up_there_is_no_point():
    async def run() -> None:
        async with mock.serving(Behaviour(ttft=60)) as server:
            task = asyncio.create_task(
                run_point(Target(server.url), asks(4), schedule.closed(2, 2), warmup=2)
            )
            while server.requests < 2:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
