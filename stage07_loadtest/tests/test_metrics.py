"""The formulas, on records small enough to be worked out by hand, and the summary of a point."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pytest import approx

from stage07_loadtest import metrics
from stage07_loadtest.metrics import Slo, percentile, summarize

from .helpers import broken, counters, point, record, refused

MANY = [record(i, intended=0.7 * i) for i in range(100)]


def test_latencies_count_from_sending_and_from_the_intended_start():
    one = record(intended=1.0, sent=1.25, gaps=(0.5, 0.1, 0.3), end=9.0)  # the connection stays
    of = (metrics.ttft, metrics.ttft_intended, metrics.e2e, metrics.e2e_intended)
    assert [each(one) for each in of] == approx([0.5, 0.75, 0.9, 1.15])
    assert (metrics.client_queue(one), metrics.tpot(one)) == (approx(0.25), approx(0.2))
    assert metrics.itl(one) == approx([0.1, 0.3])
    # Tokens that share a chunk, and what was not received.
    bundled = record(gaps=(0.5, 0.4), chunk_tokens=[1, 4], completion_tokens=5)
    assert metrics.tpot(bundled) == approx(0.1) and metrics.itl(bundled) == approx([0.4])
    single = record(gaps=(0.5,))
    assert metrics.tpot(single) is None and metrics.itl(single) == []
    assert metrics.ttft(single) == metrics.e2e(single)
    assert [of(refused()) for of in metrics.PER_REQUEST.values()] == [None] * 5
    assert metrics.client_queue(replace(refused(), sent=None)) is None


def test_a_percentile_is_the_nearest_rank():
    for percent, value in ((0, 1), (20, 1), (21, 2), (50, 3), (80, 4), (90, 5), (100, 5)):
        assert percentile([5.0, 3.0, 1.0, 2.0, 4.0], percent) == value
    assert percentile(range(1, 101), 7) == 7  # in floating point 0.07 * 100 is more than 7
    assert [percentile([1.0, math.inf], percent) for percent in (50, 51)] == [1.0, math.inf]
    for values, percent in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError):
            percentile(values, percent)


def test_the_99th_percentile_needs_a_thousand_samples():
    few = metrics.distribution([float(i) for i in range(999)], 0)
    enough = metrics.distribution([float(i) for i in range(1000)], 0)
    assert few and few.adjusted and enough
    assert few.percentiles["p99"] is few.adjusted["p99"] is None
    assert enough.percentiles == {"p50": 499.0, "p90": 899.0, "p95": 949.0, "p99": 989.0}
    assert enough.samples == 1000


def test_a_failure_is_an_answer_that_never_came():
    answers = [record(i, gaps=(0.1 * (i + 1), 0.1)) for i in range(19)]
    good = metrics.latencies([*answers, refused()])["ttft"]
    worse = metrics.latencies([*answers[:18], refused(), broken()])["ttft"]
    assert good.samples == 19 and good.percentiles["p95"] == approx(1.9)
    assert good.adjusted is not None and worse.adjusted is not None
    assert (good.adjusted["p90"], good.adjusted["p95"]) == (approx(1.8), approx(1.9))
    assert worse.adjusted["p95"] == math.inf and worse.percentiles["p95"] == approx(1.8)
    # Infinite among requests, and absent among gaps.
    by_name = metrics.latencies([record(), broken()])
    gaps = {by_name.pop(name).samples for name in ("itl", "client_queue")}
    assert gaps == {2}  # two gaps of the success; two requests that were sent
    assert set(by_name) == {*metrics.PER_REQUEST}
    for values in by_name.values():
        assert values.samples == 1 and values.adjusted
        assert values.adjusted["p50"] != math.inf and values.adjusted["p90"] == math.inf


def test_goodput_counts_what_meets_every_limit_from_the_intended_start():
    records = [record(), record(gaps=(2.0, 0.1, 0.1)), record(gaps=(0.5, 0.5, 0.5)), refused()]
    limits = (Slo(), Slo(ttft=1.0), Slo(ttft=1.0, tpot=0.2), Slo(e2e=0.1))
    assert [metrics.goodput(records, slo, 2.0) for slo in limits] == [1.5, 1.0, 0.5, 0.0]
    exact = record(gaps=(0.5, 0.25, 0.25))
    assert metrics.meets(exact, Slo(ttft=0.5, tpot=0.25, e2e=1.0)), "a limit may be reached"
    late = record(intended=0.0, sent=1.0)  # fast from sending, but its user waited 1.5 s
    assert not metrics.meets(late, Slo(ttft=1.0)) and metrics.meets(late, Slo(ttft=1.6))
    assert not metrics.meets(late, Slo(e2e=1.0)) and metrics.meets(late, Slo(tpot=0.11))
    assert metrics.meets(record(gaps=(0.5,)), Slo(tpot=0.001)), "a single token has no TPOT"
    assert str(limits[2]) == "TTFT 1,000 ms, TPOT 200 ms" and str(Slo()) == "no limits"


def sampled(records, seconds, count):
    times = [(number + 0.5) * seconds / count for number in range(count)]
    spans = [(record.sent or 0.0, record.end) for record in records]
    return [(at, sum(sent <= at < end for sent, end in spans)) for at in times]


def test_littles_law_holds_for_a_load_that_is_not_steady():
    """Requests pile up: the tenth arrives after 0.9 s, and each takes longer than the last."""
    records = [record(i, intended=0.1 * i, gaps=(0.2 * i + 0.1, 0.1)) for i in range(10)]
    seconds = max(one.end for one in records)
    law = metrics.little(records, sampled(records, seconds, 1000), seconds)
    assert law and law.arrivals == approx(10 / seconds) and law.stay == approx(1.1)
    assert law.ratio == approx(1.0, abs=0.01)
    unsent = replace(refused(), sent=None)
    assert metrics.little([*records, unsent], sampled(records, seconds, 1000), seconds) == law


def test_samples_that_came_late_weigh_no_more_than_their_time():
    """Two requests in flight for 1 s, then one for 1 s; no sample but at both ends of the first."""
    records = [record(0, gaps=(1.0,)), record(1, gaps=(2.0,))]
    in_flight = [(0.0, 2), *[(0.999, 2)] * 100, *[(1.0 + 0.01 * i, 1) for i in range(100)]]
    law = metrics.little(records, in_flight, 2.0)
    assert law is not None and law.in_flight == approx(1.5) and law.ratio == approx(1.0)
    later = metrics.little(records, in_flight[1:], 2.0)  # averaged over the time of the samples
    assert later is not None and later.in_flight == approx(1.0, abs=0.01)


def test_littles_law_is_not_judged_by_few_samples():
    records = [record(i, intended=float(i)) for i in range(20)]
    few = [(20.0, 99), (20.0, 110), (2.0, 99)]  # 110 in 20 s: under four a stay
    for seconds, samples in (*few, (20.0, 120)):
        law = metrics.little(records, sampled(records, seconds, samples), seconds)
        assert (law is None) == ((seconds, samples) in few)
    assert metrics.little([], [(0.0, 0)] * 200, 20.0) is None


def test_a_summary_of_answers_and_failures():
    records = [record(0), refused(1, 0.7), record(2, 0.71), broken(3, 1.41)]
    seconds = records[-1].end
    # A rejected request explains no other number of tokens; one that broke off may have had more.
    assert [metrics.tokens_match(records[:3], count) for count in (6, 7)] == [True, False]
    assert [metrics.tokens_match(records, count) for count in (8, 9)] == [True, None]
    found = summarize(point(records, server=counters(8)), Slo(ttft=1.0))
    assert (found.requests, found.succeeded, found.success_rate) == (4, 2, 0.5)
    assert found.failures == {"http_503": 1, "reset": 1} and found.received_tokens == 8
    assert (found.request_rate, found.goodput) == (approx(2 / seconds), approx(2 / seconds))
    assert found.output_rate == approx(6 / seconds) and found.blocks_back is True
    assert (found.at("ttft", 50), found.at("ttft", 95, adjusted=True)) == (approx(0.5), math.inf)
    nothing = summarize(point([refused(0), refused(1)], users=None), Slo())
    assert nothing.at("ttft", 50) is None and nothing.at("ttft", 50, adjusted=True) == math.inf


def late(seconds, wait):
    """Requests that the client sends this late, and whose first token takes `wait` seconds."""
    return [record(i, i - seconds, sent=float(i), gaps=(wait, 0.1)) for i in range(100)]


@pytest.mark.parametrize(
    ("flag", "records", "more"),
    [
        ("", MANY, {"server": counters(300), "client_cpu": 0.69}),
        ("", MANY, {"in_flight": sampled(MANY, MANY[-1].end, 1000)}),
        ("", late(0.02, 0.5), {}),  # under 5 % of the median TTFT
        ("client took 83% of a core", MANY, {"client_cpu": 0.83}),
        ("tokens differ: server 299, client 300", MANY, {"server": counters(299)}),
        ("server not idle afterwards", MANY, {"server": counters(300, usage=0.01)}),
        ("interrupted", MANY, {"interrupted": True}),
        ("Little's law off by 100%", MANY, {"in_flight": [(0.07 * i, 2) for i in range(1000)]}),
        ("client sent 100 ms late (p95)", late(0.1, 0.5), {}),
        ("short: 20 requests in 14 s", MANY[:20], {}),
    ],
)
def test_every_reason_for_distrust_is_named(flag, records, more):
    found = summarize(point(records, **more), Slo())
    assert found.flags == [flag] * bool(flag) and (found.little is None) != ("in_flight" in more)
