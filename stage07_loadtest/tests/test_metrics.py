"""The formulas, on records small enough to be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pytest import approx

from stage07_loadtest import metrics
from stage07_loadtest.client import Record
from stage07_loadtest.metrics import Slo, percentile
from stage07_loadtest.tests.helpers import broken, record, refused

# ---- one request


def test_latencies_count_from_sending_and_from_the_intended_start() -> None:
    one = record(intended=1.0, sent=1.25, gaps=(0.5, 0.1, 0.3), end=9.0)  # the connection stays
    assert metrics.ttft(one) == approx(0.5)
    assert metrics.ttft_intended(one) == approx(0.75)
    assert metrics.e2e(one) == approx(0.9)
    assert metrics.e2e_intended(one) == approx(1.15)
    assert metrics.client_queue(one) == approx(0.25)
    assert metrics.itl(one) == approx([0.1, 0.3])
    assert metrics.tpot(one) == approx(0.2)


def test_tokens_that_share_a_chunk_change_tpot_and_not_itl() -> None:
    bundled = record(gaps=(0.5, 0.4), chunk_tokens=[1, 4], completion_tokens=5)
    assert metrics.tpot(bundled) == approx(0.1)
    assert metrics.itl(bundled) == approx([0.4])


def test_what_was_not_received_has_no_latency() -> None:
    single = record(gaps=(0.5,))
    assert metrics.tpot(single) is None and metrics.itl(single) == []
    assert metrics.ttft(single) == metrics.e2e(single)
    assert [of(refused()) for of in metrics.PER_REQUEST.values()] == [None] * 5
    assert metrics.client_queue(replace(refused(), sent=None)) is None


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
    few = metrics.distribution([float(i) for i in range(999)], 0)
    enough = metrics.distribution([float(i) for i in range(1000)], 0, drawn=True)
    assert few is not None and few.adjusted is not None and enough is not None
    assert few.percentiles["p99"] is None and few.adjusted["p99"] is None and few.curve == []
    assert enough.percentiles == {"p50": 499.0, "p90": 899.0, "p95": 949.0, "p99": 989.0}
    assert (enough.samples, enough.mean, enough.max) == (1000, 499.5, 999.0)
    assert len(enough.curve) == len(metrics.CURVE)
    assert (enough.curve[0], enough.curve[-1]) == (0.0, 999.0)


def test_a_failure_is_an_answer_that_never_came() -> None:
    """Of 19 answers and one rejection the 95th percentile is an answer; of 18 and two it is not."""
    answers = [record(i, gaps=(0.1 * (i + 1), 0.1)) for i in range(19)]
    good = metrics.latencies([*answers, refused()])["ttft"]
    worse = metrics.latencies([*answers[:18], refused(), broken()])["ttft"]
    assert good.samples == 19 and good.percentiles["p95"] == approx(1.9)
    assert good.adjusted is not None and worse.adjusted is not None
    assert (good.adjusted["p90"], good.adjusted["p95"]) == (approx(1.8), approx(1.9))
    assert worse.adjusted["p95"] == math.inf and worse.percentiles["p95"] == approx(1.8)


def test_a_failure_is_infinite_among_requests_and_absent_among_gaps() -> None:
    by_name = metrics.latencies([record(), broken()])
    assert set(by_name) == {*metrics.PER_REQUEST, "itl", "client_queue"}
    for name in metrics.PER_REQUEST:
        adjusted = by_name[name].adjusted
        assert by_name[name].samples == 1
        assert adjusted is not None and adjusted["p50"] != math.inf and adjusted["p90"] == math.inf
    for name in ("itl", "client_queue"):  # two gaps of the success; two requests that were sent
        assert by_name[name].samples == 2 and by_name[name].adjusted is None


# ---- goodput


def test_goodput_counts_what_meets_every_limit() -> None:
    records = [record(), record(gaps=(2.0, 0.1, 0.1)), record(gaps=(0.5, 0.5, 0.5)), refused()]
    assert metrics.goodput(records, Slo(), 2.0) == 1.5
    assert metrics.goodput(records, Slo(ttft=1.0), 2.0) == 1.0
    assert metrics.goodput(records, Slo(ttft=1.0, tpot=0.2), 2.0) == 0.5
    assert metrics.goodput(records, Slo(e2e=0.1), 2.0) == 0.0
    exact = record(gaps=(0.5, 0.25, 0.25))
    assert metrics.meets(exact, Slo(ttft=0.5, tpot=0.25, e2e=1.0)), "a limit may be reached"


def test_limits_count_from_the_intended_start() -> None:
    late = record(intended=0.0, sent=1.0)  # fast from sending, but its user waited 1.5 s
    assert not metrics.meets(late, Slo(ttft=1.0)) and metrics.meets(late, Slo(ttft=1.6))
    assert not metrics.meets(late, Slo(e2e=1.0)) and metrics.meets(late, Slo(tpot=0.11))
    assert metrics.meets(record(gaps=(0.5,)), Slo(tpot=0.001)), "a single token has no TPOT"
    assert str(Slo(ttft=1.0, tpot=0.2)) == "TTFT 1,000 ms, TPOT 200 ms"
    assert str(Slo()) == "no limits"


# ---- Little's law


def sampled(records: list[Record], seconds: float, count: int) -> list[tuple[float, int]]:
    times = [(number + 0.5) * seconds / count for number in range(count)]
    spans = [(record.sent or 0.0, record.end) for record in records]
    return [(at, sum(sent <= at < end for sent, end in spans)) for at in times]


def test_littles_law_holds_for_a_load_that_is_not_steady() -> None:
    """Requests pile up: the tenth arrives after 0.9 s, and each takes longer than the last."""
    records = [record(i, intended=0.1 * i, gaps=(0.2 * i + 0.1, 0.1)) for i in range(10)]
    seconds = max(one.end for one in records)
    law = metrics.little(records, sampled(records, seconds, 1000), seconds)
    assert law is not None
    assert law.arrivals == approx(10 / seconds) and law.stay == approx(1.1)
    assert law.ratio == approx(1.0, abs=0.01)


def test_littles_law_finds_requests_missing_from_the_records() -> None:
    records = [record(i, intended=0.1 * i) for i in range(20)]
    seconds = max(one.end for one in records)
    in_flight = sampled(records, seconds, 1000)
    complete, lossy = (metrics.little(some, in_flight, seconds) for some in (records, records[:-2]))
    assert complete is not None and complete.ratio == approx(1.0, abs=0.01)
    assert lossy is not None and lossy.ratio == approx(20 / 18, abs=0.02)


def test_samples_that_came_late_weigh_no_more_than_their_time() -> None:
    """Two requests in flight for 1 s, then one for 1 s; no sample but at both ends of the first."""
    records = [record(0, gaps=(1.0,)), record(1, gaps=(2.0,))]
    in_flight = [(0.0, 2), *[(0.999, 2)] * 100, *[(1.0 + 0.01 * i, 1) for i in range(100)]]
    law = metrics.little(records, in_flight, 2.0)
    assert law is not None and law.in_flight == approx(1.5) and law.ratio == approx(1.0)
    later = metrics.little(records, in_flight[1:], 2.0)  # averaged over the time of the samples
    assert later is not None and later.in_flight == approx(1.0, abs=0.01)


@pytest.mark.parametrize(("samples", "judged"), [(99, False), (110, False), (120, True)])
def test_littles_law_is_not_judged_by_few_samples(samples: int, judged: bool) -> None:
    """110 samples in 20 s are 0.18 s apart: under four per stay of 0.7 s."""
    records = [record(i, intended=float(i)) for i in range(20)]
    law = metrics.little(records, sampled(records, 20.0, samples), 20.0)
    assert (law is not None) == judged
    assert metrics.little(records, sampled(records, 2.0, 99), 2.0) is None, "under a hundred"
    assert metrics.little([], [(0.0, 0)] * 200, 20.0) is None


# ---- the steady part


def test_the_steady_part_begins_when_all_users_have_sent_and_ends_with_the_last_request() -> None:
    """Two users, 0.7 s per round: tokens come 0.5, 0.6 and 0.7 s after the start of a round."""
    found = metrics.steady([record(i, intended=0.7 * (i // 2)) for i in range(6)], users=2)
    assert found is not None and (found.start, found.end) == (0.0, approx(1.4))
    assert found.output_rate == approx(12 / 1.4)  # two of the three rounds
    staggered = metrics.steady([record(i, intended=0.2 * i) for i in range(6)], users=3)
    assert staggered is not None and staggered.start == approx(0.4)
    opened = metrics.steady([record(i, intended=0.3 * i) for i in range(5)], users=None)
    assert opened is not None and (opened.start, opened.end) == (approx(0.7), approx(1.2))


@pytest.mark.parametrize(("count", "users"), [(2, 2), (2, None), (0, 1)])
def test_a_load_without_a_steady_part(count: int, users: int | None) -> None:
    assert metrics.steady([record(i) for i in range(count)], users) is None


# ---- tokens


def test_tokens_are_compared_exactly() -> None:
    """A rejected request explains no difference; one that broke off may have computed more."""
    for records, matches in (
        ([record(0), record(1), refused(2)], {6: True, 7: False}),
        ([record(0), broken(1)], {5: True, 6: None}),
    ):
        assert {count: metrics.tokens_match(records, count) for count in matches} == matches
