"""Can the ruler be trusted? The load test against servers that are known, and against the ways in which load tests mislead.

Client and mock speak over real sockets, on a clock that stands still while either of them works (`virtual`). So what the ruler
says must be what the mock was told, on a machine that is busy or slow as well, and what a machine adds is in none of it. That is
measured where time is real: by the test marked `slow`, and by the benchmark, which keeps it in its results.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stage07_loadtest import load, metrics, mock, schedule
from stage07_loadtest.client import TOKENS, Target
from stage07_loadtest.load import Point, run_point
from stage07_loadtest.metrics import Slo, Summary, summarize
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import settled
from stage07_loadtest.tests import virtual
from stage07_loadtest.workload import Ask, make

TRIES = 10
NOTHING = Slo()
QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}  # where only counts matter


def asks(count: int, tokens: int = 8) -> list[Ask]:
    return [Ask([1, 2, 3, number], tokens) for number in range(count)]


def against(
    behaviour: Behaviour,
    what: Sequence[Ask],
    when: Schedule,
    beside: Callable[[Mock], Any] | None = None,
    warmup: int = 0,
) -> tuple[Point, Mock]:
    """A point against a mock on the same event loop, with `beside(server)` next to it. What all rates are divided by is not
    shorter than the records."""

    async def run() -> tuple[Point, Mock]:
        async with mock.serving(behaviour) as server:
            other = asyncio.create_task(beside(server)) if beside else None
            point = await run_point(Target(server.url, timeout=60), what, when, warmup=warmup)
            if other:
                await other
            return point, server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "time", virtual.TIME)
        point, server = virtual.run(run())
    assert max(record.end for record in point.records) <= point.duration
    return point, server


def flags(summary: Summary) -> list[str]:
    """Without the one that says that a test's points are short."""
    return [flag for flag in summary.flags if not flag.startswith("short")]


# ---- latencies ----------------------------------------------------------------------------------------------------


def off(summary: Summary, known: dict[str, float]) -> dict[str, str]:
    """The medians that are not within 5 % or 5 ms of what is known, whichever is more."""
    found = {name: summary.at(name, 50) for name in known}
    return {
        name: f"{value} s, and {known[name]:g} s are right"
        for name, value in found.items()
        if value is None or abs(value - known[name]) > max(0.05 * known[name], 0.005)
    }


def known(ttft: float, itl: float, tokens: int) -> dict[str, float]:
    return {
        metrics.TTFT: ttft, metrics.TTFT_INTENDED: ttft, metrics.ITL: itl, metrics.TPOT: itl,
        metrics.E2E: ttft + (tokens - 1) * itl, metrics.E2E_INTENDED: ttft + (tokens - 1) * itl, metrics.CLIENT_QUEUE: 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "when", [schedule.closed(6, 12), schedule.poisson(30, 12, seed=3)], ids=str
)
@pytest.mark.parametrize(("ttft", "itl"), [(0.02, 0.01), (0.2, 0.05)])
def test_known_latencies_are_measured_within_5_percent_or_5_ms(
    ttft: float, itl: float, when: Schedule
) -> None:
    point, _ = against(Behaviour(ttft=ttft, itl=itl), asks(18), when, warmup=6)
    summary = summarize(point, NOTHING)
    assert not summary.failures and not off(summary, known(ttft, itl, 8))


def test_several_tokens_in_a_chunk_have_the_same_tpot_and_other_gaps():
    """Catches a TPOT that takes chunks for tokens: it would be 4 times what it is. The gaps between chunks really are longer."""
    ttft, itl, tokens, bundle = 0.02, 0.01, 29, 4
    first, last = ttft + (bundle - 1) * itl, ttft + (tokens - 1) * itl
    right = {
        metrics.TTFT: first,
        metrics.E2E: last,
        metrics.ITL: bundle * itl,
        metrics.TPOT: (last - first) / (tokens - 1),
    }
    point, _ = against(
        Behaviour(ttft=ttft, itl=itl, chunk_tokens=bundle), asks(12, tokens), schedule.closed(4, 12)
    )
    assert not off(summarize(point, NOTHING), right)


@pytest.mark.slow
def test_known_latencies_are_measured_within_5_percent_where_time_is_real():
    """Two processes, as client and server always are, and latencies as of a server in use.

    On a machine that is busy both get their turns late, so that tokens really are sent and seen later than told. A ruler that
    is off, because it waits for another stream's JSON or for a buffer, is off every time. So one right figure clears the ruler
    of that latency, and only wrong ones in a row condemn it.
    """
    wrong = known(0.5, 0.1, 8)
    with mock.process("--ttft", "0.5", "--itl", "0.1") as url:
        for _ in range(TRIES):
            begun = time.perf_counter()
            point = asyncio.run(
                run_point(Target(url, timeout=60), asks(24), schedule.closed(6, 18), warmup=6)
            )
            assert (
                max(record.end for record in point.records)
                <= point.duration
                <= time.perf_counter() - begun
            )
            summary = summarize(point, NOTHING)
            assert not summary.failures
            found = off(summary, wrong)
            wrong = {name: right for name, right in wrong.items() if name in found}
            if not wrong and summary.client_cpu <= metrics.MOST_CPU:
                return
    pytest.fail(
        f"The ruler is off, {TRIES} times in a row: {found}, and the client took {summary.client_cpu:.0%} of a core"
    )


