"""Charts of a stored run and of servers made up here: what they show, legible, and reproducible."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from pytest import approx

from shared.charts import render
from stage07_loadtest import charts, results
from stage07_loadtest.load import Point
from stage07_loadtest.metrics import CURVE, ITL, TPOT, TTFT_INTENDED, Slo, Summary, summarize
from stage07_loadtest.tests.helpers import SMALL_RUN, point, record, refused

FIRST, LATER = "ttft_intended_distribution", "itl_distribution"


def stored(made: Point) -> Summary:
    """The summary as read from disk."""
    return results.from_json(results.to_json(summarize(made, Slo(ttft=1.0))))


def closed(users: int, gap: float, failures: int = 0, gaps: tuple[float, ...] = ()) -> Summary:
    """20 requests whose tokens come `gap` seconds apart, or after `gaps`."""
    good = [record(i, gap * i, gaps=gaps or (gap, gap, gap)) for i in range(20 - failures)]
    return stored(point([*good, *(refused(20 + i) for i in range(failures))], users=users))


def opened(rate: float, wait: float) -> Summary:
    made = point([record(i, i / rate, gaps=(wait, 0.1, 0.1)) for i in range(20)], users=None)
    return stored(replace(made, schedule=replace(made.schedule, rate=rate)))


SEQUENTIAL = [closed(users, 0.1 * users) for users in (1, 2, 4)]
PAGED = [closed(users, 0.1, failed) for users, failed in ((1, 0), (2, 0), (4, 3), (8, 12))]
SERVERS = {"sequential": SEQUENTIAL, "paged": PAGED}
OPEN = {
    "sequential": [opened(rate, wait) for rate, wait in ((0.5, 0.1), (1.0, 0.3), (1.5, 3.0))],
    "paged": [opened(rate, wait) for rate, wait in ((2.0, 0.1), (4.0, 0.2), (6.0, 2.0))],
}


def texts(figure: Any) -> list[Any]:
    return [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in texts(figure)]


def series(figure: Any) -> list[tuple[list[float], list[float]]]:
    """Places and values of the lines, without single marks."""
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 1]
    return [([*map(float, at.get_xdata())], [*map(float, at.get_ydata())]) for at in lines]


def marked(figure: Any, fill: str) -> list[float]:
    """Places of single marks: hollow ones are filled with white, rings with none."""
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 1]
    return sorted(line.get_xdata()[0] for line in lines if line.get_markerfacecolor() == fill)


def test_a_stored_run_is_drawn_whole(tmp_path: Path) -> None:
    points = results.load(SMALL_RUN).points
    figures, written = charts.figures(points), charts.draw(points, tmp_path)
    users = ("throughput", "ttft_intended_users", "tpot_users")
    assert {*figures} == {*users, "offered_load", "goodput", FIRST, LATER}
    assert [path.stem for path in written] == [*figures]
    for path, figure in zip(written, figures.values(), strict=True):
        assert path.read_bytes() == render(figure())


def test_texts_are_legible() -> None:
    """Not under 9 points, without exponents (which are smaller), and not on top of each other."""
    figures = [charts.throughput(SERVERS), charts.latency(SERVERS, TTFT_INTENDED)]
    for figure in (*figures, charts.offered(OPEN), charts.offered({"paged": OPEN["paged"]})):
        figure.draw_without_rendering()
        assert min(float(text.get_fontsize()) for text in texts(figure)) >= 9
        assert not any(re.search(r"10\^|mathdefault", text) for text in words(figure))
        labels = [text for text in texts(figure) if isinstance(text, Annotation)]
        boxes = [Text.get_window_extent(label) for label in labels]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_every_server_has_a_line_with_its_name_over_its_own_load() -> None:
    """Its marks are hollow where requests failed."""
    figure = charts.throughput(SERVERS, title="Paged serves more")
    assert {"Paged serves more", "sequential", "paged"} <= set(words(figure))
    first, second = series(figure)
    assert first == ([1, 2, 4], [point.output_rate for point in SEQUENTIAL])
    assert second[0] == [1, 2, 4, 8] and marked(figure, "white") == [4, 8]


def test_latencies_are_percentiles_of_one_server_and_one_of_several_in_ms_or_s() -> None:
    """A line ends where most requests failed: the median is infinite."""
    figure = charts.latency(SERVERS, TTFT_INTENDED, percent=50)
    assert series(figure)[1][0] == [1, 2, 4] and "TTFT, p50, ms" in words(figure)
    assert marked(figure, "white") == [4] and any(charts.HOLLOW in text for text in words(figure))
    alone = charts.latency({"paged": SEQUENTIAL}, TPOT)
    assert {"p50", "p90", "p95", "TPOT, ms"} <= set(words(alone)) and len(series(alone)) == 3
    slow = charts.latency({"paged": [closed(users, 3.0) for users in (1, 2)]}, TTFT_INTENDED)
    assert "TTFT, s" in words(slow) and series(slow)[0][1] == approx([3, 3])


def test_repeats_become_a_median_and_a_stroke() -> None:
    repeats = [closed(users, gap) for users in (1, 2) for gap in (0.1, 0.4, 0.2)]
    figure = charts.latency({"a": repeats, "b": repeats[::3]}, TTFT_INTENDED)
    assert series(figure)[0] == ([1, 2], [approx(200)] * 2)
    paths: list[Any] = [path for one in figure.axes[0].collections for path in one.get_paths()]
    strokes = [[end[1] for end in path.vertices] for path in paths]
    assert strokes == [[approx(100), approx(400)]] * 2


def test_the_knee_is_marked_where_it_was_passed() -> None:
    """A line is not broken where only the other server was measured, and named at its own end."""
    figure = charts.offered(OPEN)
    assert [places for places, _ in series(figure)] == [[0.5, 1.0, 1.5], [2.0, 4.0, 6.0]]
    ends = {text.get_text(): getattr(text, "xy", None) for text in figure.axes[0].texts}
    for (places, values), name in zip(series(figure), OPEN, strict=True):
        assert not any(map(math.isnan, values)) and ends[name] == (places[-1], values[-1])
    assert not any(charts.HOLLOW in text for text in words(figure))
    assert marked(figure, "none") == [1, 4]
    flat = [opened(rate, 0.1) for rate in (1.0, 2.0, 4.0)]
    assert marked(charts.offered({"flat": flat, "paged": OPEN["paged"]}), "none") == [4]
    assert "knee, 4/s" in words(charts.offered({"paged": OPEN["paged"]}))
    alone = words(charts.offered({"paged": flat}))
    assert "no knee up to 4/s" in alone and not any(text.startswith("knee") for text in alone)
    steep = [opened(rate, rate) for rate in (1.0, 2.0, 4.0)]
    assert "no knee from 1/s on" in words(charts.offered({"paged": steep}))


def test_goodput_stands_below_what_was_answered() -> None:
    figure = charts.goodput({"paged": OPEN["paged"]})
    answered, within, offered = series(figure)
    assert within[1][0] == answered[1][0] > 0 and within[1][-1] == 0 < answered[1][-1]
    assert offered == ([0, 6.0], [0, 6.0]) and "Goodput: TTFT 1,000 ms" in words(figure)


def test_a_distribution_ends_where_requests_failed() -> None:
    points = {"all": closed(1, 0.1), "most": closed(2, 0.2, failures=2)}
    points["none"] = stored(point([refused()], users=1))  # without values, it is left out
    figure = charts.distribution(points, TTFT_INTENDED)
    complete, cut = ([not math.isnan(value) for value in values] for _, values in series(figure))
    assert all(complete) and cut == [percent <= 90 for percent in CURVE]
    assert {"fastest", "p50", "p99", "slowest"} <= set(words(figure))
    assert any("ends where requests failed" in text for text in words(figure))


def test_chunks_that_came_together_have_no_gap_to_draw() -> None:
    together = closed(1, 1.0, gaps=(0.1, 0.0, 0.1, 0.1))
    low, _ = charts.distribution({"one": together}, ITL).axes[0].get_ylim()
    assert low == approx(10)  # ms; the median is 100
    at_once = [closed(users, 1.0, gaps=(0.1, 0.0, 0.0)) for users in (1, 2)]
    both = charts.distribution({"at once": at_once[0], "one by one": closed(1, 0.1)}, ITL)
    assert len(series(both)) == 1 and "one by one" in words(both)
    assert len(series(charts.latency({"at once": at_once, "one by one": PAGED}, TPOT))) == 1


def stems(*points: Summary) -> set[str]:
    figures = charts.figures(list(points))
    for figure in figures.values():
        figure()
    return set(figures)


def test_only_what_the_points_suffice_for_is_drawn() -> None:
    nothing = stored(point([refused()], users=4))
    single = [closed(users, 1.0, gaps=(0.1,)) for users in (1, 2)]  # answers of one token
    at_once = [closed(users, 1.0, gaps=(0.1, 0.0, 0.0)) for users in (1, 2)]
    rising = [opened(1.0, 0.1), opened(2.0, 0.1)]
    bursts = [replace(one, kind="bursts") for one in rising]  # not on an axis of rates
    assert stems() == stems(nothing) == set()
    assert stems(closed(1, 0.1)) == stems(*bursts) == {FIRST, LATER}
    assert stems(*single) == stems(*at_once) == {"throughput", "ttft_intended_users", FIRST}
    assert stems(*rising) == {"offered_load", "goodput", FIRST, LATER}
    assert stems(*(replace(one, slo=Slo()) for one in rising)) == {"offered_load", FIRST, LATER}
    # Of many loads five are shown, with the least and the most.
    points = [closed(2**power, 0.1) for power in range(8)]
    names = [text for text in words(charts.figures(points)[LATER]()) if "user" in text]
    assert len(names) == 5 and {"1 user", "128 users"} <= set(names)
