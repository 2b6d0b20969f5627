"""The pictures of mechanisms: readable, committed as they are drawn, and in a lesson."""

from __future__ import annotations

import itertools
import json

import pytest
from matplotlib.text import Text

from shared import charts, paths
from shared.bench.report import drawn_with
from shared.course import figures, lessons
from shared.tests.test_charts import texts

PICTURES = figures.pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_readable_up_to_date_and_in_a_lesson(name):
    figure, path = PICTURES[name](), figures.place(name)
    settings = json.loads((paths.ROOT / "reports/machines.json").read_text(encoding="utf-8"))
    drawn = charts.render(figure)
    assert path.exists() and len(drawn) < 150_000
    if settings["charts"] == drawn_with():  # another version of matplotlib draws other bytes
        stale = "stale: run python -m shared.course.figures"
        assert path.read_bytes().replace(b"\r\n", b"\n") == drawn, stale
    shown = [text.read_text(encoding="utf-8") for text in lessons.lessons()]
    assert any(f"reports/figures/{name}.svg)" in text for text in shown)
    assert min(float(text.get_fontsize()) for text in texts(figure)) >= 9
    figure.draw_without_rendering()
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in figure.axes[0].texts]
    boxes = [(text, box) for text, box in boxes if text.strip()]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1, f"{one!r} and {other!r} overlap"


def test_no_picture_is_left_over():
    found = {path.stem for path in (paths.ROOT / figures.FOLDER).glob("*")}
    assert found == set(PICTURES)
