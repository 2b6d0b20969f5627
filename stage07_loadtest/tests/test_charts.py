"""Charts of a stored run and of servers made up here: what they show of the points."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

from matplotlib.text import Text
from pytest import approx

from shared.charts import render
from stage07_loadtest import charts, results
from stage07_loadtest.metrics import CURVE, ITL, TPOT, TTFT_INTENDED, Slo, summarize

from .helpers import SMALL_RUN, point, record, refused

FIRST, LATER = "ttft_intended_distribution", "itl_distribution"


def closed(users, gap, failures=0, gaps=()):
    """20 requests whose tokens come `gap` seconds apart, or after `gaps`."""
    good = [record(i, gap * i, gaps=gaps or (gap, gap, gap)) for i in range(20 - failures)]
    made = point([*good, *(refused(20 + i) for i in range(failures))], users=users)
    found = summarize(made, Slo(ttft=1.0))
    return results.from_json(results.to_json(found))  # without the last digits, as from disk


def opened(rate, wait):
    made = point([record(i, i / rate, gaps=(wait, 0.1, 0.1)) for i in range(20)], users=None)
    return summarize(replace(made, schedule=replace(made.schedule, rate=rate)), Slo(ttft=1.0))


SEQUENTIAL = [closed(users, 0.1 * users) for users in (1, 2, 4)]
PAGED = [closed(users, 0.1, failed) for users, failed in ((1, 0), (2, 0), (4, 3), (8, 12))]
SERVERS = {"sequential": SEQUENTIAL, "paged": PAGED}
RISING = [opened(rate, wait) for rate, wait in ((2.0, 0.1), (4.0, 0.2), (6.0, 2.0))]
AT_ONCE = [closed(users, 1.0, gaps=(0.1, 0.0, 0.0)) for users in (1, 2)]  # all but the first


def words(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())


def lines(figure: Any, marks: bool = False) -> list[Any]:
    return [line for line in figure.axes[0].get_lines() if (len(line.get_xdata()) == 1) == marks]


def series(figure):
    """Places and values of the lines, without single marks."""
    return [([*map(float, at.get_xdata())], [*map(float, at.get_ydata())]) for at in lines(figure)]


def hollow(figure):
    """Places of single marks that are filled with white."""
    found = [line for line in lines(figure, True) if line.get_markerfacecolor() == "white"]
    return sorted(line.get_xdata()[0] for line in found)


def test_a_stored_run_is_drawn_whole(tmp_path):
    points = results.load(SMALL_RUN).points
    figures, written = charts.figures(points), charts.draw(points, tmp_path)
    users = ("throughput", "ttft_intended_users", "tpot_users")
    assert {*figures} == {*users, "offered_load", "goodput", FIRST, LATER}
    assert [path.stem for path in written] == [*figures]
    assert written[0].read_bytes() == render(next(iter(figures.values()))())
    assert len({path.read_bytes() for path in written}) == len(figures)
    for figure in (draw() for draw in figures.values()):
        figure.draw_without_rendering()  # exponents are too small to be read
        assert "mathdefault" not in words(figure)


def test_a_line_of_each_server_over_its_own_load():
    """Marks are hollow where requests failed, and a line ends where most did: the median is
    infinite. Of one server several percentiles are shown; times are in ms or s. Repeats become a
    median and a stroke."""
    figure = charts.throughput(SERVERS, title="Paged serves more")
    assert "Paged serves more" in words(figure) and "sequential" in words(figure)
    first, second = series(figure)
    assert first == ([1, 2, 4], [point.output_rate for point in SEQUENTIAL])
    assert second[0] == [1, 2, 4, 8] and hollow(figure) == [4, 8]
    figure = charts.latency(SERVERS, TTFT_INTENDED, percent=50)
    assert series(figure)[1][0] == [1, 2, 4] and "TTFT, p50, ms" in words(figure)
    assert hollow(figure) == [4] and charts.HOLLOW in words(figure)
    # A line is not broken where only the other server was measured.
    assert series(charts.throughput({"few": SEQUENTIAL[::2], "paged": PAGED}))[0][0] == [1, 4]
    slow = charts.latency({"paged": [closed(users, 3.0) for users in (1, 2)]}, TTFT_INTENDED)
    assert "TTFT, s" in words(slow) and len(series(slow)) == 3 and "p90" in words(slow)
    repeats = [closed(users, gap) for users in (1, 2) for gap in (0.1, 0.4, 0.2)]
    figure = charts.latency({"a": repeats, "b": repeats[::3]}, TTFT_INTENDED)
    assert series(figure)[0] == ([1, 2], [approx(200)] * 2)
    paths: list[Any] = [path for one in figure.axes[0].collections for path in one.get_paths()]
    strokes = [[end[1] for end in path.vertices] for path in paths]
    assert strokes == [[approx(100), approx(400)]] * 2


def test_the_name_of_a_line_that_ends_early_covers_no_mark_of_another():
    name, users = "a server with quite a long name", (1, 8, 16)
    servers = {name: [closed(count, 0.1) for count in users[:2]]}
    figure = charts.throughput(servers | {"paged": [closed(count, 0.1) for count in users]})
    figure.draw_without_rendering()
    (label,) = (text for text in figure.axes[0].texts if text.get_text() == name)
    box = Text.get_window_extent(label)  # without the line to its mark
    marks = figure.axes[0].transData.transform(lines(figure)[1].get_xydata())
    assert box.x0 < marks[2][0] < box.x1 and not any(box.contains(*mark) for mark in marks)


def test_the_knee_is_marked_where_it_was_passed_and_goodput_falls_there():
    flat = [opened(rate, 0.1) for rate in (1.0, 2.0, 4.0)]
    steep = [opened(rate, rate) for rate in (1.0, 2.0, 4.0)]
    notes = {"knee, 4/s": RISING, "no knee up to 4/s": flat, "no knee from 1/s on": steep}
    for note, points in notes.items():
        assert note in words(charts.offered(points)).split("\n")
    figure = charts.goodput(RISING)
    answered, within, offered = series(figure)
    assert within[1][0] == answered[1][0] > 0 and within[1][-1] == 0 < answered[1][-1]
    assert offered == ([0, 6.0], [0, 6.0]) and "Goodput: TTFT 1,000 ms" in words(figure)


def test_a_distribution_ends_where_requests_failed_and_has_no_place_for_0():
    """Chunks that came together have no gap to draw."""
    points = {"all": closed(1, 0.1), "most": closed(2, 0.2, failures=2)}
    points["none"] = summarize(point([refused()], users=1), Slo())  # without values: left out
    figure = charts.distribution(points, TTFT_INTENDED)
    complete, cut = ([not isnan(value) for value in values] for _, values in series(figure))
    assert all(complete) and cut == [percent <= 90 for percent in CURVE]
    assert "fastest" in words(figure) and "ends where requests failed" in words(figure)
    together = closed(1, 1.0, gaps=(0.1, 0.0, 0.1, 0.1))
    low, _ = charts.distribution({"one": together}, ITL).axes[0].get_ylim()
    assert low == approx(10)  # ms; the median is 100
    both = charts.distribution({"at once": AT_ONCE[0], "one by one": closed(1, 0.1)}, ITL)
    assert len(series(both)) == 1 and "one by one" in words(both)
    assert len(series(charts.latency({"at once": AT_ONCE, "one by one": PAGED}, TPOT))) == 1


def test_only_what_the_points_suffice_for_is_drawn():
    def stems(*points):
        return set(charts.figures(list(points)))

    nothing = summarize(point([refused()], users=4), Slo())
    single = [closed(users, 1.0, gaps=(0.1,)) for users in (1, 2)]  # answers of one token
    bursts = [replace(one, kind="bursts") for one in RISING]  # not on an axis of rates
    assert stems() == stems(nothing) == set()
    assert stems(closed(1, 0.1)) == stems(*bursts) == {FIRST, LATER}
    assert stems(*single) == stems(*AT_ONCE) == {"throughput", "ttft_intended_users", FIRST}
    assert stems(*RISING) == {"offered_load", "goodput", FIRST, LATER}
    assert stems(*(replace(one, slo=Slo()) for one in RISING)) == {"offered_load", FIRST, LATER}
    # Of many loads five are shown, with the least and the most.
    points = [closed(2**power, 0.1) for power in range(8)]
    names = [one for one in words(charts.figures(points)[LATER]()).split("\n") if "user" in one]
    assert len(names) == 5 and {"1 user", "128 users"} <= set(names)
