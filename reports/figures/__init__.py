"""A kit for pictures of mechanisms, in the house style of `shared/charts.py`.

A picture is a function without arguments that returns a Figure, in a module a stage, listed in its
tuple DRAW: `python -m reports.draw` draws `stage03.static` to reports/figures/stage03_static.svg.
It is a `canvas` with boxes, cells, arrows and words on it, or a chart of `shared.charts`. Its title
states the finding. It shows no measured number.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shared import charts
from shared.charts import INK

NAVY, VIOLET, ORANGE, TEAL, YELLOW = charts.COLOURS
WHITE, PALE = "#ffffff", "#f1f1f4"
WASTE = (PALE, "////")  # the look of work in vain and of memory unused
Look = tuple[str, str]  # fill and hatch
Point = tuple[float, float]


def pictures() -> dict[str, Callable[[], Figure]]:
    """All pictures by name, found by module."""
    modules = sorted(file.name for file in pkgutil.iter_modules(__path__))
    drawn = {name: importlib.import_module(f"{__name__}.{name}").DRAW for name in modules}
    return {f"{name}_{draw.__name__}": draw for name, draws in drawn.items() for draw in draws}


def canvas(title: str, width: float, height: float) -> tuple[Figure, Any]:
    """An empty sheet of `width` x `height` units of a tenth of an inch (72 is a page), with the
    origin at the top left and y growing downwards. A letter is about 0.8 wide, a line 1.6 high."""
    figure, axes = charts.new_figure(title, "", "", size=(width / 10, height / 10))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return figure, axes


def words(axes: Any, x: float, y: float, text: str, *, ha: str = "center", **look: Any) -> None:
    """Text at (x, y), its vertical middle; look: matplotlib's, such as color, weight, rotation."""
    look = {"fontsize": 9, "color": INK, "va": "center", "linespacing": 1.25} | look
    with matplotlib.rc_context(charts.style()):
        axes.text(x, y, text, ha=ha, **look)


def box(
    axes: Any, x: float, y: float, width: float, height: float, text: str = "",
    *, fill: str = WHITE, hatch: str = "", **look: Any,
) -> None:  # fmt: skip
    """A rectangle with its top left corner at (x, y) and `text` in its middle, white on dark."""
    dark = sum(part * weight for part, weight in zip(to_rgb(fill), (0.3, 0.6, 0.1), strict=True))
    style: dict[str, Any] = {"facecolor": fill, "edgecolor": INK, "hatch": hatch, "linewidth": 0.9}
    with matplotlib.rc_context(charts.style() | {"hatch.color": "#9a9aa6"}):
        axes.add_patch(Rectangle((x, y), width, height, **style))
    if text:
        colour = {"color": "white" if dark < 0.5 else INK}
        words(axes, x + width / 2, y + height / 2, text, **colour | look)


def cells(
    axes: Any, x: float, y: float, rows: Sequence[Sequence[str]], look: Callable[[str], Look],
    *, size: Point = (3.0, 3.0), label: Callable[[str], str] = lambda key: "",
) -> None:  # fmt: skip
    """A grid of boxes from (x, y) on: a row of keys a line, " " leaves a place empty.

    look: key -> fill and hatch. label: key -> the text in the box. size: of a box.
    """
    for down, row in enumerate(rows):
        for right, key in enumerate(row):
            if key != " ":
                fill, hatch = look(key)
                corner = x + right * size[0], y + down * size[1]
                box(axes, *corner, *size, label(key), fill=fill, hatch=hatch)


def legend(axes: Any, y: float, *entries: tuple[float, Look, str], size: float = 2.2) -> None:
    """Keys of a picture in a line at height `y`, each a box of `size` and its words: (x, look,
    words)."""
    for x, (fill, hatch), text in entries:
        box(axes, x, y, size, size, fill=fill, hatch=hatch)
        words(axes, x + size + 0.8, y + size / 2, text, ha="left")


def arrow(
    axes: Any, start: Point, end: Point, colour: str = INK, dashed: bool = False, width: float = 1.2
) -> None:
    """From `start` to `end`."""
    look = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "mutation_scale": 10}
    look |= {"linestyle": "--" * dashed or "-", "shrinkA": 0, "shrinkB": 0}
    with matplotlib.rc_context(charts.style()):
        axes.annotate("", end, start, arrowprops=look)


def line(axes: Any, *points: Point, colour: str = INK, dashed: bool = False) -> None:
    """A line through the points."""
    across, down = zip(*points, strict=True)
    axes.plot(across, down, color=colour, linewidth=1.2, linestyle="--" * dashed or "-")
