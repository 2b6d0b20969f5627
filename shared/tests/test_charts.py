"""The style of all charts: the same bytes again, no text lost or small."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from shared import charts


def some_lines() -> Figure:
    series: dict[str, list[float]] = {"first": [10, 20, 40, 80], "second": [10, 20, 39, 79]}
    series |= {"third": [1, math.nan, 3, 4], "guess": [9, 18, 36, 78]}
    return charts.lines("T", "batch", "tok/s", [1, 2, 4, 8], series, dashed=["guess"])


def some_bars() -> Figure:
    series = {"plain": [10.0, 1020.0], "packed": [30.0, math.nan], "other": [5.0, 6.0]}
    series |= {"fourth": [1.0, 2.0], "fifth": [3.0, 4.0]}
    return charts.bars("T", "tok/s", ["float32", "bfloat16"], series)


CHARTS: list[Callable[[], Figure]] = [some_lines, some_bars]


def test_a_chart_has_the_same_bytes_again_and_its_words_can_be_read_aloud():
    """Whatever a user has set; its other words are once each in the description."""
    settings = {"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "other"}
    for draw in CHARTS:
        content = charts.render(draw())
        with matplotlib.rc_context(settings | {"lines.linewidth": 9}):
            assert charts.render(draw()) == content
        assert not re.search(rb"[ \t\r]\n|<dc:date>", content) and content.endswith(b"</svg>\n")
        assert b"prefers-color-scheme: dark" in content and len(content) < 150_000
        root = ElementTree.fromstring(content)
        title, description, *_ = (child.text for child in root if child.text and child.text.strip())
        written = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        words = description.split("; ")
        assert title in written and set(words) <= set(written) - {title}


def test_the_last_bits_of_its_numbers_change_no_byte_of_a_chart():
    """They differ from processor to processor, and matplotlib's ids are hashes of them."""

    def drawn(width: float) -> bytes:
        figure = Figure()
        figure.add_axes((0.1, 0.1, width, 0.8), title="T").plot([0.0, 1.0], [0.1, 0.3], marker="o")
        return charts.render(figure)

    assert drawn(0.7) == drawn(math.nextafter(0.7, 1))


@pytest.mark.parametrize("draw", CHARTS)
def test_every_series_is_named_every_bar_has_its_value_and_no_text_is_small(draw):
    figure = draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    if draw is some_lines:  # from the highest end to the lowest
        assert names == ["first", "second", "guess", "third"]
    else:
        assert names == ["plain", "packed", "other", "fourth", "fifth"]
        assert {text.get_text() for text in texts} >= {"10.0", "30.0", "1,020.0"}
    assert min(float(text.get_fontsize()) for text in texts) >= 9