def test_the_wait_in_the_servers_line_is_part_of_its_latency():
    """Catches a clock that starts when the server begins to answer, or to send headers: five come at once, and one at a time is
    answered."""
    point, _ = against(Behaviour(ttft=0.05, itl=0, slots=1), asks(5, 1), schedule.bursts(5, 1, 5))
    waited = sorted(
        value for record in point.records if (value := metrics.ttft(record)) is not None
    )
    assert waited == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25], abs=0.005)


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_every_token_is_counted_once_on_both_sides():
    """Lengths of all kinds and bundled chunks: what was asked for, what came, and what the server counts are the same number."""
    what = make("mixed", 40, seed=5)
    point, _ = against(Behaviour(ttft=0.01, itl=0, chunk_tokens=3), what, schedule.closed(8, 40))
    summary = summarize(point, NOTHING)
    assert summary.succeeded == 40 and summary.completion_tokens == sum(
        ask.max_tokens for ask in what
    )
    assert [sum(record.chunk_tokens) for record in point.records] == [
        ask.max_tokens for ask in what
    ]
    assert point.server is not None and point.server.generation_tokens == summary.completion_tokens
    assert (
        point.server.prompt_tokens == summary.prompt_tokens == sum(len(ask.prompt) for ask in what)
    )
    assert (
        summary.tokens_match
        and summary.blocks_back
        and not [flag for flag in summary.flags if "tokens" in flag]
    )


def test_a_token_that_only_the_server_has_counted_is_found():
    point, _ = against(
        Behaviour(**QUICK, fault="wrong_counter", fault_every=20), asks(20), schedule.closed(4, 20)
    )
    summary = summarize(point, NOTHING)
    assert summary.succeeded == 20 and summary.tokens_match is False
    assert any("161" in flag for flag in flags(summary)), summary.flags


def test_blocks_that_do_not_come_back_are_found(monkeypatch):
    monkeypatch.setattr(load, "settled", partial(settled, patience=0.1))
    point, _ = against(
        Behaviour(**QUICK, fault="leak", fault_every=7), asks(7), schedule.closed(2, 7)
    )
    summary = summarize(point, NOTHING)
    assert (
        summary.succeeded == 7
        and summary.blocks_back is False
        and any("idle" in flag for flag in flags(summary))
    )


# ---- Little's law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when",
    [schedule.closed(6, 36), schedule.poisson(30, 36, seed=1), schedule.bursts(12, 0.4, 36)],
    ids=str,
)
def test_littles_law_holds_and_a_request_that_nobody_wrote_down_breaks_it(when: Schedule) -> None:
    """L is counted while the load runs, lambda and W come from the records: they agree whatever the load."""
    point, _ = against(Behaviour(ttft=0.1, itl=0.06), asks(36, 3), when)
    law = summarize(point, NOTHING).little
    assert law is not None and law.ratio == pytest.approx(1, abs=metrics.MOST_OFF)
    lost = summarize(replace(point, records=point.records[::2]), NOTHING)
    assert (
        lost.little is not None
        and lost.little.ratio > 1.5
        and any("Little" in flag for flag in flags(lost))
    )


# ---- pitfalls -----------------------------------------------------------------------------------------------------


def test_pitfall_users_who_never_meet():
    """Catches a load that never makes a batch, because the pool of connections is too small or the users take turns: the server
    is "batched", and what is measured is one request at a time. Against a baseline that does answer one at a time the users are
    there as well, and wait: what makes the ratio between the two is batching, and nothing else."""
    _, batched = against(Behaviour(ttft=0.2, itl=0), asks(24), schedule.closed(24, 24))
    assert (batched.most_running, batched.most_waiting) == (24, 0)
    _, alone = against(Behaviour(**QUICK, slots=1), asks(24), schedule.closed(24, 24))
    assert alone.most_running == 1 and alone.most_waiting > 1


def test_pitfall_answers_that_are_all_of_one_length():
    """Catches a comparison of batching where all rows end together, so that coming and going has nothing to gain: there must be a
    workload whose answers differ, they must come out as long as they were asked for, and the fixed ones must be as fixed as they
    say."""
    for name, lengths in {"mixed": range(15, 41), "short": range(1, 2)}.items():
        what = make(name, 40, seed=0)
        point, server = against(
            Behaviour(ttft=0, itl=0, chunk_tokens=8), what, schedule.closed(8, 40)
        )
        wanted = [ask.max_tokens for ask in what]
        assert [record.completion_tokens for record in point.records] == wanted and len(
            set(wanted)
        ) in lengths
        assert sorted(body["max_tokens"] for body in server.bodies) == sorted(wanted)


