"""The formulas, on event logs small enough to be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage07_loadtest import metrics
from stage07_loadtest.client import HTTP_503, RESET, Record
from stage07_loadtest.load import Point, ServerDelta
from stage07_loadtest.metrics import Slo, percentile, summarize
from stage07_loadtest.schedule import Schedule

NO_LIMITS = Slo()


def record(
    index: int = 0,
    intended: float = 0.0,
    sent: float | None = None,
    gaps: tuple[float, ...] = (0.5, 0.1, 0.1),
    **more: Any,
) -> Record:
    """A request that succeeded: chunks of one token, `gaps` seconds after each other, the first that long after sending."""
    sent = intended if sent is None else sent
    chunks = [sent + sum(gaps[: count + 1]) for count in range(len(gaps))]
    found = Record(
        index, intended, len(gaps), sent=sent, status=200, chunks=chunks, chunk_tokens=[1] * len(gaps), end=chunks[-1],
        prompt_tokens=8, completion_tokens=len(gaps), finish_reason="length", done=True,
    )  # fmt: skip
    return replace(found, **more)


def refused(index: int = 0, intended: float = 0.0) -> Record:
    """A request that the server had no room for."""
    return Record(
        index,
        intended,
        3,
        sent=intended,
        status=503,
        end=intended + 0.01,
        failure=HTTP_503,
        detail="no room",
    )


def broken(index: int = 0, intended: float = 0.0) -> Record:
    """One whose connection was lost after two tokens."""
    good = record(index, intended)
    return replace(
        good,
        chunks=good.chunks[:2],
        chunk_tokens=[1, 1],
        completion_tokens=None,
        finish_reason=None,
        done=False,
        failure=RESET,
    )


def point(records: list[Record], users: int | None = 1, **more: Any) -> Point:
    """A point as long as its records, on a client with nothing to do."""
    schedule = (
        Schedule("closed", users, None)
        if users
        else Schedule("poisson", None, [each.intended for each in records], 2.0)
    )
    duration = max(each.end for each in records)
    found = Point(
        "short",
        schedule,
        records,
        started_unix=0.0,
        duration=duration,
        client_cpu=0.1,
        server=None,
        in_flight=[],
    )
    return replace(found, **more)


def counters(generation_tokens: int, running: int = 0, usage: float = 0.0) -> ServerDelta:
    return ServerDelta(0, generation_tokens, 0, running, 0, usage)


# ---- one request


def test_latencies_count_from_sending_and_from_the_intended_start() -> None:
    one = record(intended=1.0, sent=1.25, gaps=(0.5, 0.1, 0.3))
    assert metrics.ttft(one) == pytest.approx(0.5)
    assert metrics.ttft_intended(one) == pytest.approx(0.75)
    assert metrics.e2e(one) == pytest.approx(0.9)
    assert metrics.e2e_intended(one) == pytest.approx(1.15)
    assert metrics.client_queue(one) == pytest.approx(0.25)
    assert metrics.itl(one) == pytest.approx([0.1, 0.3])
    assert metrics.tpot(one) == pytest.approx(0.2)


def test_e2e_ends_with_the_last_chunk_and_not_with_the_connection() -> None:
    assert metrics.e2e(record(end=9.0)) == pytest.approx(0.7)


def test_tokens_that_share_a_chunk_change_tpot_and_not_itl() -> None:
    bundled = record(gaps=(0.5, 0.4), chunk_tokens=[1, 4], completion_tokens=5)
    assert metrics.tpot(bundled) == pytest.approx(0.1)
    assert metrics.itl(bundled) == pytest.approx([0.4])


def test_a_single_token_has_no_time_per_token_after_the_first() -> None:
    one = record(gaps=(0.5,))
    assert metrics.tpot(one) is None and metrics.itl(one) == []
    assert metrics.ttft(one) == metrics.e2e(one)


def test_what_never_came_has_no_latency() -> None:
    lost = refused()
    assert [of(lost) for of in metrics.PER_REQUEST.values()] == [None] * 5
    unsent = replace(lost, sent=None)
    assert metrics.client_queue(unsent) is None


# ---- percentiles


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (20, 1), (21, 2), (50, 3), (80, 4), (90, 5), (100, 5)]
)
def test_a_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile([5.0, 3.0, 1.0, 2.0, 4.0], percent) == value


def test_a_percentile_may_be_infinite_and_is_never_between_two() -> None:
    assert percentile([1.0, math.inf], 50) == 1.0
    assert percentile([1.0, math.inf], 51) == math.inf
    for values, percent in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, percent)


def test_the_99th_percentile_needs_a_thousand_samples() -> None:
    few, enough = (
        metrics.distribution([float(i) for i in range(count)], 0, drawn=True)
        for count in (999, 1000)
    )
    assert few is not None and enough is not None
    assert (
        few.percentiles["p99"] is None and few.adjusted is not None and few.adjusted["p99"] is None
    )
    assert enough.percentiles == {"p50": 499.0, "p90": 899.0, "p95": 949.0, "p99": 989.0}
    assert (enough.samples, enough.mean, enough.max) == (1000, 499.5, 999.0)
    assert (
        len(enough.curve) == len(metrics.CURVE)
        and enough.curve[0] == 0.0
        and enough.curve[-1] == 999.0
    )


def test_a_failure_is_an_answer_that_never_came() -> None:
    # 19 answers and one refusal: the 95th percentile is still an answer; of 18 and two it is none.
    answers = [record(i, gaps=(0.1 * (i + 1), 0.1)) for i in range(19)]
    found = metrics.latencies([*answers, refused()])["ttft"]
    assert found.samples == 19 and found.percentiles["p95"] == pytest.approx(1.9)
    assert found.adjusted is not None
    assert found.adjusted["p90"] == pytest.approx(1.8) and found.adjusted["p95"] == pytest.approx(
        1.9
    )
    worse = metrics.latencies([*answers[:18], refused(), broken()])
    assert worse["ttft"].adjusted is not None and worse["ttft"].adjusted["p95"] == math.inf
    assert worse["ttft"].percentiles["p95"] == pytest.approx(1.8)


def test_a_failure_is_infinite_among_requests_and_absent_among_gaps() -> None:
    found = metrics.latencies([record(), broken()])
    assert set(found) == {*metrics.PER_REQUEST, "itl", "client_queue"}
    for name in metrics.PER_REQUEST:
        assert found[name].samples == 1
        adjusted = found[name].adjusted
        assert adjusted is not None and adjusted["p50"] != math.inf and adjusted["p90"] == math.inf
    assert (
        found["itl"].samples == 2 and found["itl"].adjusted is None
    )  # the gaps of the broken answer are not among them
    assert found["client_queue"].samples == 2 and found["client_queue"].adjusted is None


# ---- goodput


def test_goodput_counts_what_keeps_every_limit() -> None:
    fast, slow_first, slow_rest = (
        record(),
        record(gaps=(2.0, 0.1, 0.1)),
        record(gaps=(0.5, 0.5, 0.5)),
    )
    every = [fast, slow_first, slow_rest, refused()]
    assert metrics.goodput(every, Slo(), 2.0) == 1.5
    assert metrics.goodput(every, Slo(ttft=1.0), 2.0) == 1.0
    assert metrics.goodput(every, Slo(ttft=1.0, tpot=0.2), 2.0) == 0.5
    assert metrics.goodput(every, Slo(e2e=0.1), 2.0) == 0.0


def test_limits_count_from_the_intended_start() -> None:
    late = record(intended=0.0, sent=1.0)  # fast from sending, but its user waited 1.5 s
    assert not metrics.meets(late, Slo(ttft=1.0)) and metrics.meets(late, Slo(ttft=1.6))
    assert not metrics.meets(late, Slo(e2e=1.0)) and metrics.meets(late, Slo(tpot=0.11))


def test_a_single_token_keeps_any_limit_per_token() -> None:
    assert metrics.meets(record(gaps=(0.5,)), Slo(tpot=0.001))


def test_limits_in_words() -> None:
    assert str(Slo(ttft=1.0, tpot=0.2)) == "TTFT 1,000 ms, TPOT 200 ms"
    assert str(Slo()) == "no limits"


# ---- Little's law


def sampled(records: list[Record], seconds: float, count: int) -> list[tuple[float, int]]:
    times = [(number + 0.5) * seconds / count for number in range(count)]
    return [
        (at, sum(each.sent is not None and each.sent <= at < each.end for each in records))
        for at in times
    ]


def test_littles_law_holds_for_a_load_that_is_not_steady() -> None:
    # Requests pile up: the tenth arrives after 0.9 s, and each takes longer than the one before.
    records = [record(i, intended=0.1 * i, gaps=(0.2 * i + 0.1, 0.1)) for i in range(10)]
    seconds = max(each.end for each in records)
    found = metrics.little(records, sampled(records, seconds, 1000), seconds)
    assert found is not None
    assert found.arrivals == pytest.approx(10 / seconds) and found.stay == pytest.approx(1.1)
    assert found.ratio == pytest.approx(1.0, abs=0.01)


def test_littles_law_finds_requests_that_nobody_wrote_down() -> None:
    records = [record(i, intended=0.1 * i) for i in range(20)]
    seconds = max(each.end for each in records)
    in_flight = sampled(records, seconds, 1000)
    complete, lossy = (metrics.little(each, in_flight, seconds) for each in (records, records[:-2]))
    assert complete is not None and lossy is not None
    assert complete.ratio == pytest.approx(1.0, abs=0.01) and lossy.ratio == pytest.approx(
        20 / 18, abs=0.02
    )


def test_samples_that_came_late_weigh_no_more_than_their_time() -> None:
    # Two requests in flight for 1 s, then one for 1 s; in the first second nobody looked but at its start and at its end.
    records = [record(0, gaps=(1.0,)), record(1, gaps=(2.0,))]
    in_flight = [(0.0, 2), *[(0.999, 2)] * 100, *[(1.0 + 0.01 * i, 1) for i in range(100)]]
    found = metrics.little(records, in_flight, 2.0)
    assert (
        found is not None
        and found.in_flight == pytest.approx(1.5)
        and found.ratio == pytest.approx(1.0)
    )


def test_littles_law_is_not_judged_by_few_samples() -> None:
    records = [record(i, intended=float(i)) for i in range(20)]  # each stays 0.7 s
    seconds = 20.0
    assert metrics.little(records, sampled(records, seconds, 99), seconds) is None
    assert (
        metrics.little(records, sampled(records, seconds, 110), seconds) is None
    )  # 0.18 s apart: under four a stay
    assert metrics.little(records, sampled(records, seconds, 120), seconds) is not None
    assert metrics.little([], [(0.0, 0)] * 200, seconds) is None


# ---- the steady part


def test_the_steady_part_begins_when_all_users_have_sent_and_ends_with_the_last_request() -> None:
    # Two users, three rounds of 0.7 s in step: tokens come 0.5, 0.6 and 0.7 s after the start of each round.
    records = [record(i, intended=0.7 * (i // 2)) for i in range(6)]
    found = metrics.steady(records, users=2)
    assert found is not None
    assert (found.start, found.end) == (0.0, pytest.approx(1.4))
    assert found.output_rate == pytest.approx(12 / 1.4)  # two of the three rounds


def test_an_open_loop_is_steady_from_its_first_answer_on() -> None:
    records = [record(i, intended=0.3 * i) for i in range(5)]
    found = metrics.steady(records, users=None)
    assert found is not None and (found.start, found.end) == (
        pytest.approx(0.7),
        pytest.approx(1.2),
    )


def test_a_load_without_a_steady_part() -> None:
    assert metrics.steady([record(0), record(1)], users=2) is None
    assert (
        metrics.steady([record(0), record(1)], users=None) is None
    )  # both sent before the first had ended
    assert metrics.steady([], users=1) is None


# ---- tokens


def test_tokens_are_compared_exactly() -> None:
    records = [record(0), record(1), refused(2)]
    assert metrics.tokens_match(records, 6) is True
    assert (
        metrics.tokens_match(records, 7) is False
    )  # the third was not begun, so it explains nothing
    assert metrics.tokens_match([record(0), broken(1)], 5) is True
    assert (
        metrics.tokens_match([record(0), broken(1)], 6) is None
    )  # the server may have computed one that got lost


# ---- a point


def test_a_summary_of_answers_and_failures() -> None:
    records = [record(0), refused(1, 0.7), record(2, 0.71), broken(3, 1.41)]
    found = summarize(point(records, server=counters(8)), Slo(ttft=1.0))
    seconds = records[-1].end
    assert (found.requests, found.succeeded, found.success_rate) == (4, 2, 0.5)
    assert found.failures == {"http_503": 1, "reset": 1}
    assert (found.prompt_tokens, found.completion_tokens, found.received_tokens) == (16, 6, 8)
    assert found.request_rate == pytest.approx(2 / seconds) and found.goodput == pytest.approx(
        2 / seconds
    )
    assert found.output_rate == pytest.approx(6 / seconds) and found.total_rate == pytest.approx(
        22 / seconds
    )
    assert found.tokens_match is True and found.blocks_back is True
    assert (
        found.at("ttft", 50) == pytest.approx(0.5)
        and found.at("ttft", 95, adjusted=True) == math.inf
    )
    assert found.at("itl", 50, adjusted=True) is None and found.at("ttft", 99) is None
    assert (found.load, found.users, found.rate) == ("1 user", 1, None)


def test_where_nothing_succeeded_every_adjusted_percentile_is_infinite() -> None:
    found = summarize(point([refused(0), refused(1)], users=None), NO_LIMITS)
    assert found.succeeded == 0 and found.output_rate == 0
    assert "ttft" not in found.latency and found.at("ttft", 50) is None
    assert (
        found.at("ttft", 50, adjusted=True) == math.inf
        and found.at("itl", 50, adjusted=True) is None
    )
    assert found.load == "poisson, 2/s"


def test_a_point_without_requests_says_nothing() -> None:
    with pytest.raises(ValueError, match="without requests"):
        summarize(replace(point([record()]), records=[]), NO_LIMITS)


def flags(records: list[Record], **more: Any) -> list[str]:
    return summarize(point(records, **more), NO_LIMITS).flags


MANY = [record(i, intended=0.7 * i) for i in range(100)]


def test_a_point_that_can_be_trusted_has_no_flags() -> None:
    seconds = MANY[-1].end
    more: dict[str, Any] = {
        "server": counters(300),
        "in_flight": sampled(MANY, seconds, 1000),
        "client_cpu": 0.69,
    }
    found = summarize(point(MANY, **more), NO_LIMITS)
    assert (
        found.flags == []
        and found.little is not None
        and found.little.ratio == pytest.approx(1.0, abs=0.01)
    )


def test_each_reason_for_distrust_is_named() -> None:
    assert flags(MANY, client_cpu=0.83) == ["client took 83% of a core"]
    assert flags(MANY, server=counters(299)) == ["tokens differ: server 299, client 300"]
    assert flags(MANY, server=counters(300, running=1)) == ["server not idle afterwards"]
    assert flags(MANY, server=counters(300, usage=0.01)) == ["server not idle afterwards"]
    assert flags(MANY, interrupted=True) == ["interrupted"]
    assert flags(MANY, in_flight=[(0.7 * i / 10, 2) for i in range(1000)]) == [
        "Little's law off by 100%"
    ]
    assert flags([replace(each, intended=each.intended - 0.1) for each in MANY]) == [
        "client sent 100 ms late (p95)"
    ]
    assert flags(MANY[:20]) == ["short: 20 requests in 14 s"]


def test_failures_alone_are_no_reason_for_distrust() -> None:
    assert (
        flags([*MANY[:60], *(refused(i, 0.7 * i) for i in range(60, 100))], server=counters(180))
        == []
    )


def test_what_cannot_be_judged_is_no_reason_for_distrust() -> None:
    found = summarize(point(MANY), NO_LIMITS)
    assert (found.little, found.server_tokens, found.tokens_match, found.blocks_back) == (
        None,
        None,
        None,
        None,
    )
    assert found.flags == []


def test_the_knee_is_where_throughput_over_latency_is_greatest() -> None:
    # 1, 2 and 2.2 requests/s; latencies 0.7, 0.8 and 4 s.
    def at(rate: float, wait: float) -> metrics.Summary:
        return summarize(
            point(
                [record(i, i / rate, gaps=(wait, 0.0)) for i in range(50)],
                users=None,
                duration=50 / rate,
            ),
            NO_LIMITS,
        )

    points = [at(1.0, 0.7), at(2.0, 0.8), at(2.2, 4.0)]
    assert metrics.knee(points) is points[1]
    assert metrics.knee([]) is None
    assert metrics.knee([summarize(point([refused()], users=None), NO_LIMITS)]) is None


def test_the_report_shows_the_glossary() -> None:
    report = Path(metrics.__file__).with_name("REPORT.md").read_text(encoding="utf-8")
    assert metrics.GLOSSARY in report
    widths = {line.count("|") for line in metrics.GLOSSARY.splitlines()}
    assert len(widths) == 1
