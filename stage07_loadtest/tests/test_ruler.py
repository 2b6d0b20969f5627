"""Can the ruler be trusted? The load test against servers that are known, and against the ways in which load tests mislead.

Of times, two kinds are asserted. One is "not earlier than", which no busy machine can break. The other is the accuracy of a whole
point, where it is what the test is about: see `measured_right`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stage07_loadtest import load, metrics, mock, schedule
from stage07_loadtest.client import TOKENS, Record, Target
from stage07_loadtest.load import Point, run_point
from stage07_loadtest.metrics import Slo, Summary, summarize
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import settled
from stage07_loadtest.workload import Ask, make

TRIES = 10
NOTHING = Slo()
QUICK: dict[str, Any] = {"ttft": 0.002, "itl": 0.001}  # where only counts matter


def asks(count: int, tokens: int = 8) -> list[Ask]:
    return [Ask([1, 2, 3, number], tokens) for number in range(count)]


def measure(url: str, what: Sequence[Ask], when: Schedule, warmup: int = 0) -> Point:
    """A point against a process. What all rates are divided by cannot be shorter than the records, or longer than it took."""
    begun = time.perf_counter()
    point = asyncio.run(run_point(Target(url, timeout=60), what, when, warmup=warmup))
    assert max(record.end for record in point.records) <= point.duration <= time.perf_counter() - begun
    return point


def against(
    behaviour: Behaviour, what: Sequence[Ask], when: Schedule, beside: Callable[[Mock], Any] | None = None
) -> tuple[Point, Mock]:
    """A point against a mock on the same event loop, with `beside(server)` next to it. For counts, and for "not earlier"."""

    async def run() -> tuple[Point, Mock]:
        async with mock.serving(behaviour) as server:
            other = asyncio.create_task(beside(server)) if beside else None
            point = await run_point(Target(server.url, timeout=60), what, when)
            if other:
                await other
            return point, server

    return asyncio.run(run())


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


def measured_right(take: Callable[[], Point], known: dict[str, float]) -> None:
    """Take points until each median has been right once. Fails if one of them was wrong TRIES times in a row.

    On a machine that is busy both processes get their turns late, so that tokens really are sent and seen later than told: what
    is off then is the machine, and it passes. A ruler that is off, by a wrong formula, by waiting for another stream's JSON, or
    by a buffer in between, is off every time. So one right figure clears the ruler of that latency, and only wrong ones in a row
    condemn it. The median is judged, since a single hiccup says nothing of the ruler either.
    """
    wrong: dict[str, list[str]] = {name: [] for name in [*known, "client_cpu"]}
    for _ in range(TRIES):
        summary = summarize(take(), NOTHING)
        assert not summary.failures
        found = off(summary, known)
        if summary.client_cpu > metrics.MOST_CPU:
            found["client_cpu"] = f"{summary.client_cpu:.0%} of a core"
        wrong = {name: [*before, found[name]] for name, before in wrong.items() if name in found}
        if not wrong:
            return
    pytest.fail(f"The ruler is off, {TRIES} times in a row: {wrong}")


def known(ttft: float, itl: float, tokens: int) -> dict[str, float]:
    return {
        metrics.TTFT: ttft, metrics.TTFT_INTENDED: ttft, metrics.ITL: itl, metrics.TPOT: itl,
        metrics.E2E: ttft + (tokens - 1) * itl, metrics.E2E_INTENDED: ttft + (tokens - 1) * itl, metrics.CLIENT_QUEUE: 0.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def fast() -> Iterator[str]:
    """A server as every one that is measured, a process of its own: 20 ms to the first token, and 10 ms between two."""
    with mock.process("--ttft", "0.02", "--itl", "0.01") as url:
        yield url


@pytest.mark.parametrize("when", [schedule.closed(6, 24), schedule.poisson(30, 24, seed=3)], ids=str)
def test_known_latencies_are_measured_within_5_ms(fast, when):
    measured_right(lambda: measure(fast, asks(30, 20), when, warmup=6), known(0.02, 0.01, 20))


def test_known_latencies_are_measured_within_5_percent():
    with mock.process("--ttft", "0.2", "--itl", "0.05") as url:
        measured_right(lambda: measure(url, asks(24), schedule.closed(6, 18), warmup=6), known(0.2, 0.05, 8))


def test_several_tokens_in_a_chunk_have_the_same_tpot_and_other_gaps():
    """Catches a TPOT that takes chunks for tokens: it would be 4 times what it is. The gaps between chunks really are longer."""
    ttft, itl, tokens, bundle = 0.02, 0.01, 29, 4
    first, last = ttft + (bundle - 1) * itl, ttft + (tokens - 1) * itl
    right = {metrics.TTFT: first, metrics.E2E: last, metrics.ITL: bundle * itl, metrics.TPOT: (last - first) / (tokens - 1)}
    with mock.process("--ttft", str(ttft), "--itl", str(itl), "--chunk-tokens", str(bundle)) as url:
        measured_right(lambda: measure(url, asks(12, tokens), schedule.closed(4, 12)), right)


def test_the_wait_in_the_servers_line_is_part_of_its_latency():
    """Catches a clock that starts when the server begins to answer, or to send headers: five come at once, and one at a time is
    answered."""
    point, _ = against(Behaviour(ttft=0.05, itl=0, slots=1), asks(5, 1), schedule.bursts(5, 1, 5))
    sent = [record.sent for record in point.records if record.sent is not None]
    arrived = sorted(record.chunks[0] for record in point.records)
    assert len(sent) == 5 and max(sent) < arrived[0], "they were not asked at once"
    assert all(at - min(sent) >= 0.05 * place - 1e-3 for place, at in enumerate(arrived, 1)), arrived
    assert all(metrics.ttft(record) == record.chunks[0] - at for record, at in zip(point.records, sent, strict=True))


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_every_token_is_counted_once_on_both_sides():
    """Lengths of all kinds and bundled chunks: what was asked for, what came, and what the server counts are the same number."""
    what = make("mixed", 40, seed=5)
    point, _ = against(Behaviour(ttft=0, itl=0, chunk_tokens=3), what, schedule.closed(8, 40))
    summary = summarize(point, NOTHING)
    assert summary.succeeded == 40 and summary.completion_tokens == sum(ask.max_tokens for ask in what)
    assert [sum(record.chunk_tokens) for record in point.records] == [ask.max_tokens for ask in what]
    assert point.server is not None and point.server.generation_tokens == summary.completion_tokens
    assert point.server.prompt_tokens == summary.prompt_tokens == sum(len(ask.prompt) for ask in what)
    assert summary.tokens_match and summary.blocks_back and not [flag for flag in summary.flags if "tokens" in flag]


def test_a_token_that_only_the_server_has_counted_is_found():
    point, _ = against(Behaviour(**QUICK, fault="wrong_counter", fault_every=20), asks(20), schedule.closed(4, 20))
    summary = summarize(point, NOTHING)
    assert summary.succeeded == 20 and summary.tokens_match is False
    assert any("161" in flag for flag in flags(summary)), summary.flags


def test_blocks_that_do_not_come_back_are_found(monkeypatch):
    monkeypatch.setattr(load, "settled", partial(settled, patience=0.1))
    point, _ = against(Behaviour(**QUICK, fault="leak", fault_every=7), asks(7), schedule.closed(2, 7))
    summary = summarize(point, NOTHING)
    assert summary.succeeded == 7 and summary.blocks_back is False and any("idle" in flag for flag in flags(summary))


# ---- Little's law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when", [schedule.closed(6, 60), schedule.poisson(50, 60, seed=1), schedule.bursts(20, 0.4, 60)], ids=str
)
def test_littles_law_holds_and_a_request_that_nobody_wrote_down_breaks_it(fast, monkeypatch, when):
    """L is counted while the load runs, lambda and W come from the records: they agree whatever the load. A process that gets its
    turns late looks at the wrong moments, hence several tries, as for the latencies."""
    monkeypatch.setattr(load, "SAMPLING", 0.005)  # so that a second of load has enough samples
    ratios = []
    for _ in range(TRIES):
        point = measure(fast, asks(60, 9), when)
        law = summarize(point, NOTHING).little
        assert law is not None
        ratios.append(law.ratio)
        if abs(law.ratio - 1) <= metrics.MOST_OFF:
            break
    else:
        pytest.fail(f"Little's law is off, {TRIES} times in a row: {ratios}")
    lost = summarize(replace(point, records=point.records[::2]), NOTHING)
    assert lost.little is not None and lost.little.ratio > 1.5 and any("Little" in flag for flag in flags(lost))


# ---- pitfalls -----------------------------------------------------------------------------------------------------


def test_pitfall_users_who_never_meet():
    """Catches a load that never makes a batch, because the pool of connections is too small or the users take turns: the server
    is "batched", and what is measured is one request at a time. Against a baseline that does answer one at a time the users are
    there as well, and wait: what makes the ratio between the two is batching, and nothing else."""
    _, batched = against(Behaviour(ttft=1, itl=0), asks(24), schedule.closed(24, 24))
    assert (batched.most_running, batched.most_waiting) == (24, 0)
    _, alone = against(Behaviour(**QUICK, slots=1), asks(24), schedule.closed(24, 24))
    assert alone.most_running == 1 and alone.most_waiting > 1


def test_pitfall_answers_that_are_all_of_one_length():
    """Catches a comparison of batching where all rows end together, so that coming and going has nothing to gain: there must be a
    workload whose answers differ, they must come out as long as they were asked for, and the fixed ones must be as fixed as they
    say."""
    for name, lengths in {"mixed": range(15, 41), "short": range(1, 2)}.items():
        what = make(name, 40, seed=0)
        point, server = against(Behaviour(ttft=0, itl=0, chunk_tokens=8), what, schedule.closed(8, 40))
        wanted = [ask.max_tokens for ask in what]
        assert [record.completion_tokens for record in point.records] == wanted and len(set(wanted)) in lengths
        assert sorted(body["max_tokens"] for body in server.bodies) == sorted(wanted)


def test_pitfall_a_closed_loop_waits_with_the_server():
    """Coordinated omission. While the server is frozen a closed loop asks nothing, so one slow answer stands for all that would
    have come; an open loop goes on asking, and sees what its users would. Same server, same answers, same number of them."""
    behaviour = Behaviour(ttft=0.01, itl=0, stall=0.5, stall_every=0.7)

    def held_back(when: Schedule) -> list[Record]:
        """The requests that were surely sent into the first freeze, and before 0.3 s of it had passed."""
        point, _ = against(behaviour, asks(100, 1), when)
        first = point.records[0]
        assert first.sent is not None
        # The freezes count from when the server saw the first request: after it was sent, and before it was answered.
        earliest, latest = first.sent + 0.7, first.chunks[0] + 0.7
        found = [record for record in point.records if record.sent is not None and latest <= record.sent <= earliest + 0.3]
        assert all(record.chunks[0] >= earliest + 0.5 for record in found), "the mock was to be frozen"
        return found

    assert len(held_back(schedule.closed(1, 100))) <= 1
    for _ in range(TRIES):  # a machine that is busy may be so late that it sends nothing in this third of a second
        if len(held := held_back(schedule.poisson(100, 100, seed=2))) >= 10:
            break
    assert len(held) >= 10
    assert all((value := metrics.ttft_intended(record)) is not None and value >= 0.1 for record in held)


def test_pitfall_an_open_loop_that_waits_for_answers():
    """Catches a pool, a semaphore or an await that keeps a request back until another has ended: all 60 are sent within 0.2 s,
    before the first is answered."""
    point, server = against(Behaviour(ttft=1.5, itl=0), asks(60, 1), schedule.poisson(300, 60, seed=0))
    assert server.most_running == 60
    assert not summarize(point, NOTHING).failures


def test_pitfall_latencies_from_the_late_send():
    """Catches the generator that is late itself: it stops for 0.4 s, and the requests that were due meanwhile look fast from
    their sending. What their users waited is counted from when they were to start, and the client's part is told apart."""

    async def hiccup(server: Mock) -> None:
        while server.requests < 20:
            await asyncio.sleep(0.001)
        time.sleep(0.4)

    when = schedule.poisson(100, 100, seed=4)
    point, _ = against(Behaviour(ttft=0.002, itl=0), asks(100, 1), when, hiccup)
    late = [record for record in point.records if record.sent is not None and record.sent - record.intended >= 0.2]
    assert late, "whoever was due in the first half of the stop was sent at least half of it late"
    for record in late:
        queue, from_sending, from_intended = (of(record) for of in (metrics.client_queue, metrics.ttft, metrics.ttft_intended))
        assert queue is not None and from_sending is not None and from_intended is not None
        assert from_intended == pytest.approx(queue + from_sending) and from_intended >= 0.2
    assert [record.intended for record in point.records] == when.starts, "the schedule is not put off"
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
    point, _ = against(Behaviour(**QUICK, fault="wrong_count", fault_every=2), asks(20), schedule.closed(4, 20))
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
    wanted = {"ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert all(body.items() >= wanted.items() for body in server.bodies)
