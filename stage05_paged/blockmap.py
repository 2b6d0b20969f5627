"""The map of the blocks and their owners, and a picture of it over a whole run.

Both come from the scheduler's tables and the pool's lists alone: they show the state, not a plan.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .scheduler import Scheduler

if TYPE_CHECKING:  # takes a second to load, and only the picture needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Fields = dict[str, Any]
FREE, CACHED, SHARED = -1, -2, -3
MARKS = {FREE: ".", CACHED: "+", SHARED: "#"}
LETTERS = string.ascii_lowercase + string.ascii_uppercase
KEY = (
    f"a letter: a sequence, {MARKS[SHARED]} shared by several, {MARKS[CACHED]} cached, "
    f"{MARKS[FREE]} free"
)

LIGHT = 3  # from this index on, the charts' colours are light and get dark letters
LETTER = 9.5  # height and width of a letter, in points
DIGIT = 6.5  # width of a digit

Box = tuple[int, int, int]  # block, first step, end step (exclusive)


def blockmap(scheduler: Scheduler) -> list[int]:
    """For each block of the pool: FREE, CACHED, SHARED, or the number of its only owner.

    That number is the request's arrival, which is unique and never changes.
    """
    pool = scheduler.pool
    states = [FREE] * pool.count
    for block in pool.cached:
        states[block] = CACHED
    for request, table in scheduler.tables.items():
        for block in table.blocks:
            states[block] = request.arrival if pool.references[block] == 1 else SHARED
    return states


def mark(state: int) -> str:
    """The character for a block: a letter for a sequence, taken in turn."""
    return LETTERS[state % len(LETTERS)] if state >= 0 else MARKS[state]


def colour(state: int, count: int) -> int:
    """The place of a sequence's colour among `count`; each round of letters shifts it by one."""
    return (state + state // len(LETTERS)) % count


def picture(frames: Sequence[Sequence[int]], title: str) -> Figure:
    """Blocks from top to bottom, steps from left to right.

    frames: the `blockmap` after each step.

    Each sequence has a colour and, where it fits, its letter; with more sequences than letters, its
    number, from 1 in order of arrival. Blocks after the last one in use are left out; the axis
    label gives the number of all blocks. Raises ValueError without frames, or if they
    differ in length.
    """
    if not frames:
        raise ValueError("no steps, so there is nothing to draw")
    if len({len(frame) for frame in frames}) > 1:
        raise ValueError("the frames are not of one pool: they differ in length")
    from matplotlib import rc_context
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    from shared import charts

    # Only cached blocks are light grey, and only shared ones hatched: they differ in greyscale too.
    looks: dict[int, Fields] = {
        SHARED: {"facecolor": "white", "hatch": charts.HATCHES[1], "edgecolor": charts.INK},
        CACHED: {"facecolor": charts.FAINT, "edgecolor": "none"},
    }
    grid = np.array([np.asarray(frame) for frame in frames]).T  # (blocks, steps)
    count = len(grid)
    used = np.flatnonzero((grid != FREE).any(axis=1))
    grid = grid[: used[-1] + 1 if len(used) else 1]
    boxes = _boxes(grid)
    size = (7.2, min(9, 1.8 + 0.145 * len(grid)))
    figure, axes = charts.new_figure(title, "step", f"block, of {count}", size=size)
    with rc_context(charts.style()):
        for state in sorted(boxes):
            corners = [
                [(start, block - 0.5), (end, block - 0.5), (end, block + 0.5), (start, block + 0.5)]
                for block, start, end in boxes[state]
            ]
            fill = charts.COLOURS[colour(state, len(charts.COLOURS))]
            style = looks.get(state, {"facecolor": fill, "edgecolor": "white"})
            width = 0.3 if state >= 0 else 0
            axes.add_collection(PolyCollection(corners, linewidth=width, **style))
        axes.set_xlim(0, grid.shape[1])
        axes.set_ylim(len(grid) - 0.5, -0.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        axes.grid(False)
        sign = "letter" if max(boxes, default=0) < len(LETTERS) else "number"
        keys = [Patch(label=f"one sequence's, with its {sign}", facecolor=charts.COLOURS[1])]
        names = {SHARED: "shared by several", CACHED: "cached"}
        keys += [
            Patch(label=name, linewidth=0, **looks[state])
            for state, name in names.items()
            if state in boxes
        ]
        keys.append(Patch(label="free", facecolor="white", edgecolor=charts.INK, linewidth=0.5))
        # A title may take the whole width above the axes, so the key is below them.
        place: Fields = {"loc": "outside lower right", "borderaxespad": 0.1}
        figure.legend(handles=keys, ncols=4, frameon=False, fontsize=9, **place)
        _label(figure, axes, boxes)
    return figure


def _boxes(grid: np.ndarray) -> dict[int, list[Box]]:
    """Each run of steps in which a block's state stays the same, by state, without FREE."""
    boxes: dict[int, list[Box]] = {}
    for block, row in enumerate(grid):
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for start, end in zip(edges, edges[1:], strict=False):
            if row[start] != FREE:
                boxes.setdefault(int(row[start]), []).append((block, start, end))
    return boxes


def _label(figure: Figure, axes: Axes, boxes: dict[int, list[Box]]) -> None:
    """Write the sequence's letter or number into each rectangle that has room for it."""
    from shared import charts

    figure.draw_without_rendering()  # lays the axes out: blocks and steps have sizes in points
    area = axes.get_window_extent()
    points = 72 / figure.dpi
    wide = area.width * points / abs(axes.get_xlim()[1] - axes.get_xlim()[0])  # of a step
    high = area.height * points / abs(axes.get_ylim()[1] - axes.get_ylim()[0])  # of a block
    if high < LETTER:
        return
    style: Fields = {"ha": "center", "va": "center_baseline", "fontsize": 9}
    lettered = max(boxes, default=0) < len(LETTERS)
    for state in filter(lambda state: state >= 0, boxes):
        sign = mark(state) if lettered else str(state + 1)
        light = colour(state, len(charts.COLOURS)) >= LIGHT
        for block, start, end in boxes[state]:
            if (end - start) * wide >= max(LETTER, DIGIT * len(sign)):
                axes.text(
                    (start + end) / 2, block, sign, color=charts.INK if light else "white", **style
                )
