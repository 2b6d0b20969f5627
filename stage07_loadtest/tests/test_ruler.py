"""Can the load test be trusted? Checks against servers that are known, and against the ways in
which load tests mislead.

Client and mock use real sockets on a clock that stands still while either works (`virtual`): the
measurements must equal the mock's settings on any machine, busy or slow. The overhead of a machine
is measured in real time, by the test marked `slow` and by the benchmark.
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
from pytest import approx

from stage07_loadtest import load, metrics, mock, schedule
from stage07_loadtest.client import TOKENS, Target
from stage07_loadtest.load import Point, run_point
from stage07_loadtest.metrics import Slo, Summary, summarize
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import settled
from stage07_loadtest.tests import virtual
from stage07_loadtest.tests.helpers import asks
from stage07_loadtest.workload import Ask, make

TRIES = 10
NO_LIMITS = Slo()
QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}  # where only counts matter


def against(
    behaviour: Behaviour,
    what: Sequence[Ask],
    when: Schedule,
    beside: Callable[[Mock], Any] | None = None,
    warmup: int = 0,
) -> tuple[Point, Mock]:
    """A point against a mock on the same event loop, with `beside(server)` next to it."""

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


def flags(summary: Summary) -> str:
    return "; ".join(summary.flags)


# ---- latencies


def off(summary: Summary, known: dict[str, float]) -> dict[str, str]:
    """The medians that are neither within 5 % nor within 5 ms of the known values."""
    found = {name: summary.at(name, 50) for name in known}
    return {
        name: f"{value} s instead of {known[name]:g} s"
        for name, value in found.items()
        if value is None or abs(value - known[name]) > max(0.05 * known[name], 0.005)
    }


def known(ttft: float, itl: float, tokens: int) -> dict[str, float]:
    e2e = ttft + (tokens - 1) * itl
    names = {metrics.TTFT: ttft, metrics.TTFT_INTENDED: ttft, metrics.ITL: itl, metrics.TPOT: itl}
    return names | {metrics.E2E: e2e, metrics.E2E_INTENDED: e2e, metrics.CLIENT_QUEUE: 0.0}


@pytest.mark.parametrize(
    "when", [schedule.closed(6, 12), schedule.poisson(30, 12, seed=3)], ids=str
)
@pytest.mark.parametrize(("ttft", "itl"), [(0.02, 0.01), (0.2, 0.05)])
def test_known_latencies_are_measured_within_5_percent_or_5_ms(
    ttft: float, itl: float, when: Schedule
) -> None:
    point, _ = against(Behaviour(ttft=ttft, itl=itl), asks(18, 8), when, warmup=6)
    summary = summarize(point, NO_LIMITS)
    assert not summary.failures and not off(summary, known(ttft, itl, 8))


@pytest.mark.slow
def test_known_latencies_are_measured_within_5_percent_where_time_is_real():
    """Two processes, as client and server always are, at the latencies of a server in use. On a
    busy machine tokens really are late at times; a faulty client is off in every try."""
    wrong = known(0.5, 0.1, 8)
    with mock.process("--ttft", "0.5", "--itl", "0.1") as url:
        for _ in range(TRIES):
            target, when = Target(url, timeout=60), schedule.closed(6, 18)
            point = asyncio.run(run_point(target, asks(24, 8), when, warmup=6))
            summary = summarize(point, NO_LIMITS)
            assert not summary.failures
            found = off(summary, wrong)
            wrong = {name: right for name, right in wrong.items() if name in found}
            if not wrong and summary.client_cpu <= metrics.MOST_CPU:
                return
    pytest.fail(f"{TRIES} times in a row: {found}; client CPU {summary.client_cpu:.0%}")


def test_waiting_in_the_servers_queue_is_part_of_its_latency():
    """Catches a clock that starts when the server begins to answer, or to send headers."""
    point, _ = against(Behaviour(ttft=0.05, itl=0, slots=1), asks(5, 1), schedule.bursts(5, 1, 5))
    waited = sorted(metrics.ttft(record) or 0.0 for record in point.records)
    assert waited == approx([0.05, 0.1, 0.15, 0.2, 0.25], abs=0.005)


# ---- tokens


def test_every_token_is_counted_once_on_both_sides():
    """Mixed lengths, bundled chunks: requested, received, and counted by the server alike."""
    what = make("mixed", 40, seed=5)
    point, _ = against(Behaviour(ttft=0.01, itl=0, chunk_tokens=3), what, schedule.closed(8, 40))
    summary, wanted = summarize(point, NO_LIMITS), [ask.max_tokens for ask in what]
    assert summary.succeeded == 40 and point.server is not None
    assert [sum(record.chunk_tokens) for record in point.records] == wanted
    assert point.server.generation_tokens == summary.completion_tokens == sum(wanted)
    prompts = sum(len(ask.prompt) for ask in what)
    assert point.server.prompt_tokens == summary.prompt_tokens == prompts
    assert summary.tokens_match and summary.blocks_back and "tokens" not in flags(summary)


@pytest.mark.parametrize(
    ("fault", "match", "back", "flag"),
    [
        ("wrong_counter", False, True, "tokens differ: server 161, client 160"),
        ("leak", True, False, "server not idle"),
    ],
)
def test_a_server_that_miscounts_or_leaks_is_marked(monkeypatch, fault, match, back, flag):
    monkeypatch.setattr(load, "settled", partial(settled, patience=0.1))
    behaviour = Behaviour(**QUICK, fault=fault, fault_every=20)
    point, _ = against(behaviour, asks(20, 8), schedule.closed(4, 20))
    summary = summarize(point, NO_LIMITS)
    assert (summary.succeeded, summary.tokens_match, summary.blocks_back) == (20, match, back)
    assert flag in flags(summary)


# ---- Little's law


@pytest.mark.parametrize(
    "when",
    [schedule.closed(6, 36), schedule.poisson(30, 36, seed=1), schedule.bursts(12, 0.4, 36)],
    ids=str,
)
def test_littles_law_holds_until_requests_are_missing_from_the_records(when: Schedule) -> None:
    """L is sampled while the load runs, lambda and W come from the records: equal for any load."""
    point, _ = against(Behaviour(ttft=0.1, itl=0.06), asks(36, 3), when)
    law = summarize(point, NO_LIMITS).little
    assert law is not None and law.ratio == approx(1, abs=metrics.MOST_OFF)
    lost = summarize(replace(point, records=point.records[::2]), NO_LIMITS)
    assert lost.little is not None and lost.little.ratio > 1.5 and "Little" in flags(lost)


# ---- pitfalls


def test_pitfall_users_who_never_meet():
    """Catches a load that never forms a batch, because the pool of connections is too small or the
    users take turns: a batching server is then measured one request at a time. A baseline that
    does serve one at a time has the same users, in its queue: the ratio is that of batching."""
    _, batched = against(Behaviour(ttft=0.2, itl=0), asks(24), schedule.closed(24, 24))
    assert (batched.most_running, batched.most_waiting) == (24, 0)
    _, alone = against(Behaviour(**QUICK, slots=1), asks(24), schedule.closed(24, 24))
    assert alone.most_running == 1 and alone.most_waiting > 1


@pytest.mark.parametrize(("name", "different"), [("mixed", range(15, 41)), ("short", range(1, 2))])
def test_pitfall_answers_that_are_all_of_one_length(name: str, different: range):
    """Catches a comparison where all rows end together, so that continuous batching has nothing to
    gain: a workload's answers must differ, and be as long as requested."""
    what = make(name, 40, seed=0)
    point, server = against(Behaviour(ttft=0, itl=0, chunk_tokens=8), what, schedule.closed(8, 40))
    wanted = [ask.max_tokens for ask in what]
    assert [record.completion_tokens for record in point.records] == wanted
    assert sorted(body["max_tokens"] for body in server.bodies) == sorted(wanted)
    assert len(set(wanted)) in different


