"""Charts of a small stored run, and of servers made up here: what they show, that all can be read, and the same bytes again."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from shared.charts import render
from shared.paths import ROOT
from stage07_loadtest import charts, results
from stage07_loadtest.load import Point
from stage07_loadtest.metrics import (
    DRAWN,
    E2E_INTENDED,
    ITL,
    TPOT,
    TTFT_INTENDED,
    Slo,
    Summary,
    summarize,
)
from stage07_loadtest.schedule import Schedule

from .test_metrics import point, record, refused

SMALL_RUN = Path(__file__).with_name("small_run")
SLO = Slo(ttft=1.0)
STEMS = {
    "throughput", "ttft_intended_users", "tpot_users", "offered_load", "goodput", "ttft_intended_distribution",
    "itl_distribution",
}  # fmt: skip


def stored(made: Point) -> Summary:
    """What is read again of what was written."""
    return results.from_json(results.to_json(summarize(made, SLO)))


def closed(users: int, gap: float, failures: int = 0, count: int = 20) -> Summary:
    """Users whose tokens come `gap` seconds after each other."""
    good = [record(i, gap * i, gaps=(gap, gap, gap)) for i in range(count - failures)]
    return stored(point([*good, *(refused(count + i) for i in range(failures))], users=users))


def opened(rate: float, wait: float, failures: int = 0, count: int = 20) -> Summary:
    good = [record(i, i / rate, gaps=(wait, 0.1, 0.1)) for i in range(count - failures)]
    made = point([*good, *(refused(count + i, count / rate) for i in range(failures))], users=None)
    return stored(replace(made, schedule=replace(made.schedule, rate=rate)))


SERVERS = {
    "sequential": [closed(users, 0.1 * users) for users in (1, 2, 4)],
    "paged": [
        closed(users, 0.1, failures) for users, failures in ((1, 0), (2, 0), (4, 3), (8, 12))
    ],
}
OPEN = {
    "sequential": [opened(rate, wait) for rate, wait in ((0.5, 0.1), (1.0, 0.3), (1.5, 3.0))],
    "paged": [opened(rate, wait) for rate, wait in ((2.0, 0.1), (4.0, 0.2), (6.0, 2.0))],
}


def words(figure: Figure) -> list[str]:
    return [
        text.get_text()
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible()
    ]


def drawn(figure: Figure) -> list[tuple[list[float], list[float], Any]]:
    """Every line of the chart: its places, its values, and the colour that fills its marks."""
    lines: list[Any] = list(figure.axes[0].get_lines())
    return [
        (
            [*map(float, line.get_xdata())],
            [*map(float, line.get_ydata())],
            line.get_markerfacecolor(),
        )
        for line in lines
    ]


def series(figure: Figure) -> list[tuple[list[float], list[float]]]:
    """The lines, without single marks."""
    return [(places, values) for places, values, _ in drawn(figure) if len(places) > 1]


def marked(figure: Figure, fill: str) -> list[float]:
    """Places of single marks: hollow ones are filled with white, rings with none."""
    return sorted(
        {places[0] for places, _, face in drawn(figure) if len(places) == 1 and face == fill}
    )


# ---- a stored run


def test_a_stored_run_is_drawn_whole_and_the_same_again(tmp_path: Path) -> None:
    paths = charts.draw(results.load(SMALL_RUN).points, tmp_path)
    assert {path.stem for path in paths} == STEMS and sorted(paths) == sorted(tmp_path.iterdir())
    for path in paths:
        ElementTree.fromstring(path.read_bytes())
        assert path.stat().st_size < 150_000
    again = charts.figures(results.load(SMALL_RUN).points)
    for stem in ("offered_load", "itl_distribution"):  # all of them in the next test
        assert (tmp_path / f"{stem}.svg").read_bytes() == render(again[stem]())


@pytest.mark.slow  # a short form is in test_main.py: a process whose charts are drawn again
def test_the_same_run_has_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from stage07_loadtest import charts, results;"
        f"charts.draw(results.load(Path({str(SMALL_RUN)!r})).points, Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}  # the order of a set must not show
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120, env=environment
    )
    for stem, figure in charts.figures(results.load(SMALL_RUN).points).items():
        assert (tmp_path / f"{stem}.svg").read_bytes() == render(figure())


def every_figure() -> dict[str, Figure]:
    return {
        stem: figure() for stem, figure in charts.figures(results.load(SMALL_RUN).points).items()
    } | {
        "throughput of two": charts.throughput(SERVERS),
        "latency of two": charts.latency(SERVERS, TTFT_INTENDED),
        "offered to two": charts.offered(OPEN),
        "goodput of two": charts.goodput(OPEN),
        "distribution of two": charts.distribution(
            {name: points[0] for name, points in SERVERS.items()}, TTFT_INTENDED
        ),
    }


def test_no_text_is_small_or_on_top_of_another() -> None:
    for name, figure in every_figure().items():
        figure.draw_without_rendering()
        texts = [
            text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()
        ]
        assert min(float(text.get_fontsize()) for text in texts) >= 9, name
        assert not any(re.search(r"10\^|mathdefault", text.get_text()) for text in texts), (
            name
        )  # exponents are smaller still
        boxes = [
            (each.get_text(), Text.get_window_extent(each))
            for each in texts
            if isinstance(each, Annotation)
        ]
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across <= 1 or down <= 1, f"{name}: {one!r} and {other!r} overlap"


# ---- several servers


def test_each_server_has_a_line_with_its_name_over_its_own_users() -> None:
    figure = charts.throughput(SERVERS, title="Paged serves more")
    assert {"Paged serves more", "sequential", "paged"} <= set(words(figure))
    (first, second) = series(figure)
    assert first[0] == [1, 2, 4] and second[0] == [1, 2, 4, 8]
    assert first[1] == [each.output_rate for each in SERVERS["sequential"]]


def test_a_line_is_not_broken_where_only_another_server_was_measured() -> None:
    (first, second) = series(charts.offered(OPEN))
    assert (first[0], second[0]) == ([0.5, 1.0, 1.5], [2.0, 4.0, 6.0])
    assert not any(math.isnan(value) for _, values in (first, second) for value in values)


def test_names_stand_at_their_own_lines() -> None:
    figure = charts.offered(OPEN)
    labels: list[Any] = list(figure.axes[0].texts)
    ends = {text.get_text(): text.xy for text in labels}
    for (places, values), name in zip(series(figure), OPEN, strict=True):
        assert ends[name] == (places[-1], values[-1])


def test_marks_are_hollow_where_requests_failed_and_a_line_ends_where_most_did() -> None:
    figure = charts.latency(SERVERS, TTFT_INTENDED, percent=50)
    (_, paged) = series(figure)
    assert paged[0] == [1, 2, 4]  # of 8 users, more than half got no answer: the median is infinite
    assert marked(figure, "white") == [4]
    assert any(charts.HOLLOW in text for text in words(figure))
    assert marked(charts.throughput(SERVERS), "white") == [4, 8]
    assert not any(charts.HOLLOW in text for text in words(charts.offered(OPEN)))


def test_repeats_become_a_median_and_a_stroke() -> None:
    repeats = [closed(users, gap) for users in (1, 2) for gap in (0.1, 0.4, 0.2)]
    figure = charts.latency({"a": repeats, "b": repeats[::3]}, TTFT_INTENDED)
    (first, _) = series(figure)
    assert first == ([1, 2], [pytest.approx(200)] * 2)
    strokes: list[Any] = [
        path.vertices
        for collection in figure.axes[0].collections
        for path in collection.get_paths()
    ]
    assert [(low[1], high[1]) for low, high in strokes] == [
        (pytest.approx(100), pytest.approx(400))
    ] * 2


def test_one_server_shows_its_percentiles_and_several_show_one() -> None:
    alone = charts.latency({"paged": SERVERS["sequential"]}, TPOT)
    assert {"p50", "p90", "p95", "TPOT, ms"} <= set(words(alone)) and len(series(alone)) == 3
    assert "TPOT, p90, ms" in words(charts.latency(SERVERS, TPOT, percent=90))


def test_the_knee_is_marked() -> None:
    alone = charts.offered({"paged": OPEN["paged"]})
    assert "knee, 4/s" in words(alone)
    several = charts.offered(OPEN)
    assert marked(several, "none") == [1, 4] and any(
        charts.RINGED in text for text in words(several)
    )


def test_a_knee_that_was_not_reached_is_not_marked() -> None:
    flat = [opened(rate, 0.1) for rate in (1.0, 2.0, 4.0)]
    figure = charts.offered({"paged": flat})
    assert "no knee up to 4/s" in words(figure) and not any(
        text.startswith("knee") for text in words(figure)
    )
    assert marked(charts.offered({"flat": flat, "paged": OPEN["paged"]}), "none") == [4]


def test_times_are_shown_in_ms_or_in_s() -> None:
    short, long = (
        charts.latency({"paged": [closed(users, gap) for users in (1, 2)]}, TTFT_INTENDED)
        for gap in (0.1, 3.0)
    )
    assert "TTFT, ms" in words(short) and "TTFT, s" in words(long)
    assert series(short)[0][1] == pytest.approx([100, 100]) and series(long)[0][1] == pytest.approx(
        [3, 3]
    )


def test_chunks_that_came_together_do_not_stretch_the_axis() -> None:
    together = stored(point([record(i, float(i), gaps=(0.1, 0.0, 0.1, 0.1)) for i in range(9)]))
    assert together.latency[ITL].curve[0] == 0
    assert charts.distribution({"one": together}, ITL).axes[0].get_ylim()[0] == pytest.approx(
        10
    )  # ms; the median is 100


def test_a_server_that_sends_all_at_once_has_no_gaps_to_draw() -> None:
    at_once = [
        stored(point([record(i, float(i), gaps=(0.1, 0.0, 0.0)) for i in range(9)], users=users))
        for users in (1, 2)
    ]
    assert stems(*at_once) == {"throughput", "ttft_intended_users", "ttft_intended_distribution"}
    both = charts.distribution({"at once": at_once[0], "one by one": closed(1, 0.1)}, ITL)
    assert len(series(both)) == 1 and "one by one" in words(both)
    assert (
        len(series(charts.latency({"at once": at_once, "one by one": SERVERS["paged"]}, TPOT))) == 1
    )


def test_goodput_stands_below_what_was_answered() -> None:
    figure = charts.goodput({"paged": OPEN["paged"]})
    (answered, within, offered) = series(figure)
    assert within[1][0] == answered[1][0] > 0 and within[1][-1] == 0 < answered[1][-1]
    assert offered == ([0, 6.0], [0, 6.0])
    assert "Goodput: TTFT 1,000 ms" in words(figure)


def test_a_distribution_ends_where_requests_failed() -> None:
    points = {"all": closed(1, 0.1), "most": closed(2, 0.2, failures=2)}
    figure = charts.distribution(points, TTFT_INTENDED)
    (everyone, most) = series(figure)
    assert not any(math.isnan(value) for value in everyone[1])
    known = [not math.isnan(value) for value in most[1]]
    assert known[: charts.CURVE.index(90) + 1] == [True] * (charts.CURVE.index(90) + 1) and not any(
        known[charts.CURVE.index(95) :]
    )
    assert any("ends where requests failed" in text for text in words(figure))
    assert {"fastest", "p50", "p99", "slowest"} <= set(words(figure))


@pytest.mark.parametrize("name", charts.WORDS)
def test_every_latency_has_a_chart_against_users(name: str) -> None:
    assert any(text.startswith(charts.WORDS[name]) for text in words(charts.latency(SERVERS, name)))
    if name in DRAWN:
        assert len(series(charts.distribution({"one": closed(1, 0.1)}, name))) == 1


def test_a_point_without_values_is_left_out_of_a_distribution() -> None:
    nothing = stored(point([refused()], users=1))
    assert len(series(charts.distribution({"some": closed(1, 0.1), "none": nothing}, ITL))) == 1


# ---- which charts there are


def stems(*points: Summary) -> set[str]:
    found = charts.figures(list(points))
    for figure in found.values():
        figure()
    return set(found)


def test_only_what_the_points_are_enough_for_is_drawn() -> None:
    nothing = stored(point([refused()], users=4))
    assert stems() == set() and stems(nothing) == set()
    assert stems(closed(1, 0.1)) == {"ttft_intended_distribution", "itl_distribution"}
    assert stems(closed(1, 0.1), nothing) == {
        "throughput",
        "ttft_intended_distribution",
        "itl_distribution",
    }
    assert stems(opened(1.0, 0.1), opened(2.0, 0.1)) == {
        "offered_load", "goodput", "ttft_intended_distribution", "itl_distribution",
    }  # fmt: skip
    no_limits = [replace(opened(rate, 0.1), slo=Slo()) for rate in (1.0, 2.0)]
    assert "goodput" not in stems(*no_limits) and "offered_load" in stems(*no_limits)


def test_answers_of_one_token_have_no_chart_of_later_ones() -> None:
    def single(users: int) -> Summary:
        return stored(point([record(i, float(i), gaps=(0.1,)) for i in range(4)], users=users))

    assert stems(single(1), single(2)) == {
        "throughput",
        "ttft_intended_users",
        "ttft_intended_distribution",
    }


def test_bursts_have_no_place_on_an_axis_of_rates() -> None:
    def burst(rate: float) -> Summary:
        made = point([record(i, 0.0) for i in range(8)], users=None)
        return stored(replace(made, schedule=Schedule("bursts", None, [0.0] * 8, rate)))

    assert stems(burst(1.0), burst(2.0)) == {"ttft_intended_distribution", "itl_distribution"}


def test_of_many_loads_five_are_shown_with_the_least_and_the_most() -> None:
    figure = charts.figures([closed(users, 0.1) for users in (1, 2, 4, 8, 16, 32, 64, 128)])[
        "itl_distribution"
    ]()
    names = [text for text in words(figure) if "user" in text]
    assert len(names) == 5 and {"1 user", "128 users"} <= set(names)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="one to 5"):
        charts.throughput({f"server {number}": SERVERS["paged"] for number in range(6)})
    with pytest.raises(ValueError, match="0 series"):
        charts.offered({"paged": SERVERS["paged"]}, E2E_INTENDED)