def test_pitfall_a_closed_loop_waits_with_the_server():
    """Coordinated omission. While the server is frozen a closed loop asks nothing, so one slow answer stands for all that would
    have come; an open loop goes on asking, and sees what its users would. Same server, same answers, same number of them."""
    behaviour = Behaviour(ttft=0.02, itl=0, stall=0.5, stall_every=0.7)

    def held_back(when: Schedule) -> list[float]:
        """What the requests waited that were to start in the first 0.3 s of the first freeze. The freezes count from the first
        request."""
        point, _ = against(behaviour, asks(60, 1), when)
        begins = point.records[0].intended + 0.7
        found = [
            record for record in point.records if begins + 0.005 <= record.intended <= begins + 0.3
        ]
        return [value for record in found if (value := metrics.ttft_intended(record)) is not None]

    assert len(held_back(schedule.closed(1, 60))) <= 1
    held = held_back(schedule.poisson(50, 60, seed=2))
    assert len(held) >= 10 and min(held) >= 0.19


def test_pitfall_an_open_loop_that_waits_for_answers():
    """Catches a pool, a semaphore or an await that keeps a request back until another has ended: all 60 are sent within 0.2 s,
    before the first is answered."""
    point, server = against(
        Behaviour(ttft=0.3, itl=0), asks(60, 1), schedule.poisson(300, 60, seed=0)
    )
    assert server.most_running == 60
    assert not summarize(point, NOTHING).failures


def test_pitfall_latencies_from_the_late_send():
    """Catches the generator that is late itself: it stops for 0.4 s, and the requests that were due meanwhile look fast from
    their sending. What their users waited is counted from when they were to start, and the client's part is told apart."""

    async def hiccup(server: Mock) -> None:
        while server.requests < 20:
            await asyncio.sleep(0.01)
        virtual.stop(0.4)

    when = schedule.poisson(100, 100, seed=4)
    point, _ = against(Behaviour(ttft=0.002, itl=0), asks(100, 1), when, hiccup)
    late = [
        record
        for record in point.records
        if record.sent is not None and record.sent - record.intended >= 0.2
    ]
    assert late, "whoever was due in the first half of the stop was sent at least half of it late"
    for record in late:
        queue, from_sending, from_intended = (
            of(record) for of in (metrics.client_queue, metrics.ttft, metrics.ttft_intended)
        )
        assert queue is not None and from_sending is not None and from_intended is not None
        assert from_intended == pytest.approx(queue + from_sending) and from_intended >= 0.2
    assert [record.intended for record in point.records] == when.starts, (
        "the schedule is not put off"
    )
    assert any("late" in flag for flag in flags(summarize(point, NOTHING)))


def test_pitfall_the_generator_is_the_bottleneck():
    """Catches a client that is as busy as the server: what it burns is measured, and above 70 % of a core the point is marked."""
    burnt = []

    async def burn(server: Mock) -> None:
        while not server.requests:
            await asyncio.sleep(0.001)
        begun = time.process_time()
        while (used := time.process_time() - begun) < 0.2:
            pass
        burnt.append(used)

    point, _ = against(Behaviour(**QUICK), asks(4), schedule.closed(4, 4), burn)
    assert point.client_cpu * point.duration >= burnt[0]
    for share, marked in ((0.69, False), (0.71, True)):
        summary = summarize(replace(point, client_cpu=share), NOTHING)
        assert any("core" in flag for flag in flags(summary)) == marked


def test_pitfall_two_sides_that_say_different_numbers_of_tokens():
    """Catches a server that is fast because it says less. An answer that is short of one token is no success: it is in no
    throughput and in no latency, and in the adjusted percentiles it never came."""
    point, _ = against(
        Behaviour(**QUICK, fault="wrong_count", fault_every=2), asks(20), schedule.closed(4, 20)
    )
    summary = summarize(point, NOTHING)
    assert summary.failures == {TOKENS: 10} and summary.success_rate == 0.5
    assert summary.completion_tokens == 10 * 8
    assert summary.output_rate == pytest.approx(80 / summary.seconds)
    assert summary.latency[metrics.E2E].samples == 10
    assert summary.at(metrics.E2E, 90, adjusted=True) == math.inf


def test_pitfall_answers_that_may_end_when_they_like():
    """Catches a request without `ignore_eos`: the mock ends such an answer early, as a model does, and both sides of a comparison
    would have lengths of their own."""
    point, server = against(Behaviour(**QUICK), asks(5), schedule.closed(1, 5))
    assert [record.completion_tokens for record in point.records] == [8] * 5
    assert all(record.finish_reason == "length" for record in point.records)
    wanted = {
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert all(body.items() >= wanted.items() for body in server.bodies)