def test_pitfall_a_closed_loop_waits_with_the_server():
    """Coordinated omission: while the server is frozen a closed loop sends nothing, so one slow
    answer replaces all that would have come. An open loop keeps sending. Same server, same
    answers."""
    behaviour = Behaviour(ttft=0.02, itl=0, stall=0.5, stall_every=0.7)

    def held_back(when: Schedule, count: int) -> list[float]:
        """Waiting times of requests intended in the first 0.3 s of the first freeze."""
        point, _ = against(behaviour, asks(count, 1), when)
        begins = point.records[0].intended + 0.7
        return [
            metrics.ttft_intended(record) or 0.0
            for record in point.records
            if begins + 0.005 <= record.intended <= begins + 0.3
        ]

    assert len(held_back(schedule.closed(1, 40), 40)) <= 1
    held = held_back(schedule.poisson(50, 60, seed=2), 60)
    assert len(held) >= 10 and min(held) >= 0.19


def test_pitfall_an_open_loop_that_waits_for_answers():
    """Catches a pool, a semaphore or an await that holds a request back until another has ended:
    all 60 are sent within 0.2 s, before the first is answered."""
    point, server = against(
        Behaviour(ttft=0.3, itl=0), asks(60, 1), schedule.poisson(300, 60, seed=0)
    )
    assert server.most_running == 60 and not summarize(point, NO_LIMITS).failures


