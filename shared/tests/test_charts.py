"""The style of all charts: the same bytes again, distinct colours, no text lost or overlapping."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from shared import charts


def some_lines() -> Figure:
    series: dict[str, list[float]] = {"first": [10, 20, 40, 80], "second": [10, 20, 39, 79]}
    series |= {"third": [1, 2, 3, math.nan], "guess": [9, 18, 36, 78]}
    spread = {"first": [(9, 11), (18, 22), (38, 42), (75, 85)]}
    more: dict[str, Any] = {"spread": spread, "dashed": ["guess"], "limits": {"memory": 90.0}}
    return charts.lines("Batches help", "batch", "tok/s", [1, 2, 4, 8], series, **more)


def some_bars() -> Figure:
    series = {"plain": [10.0, 20.0], "packed": [30.0, math.nan], "other": [5.0, 6.0]}
    series |= {"fourth": [1.0, 2.0], "fifth": [3.0, 4.0]}
    more: dict[str, Any] = {"spread": {"plain": [(9.0, 12.0), (19.0, 50.0)]}}
    more["limits"] = {"memory": 40.0}
    return charts.bars("Packing helps", "tok/s", ["float32", "bfloat16"], series, **more)


def some_roofline() -> Figure:
    points = {
        "float32": [(0.5, 15.0, "1"), (1.0, 30.0, "2"), (8.0, 190.0, "16")],
        "bfloat16": [(1.0, 30.0, "1"), (2.0, 55.0, "2"), (15.0, 380.0, "16")],
    }
    peaks = {"float32": 228.0, "bfloat16": 459.0}
    return charts.roofline("Batches climb", "numbers are batches", 37.0, peaks, points)


CHARTS: list[Callable[[], Figure]] = [some_lines, some_bars, some_roofline]


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def test_a_chart_has_the_same_bytes_again_and_whatever_a_user_has_set():
    settings = {"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "other"}
    for draw in CHARTS:
        content = charts.render(draw())
        with matplotlib.rc_context(settings | {"lines.linewidth": 9}):
            assert charts.render(draw()) == content
        ElementTree.fromstring(content)
        assert b"<dc:date>" not in content and len(content) < 150_000
        assert not re.search(rb"[ \t\r]\n", content) and content.endswith(b"</svg>\n")


def test_the_last_bits_of_its_numbers_change_no_byte_of_a_chart():
    """They differ from processor to processor, and matplotlib's ids are hashes of them."""

    def drawn(width: float) -> bytes:
        figure = Figure()
        figure.add_axes((0.1, 0.1, width, 0.8), title="T").plot([0.0, 1.0], [0.1, 0.3], marker="o")
        return charts.render(figure)

    assert drawn(0.7) == drawn(math.nextafter(0.7, 1))


def test_a_chart_can_be_read_aloud_and_searched_and_turns_dark():
    """Its title and its other words are text, and once each in the description."""
    root = ElementTree.fromstring(charts.render(CHARTS[0]()))
    title, description, *_ = (child.text for child in root if child.text and child.text.strip())
    written = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    words = description.split("; ")
    assert title in written and set(words) <= set(written)
    assert title not in words and len(words) == len(set(words)) > 1
    assert b"prefers-color-scheme: dark" in charts.render(CHARTS[0]())


def test_colours_are_apart_in_grey():
    """So they are for the colour-blind too, and each has a shape of its own."""
    values = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in charts.COLOURS]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    levels = sorted(116 * np.cbrt(luminance) - 16)  # CIE L*: a distance of about 2 can be seen
    assert min(b - a for a, b in itertools.pairwise(levels)) > 10
    assert levels[-1] < 80  # and still show on white
    for shapes in (charts.MARKERS, charts.LINES, charts.HATCHES):
        assert len({str(shape) for shape in shapes}) == len(charts.COLOURS)


def check_readable(figure: Figure, written: Sequence[Text]) -> None:
    """No text of the figure is small, and none of those `written` is on top of another."""
    assert min(float(text.get_fontsize()) for text in texts(figure)) >= 9
    figure.draw_without_rendering()
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in written]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1, f"{one!r} and {other!r} overlap"


@pytest.mark.parametrize("draw", CHARTS)
def test_no_text_is_small_or_on_top_of_another(draw):
    figure = draw()
    notes = [text for text in texts(figure) if isinstance(text, Annotation)]
    assert len(notes) >= 5
    check_readable(figure, notes)


def test_every_series_and_limit_is_named_beside_its_marks():
    labels = {text.get_text() for text in texts(some_lines())}
    assert labels >= {"first", "second", "third", "guess", "memory"}
    labels = {text.get_text() for text in texts(some_bars())}
    assert "10.0  plain" in labels and "30.0  packed" in labels and "memory" in labels
    assert "20.0" in labels and not any("nan" in label for label in labels)


def test_data_that_do_not_fit_are_refused():
    for series in ({}, {"a": [1.0]}, {"a": [math.nan] * 2}, dict.fromkeys("abcdef", [1.0, 2.0])):
        with pytest.raises(ValueError):
            charts.lines("t", "x", "y", [1, 2], series)
    with pytest.raises(ValueError, match="'b' has points and no peak"):
        charts.roofline("t", "n", 10.0, {"a": 100.0}, {"b": [(1.0, 5.0, "1")]})
