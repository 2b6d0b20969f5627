"""The summary of a point: its rates and percentiles, and the reasons not to trust it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from stage07_loadtest import metrics
from stage07_loadtest.metrics import Slo, Summary, summarize
from stage07_loadtest.tests.helpers import broken, counters, point, record, refused
from stage07_loadtest.tests.test_metrics import sampled

NO_LIMITS = Slo()
MANY = [record(i, intended=0.7 * i) for i in range(100)]


def test_a_summary_of_answers_and_failures() -> None:
    records = [record(0), refused(1, 0.7), record(2, 0.71), broken(3, 1.41)]
    seconds = records[-1].end
    found = summarize(point(records, server=counters(8)), Slo(ttft=1.0))
    assert (found.requests, found.succeeded, found.success_rate) == (4, 2, 0.5)
    assert found.failures == {"http_503": 1, "reset": 1}
    assert (found.prompt_tokens, found.completion_tokens, found.received_tokens) == (16, 6, 8)
    assert (found.request_rate, found.goodput) == (approx(2 / seconds), approx(2 / seconds))
    assert (found.output_rate, found.total_rate) == (approx(6 / seconds), approx(22 / seconds))
    assert found.tokens_match is True and found.blocks_back is True
    assert (found.at("ttft", 50), found.at("ttft", 95, adjusted=True)) == (approx(0.5), math.inf)
    assert found.at("itl", 50, adjusted=True) is None and found.at("ttft", 99) is None
    assert (found.load, found.users, found.rate) == ("1 user", 1, None)


def test_where_nothing_succeeded_every_adjusted_percentile_is_infinite() -> None:
    found = summarize(point([refused(0), refused(1)], users=None), NO_LIMITS)
    assert (found.succeeded, found.output_rate, found.load) == (0, 0, "poisson, 2/s")
    assert "ttft" not in found.latency and found.at("ttft", 50) is None
    assert found.at("ttft", 50, adjusted=True) == math.inf
    assert found.at("itl", 50, adjusted=True) is None
    with pytest.raises(ValueError, match="without requests"):
        summarize(replace(point([record()]), records=[]), NO_LIMITS)


def test_a_point_that_can_be_trusted_has_no_flags() -> None:
    in_flight = sampled(MANY, MANY[-1].end, 1000)
    sure = summarize(point(MANY, server=counters(300), in_flight=in_flight, client_cpu=0.69), Slo())
    assert sure.flags == [] and sure.little is not None
    assert sure.little.ratio == approx(1.0, abs=0.01)
    unknown = summarize(point(MANY), NO_LIMITS)
    assert (unknown.little, unknown.server_tokens) == (None, None)
    assert (unknown.tokens_match, unknown.blocks_back, unknown.flags) == (None, None, [])
    failing = [*MANY[:60], *(refused(i, 0.7 * i) for i in range(60, 100))]
    assert summarize(point(failing, server=counters(180)), NO_LIMITS).flags == []


@pytest.mark.parametrize(
    ("flag", "records", "more"),
    [
        ("client took 83% of a core", MANY, {"client_cpu": 0.83}),
        ("tokens differ: server 299, client 300", MANY, {"server": counters(299)}),
        ("server not idle afterwards", MANY, {"server": counters(300, running=1)}),
        ("server not idle afterwards", MANY, {"server": counters(300, usage=0.01)}),
        ("interrupted", MANY, {"interrupted": True}),
        ("Little's law off by 100%", MANY, {"in_flight": [(0.07 * i, 2) for i in range(1000)]}),
        (
            "client sent 100 ms late (p95)",
            [replace(one, intended=one.intended - 0.1) for one in MANY],
            {},
        ),
        ("short: 20 requests in 14 s", MANY[:20], {}),
    ],
)
def test_every_reason_for_distrust_is_named(flag: str, records: Any, more: Any) -> None:
    assert summarize(point(records, **more), NO_LIMITS).flags == [flag]


@pytest.mark.parametrize(("late", "wait"), [(0.004, 0.05), (0.02, 0.5)])
def test_sending_a_little_late_is_no_reason_for_distrust(late: float, wait: float) -> None:
    """Under 5 ms, or under 5 % of the median TTFT."""
    records = [record(i, i - late, sent=float(i), gaps=(wait, 0.1)) for i in range(100)]
    assert summarize(point(records), NO_LIMITS).flags == []


def test_the_knee_is_where_throughput_over_latency_is_greatest() -> None:
    def at(rate: float, wait: float) -> Summary:
        records = [record(i, i / rate, gaps=(wait, 0.0)) for i in range(50)]
        return summarize(point(records, users=None, duration=50 / rate), NO_LIMITS)

    points = [at(1.0, 0.7), at(2.0, 0.8), at(2.2, 4.0)]
    assert metrics.knee(points) is points[1]
    assert metrics.knee([]) is None
    assert metrics.knee([summarize(point([refused()], users=None), NO_LIMITS)]) is None


def test_the_report_shows_the_glossary() -> None:
    report = Path(metrics.__file__).with_name("REPORT.md").read_text(encoding="utf-8")
    assert metrics.GLOSSARY in report
    assert len({line.count("|") for line in metrics.GLOSSARY.splitlines()}) == 1