def test_pitfall_latencies_from_the_late_send():
    """Catches a generator that is late itself: it stops for 0.4 s, and the requests that were due
    then look fast from their sending. What their users waited counts from the intended start."""

    async def hiccup(server: Mock) -> None:
        while server.requests < 20:
            await asyncio.sleep(0.01)
        virtual.stop(0.4)

    when = schedule.poisson(100, 100, seed=4)
    point, _ = against(Behaviour(ttft=0.002, itl=0), asks(100, 1), when, hiccup)
    late = [record for record in point.records if (metrics.client_queue(record) or 0) >= 0.2]
    assert late, "requests due in the first half of the stop were sent at least half of it late"
    for record in late:
        queue, sent = metrics.client_queue(record) or 0.0, metrics.ttft(record) or 0.0
        assert sent > 0 and metrics.ttft_intended(record) == approx(queue + sent)
    assert [record.intended for record in point.records] == when.starts, "the schedule is kept"
    assert "late" in flags(summarize(point, NO_LIMITS))


def test_pitfall_the_generator_is_the_bottleneck():
    """Catches a client that is as busy as the server: the CPU time that it took is measured."""
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


def test_pitfall_two_sides_that_say_different_numbers_of_tokens():
    """Catches a server that is fast because it sends less. An answer that is short of one token is
    a failure: in no throughput, in no latency, and infinite in the adjusted percentiles."""
    behaviour = Behaviour(**QUICK, fault="wrong_count", fault_every=2)
    point, _ = against(behaviour, asks(20, 8), schedule.closed(4, 20))
    summary = summarize(point, NO_LIMITS)
    assert summary.failures == {TOKENS: 10} and summary.success_rate == 0.5
    assert summary.completion_tokens == 80 and summary.output_rate == approx(80 / summary.seconds)
    assert summary.latency[metrics.E2E].samples == 10
    assert summary.at(metrics.E2E, 90, adjusted=True) == math.inf


def test_pitfall_answers_that_may_end_when_they_like():
    """Catches a request without `ignore_eos`: the mock ends such an answer early, as a model does,
    and the two sides of a comparison would have different lengths."""
    point, server = against(Behaviour(**QUICK), asks(5, 8), schedule.closed(1, 5))
    ended = {(record.completion_tokens, record.finish_reason) for record in point.records}
    assert ended == {(8, "length")}
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in server.bodies)
