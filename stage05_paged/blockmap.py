"""The map of the blocks and their owners: in the terminal, and as a picture of a whole run.

Both come from the scheduler's tables and the pool's lists alone: they show the state, not a plan.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from .scheduler import Scheduler

if TYPE_CHECKING:  # takes a second to load, and only the picture needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Fields = dict[str, Any]
FREE, CACHED, SHARED = -1, -2, -3
MARKS = {FREE: ".", CACHED: "+", SHARED: "#"}
LETTERS = string.ascii_lowercase + string.ascii_uppercase  # they suffice without colours
COLOURS = (
    "green",
    "yellow",
    "blue",
    "magenta",
    "cyan",
    "red",
    "bright_green",
    "bright_yellow",
    "bright_blue",
    "bright_magenta",
)
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


class Marks:
    """Numbers for `mark` and `look`, so that no two sequences shown share both letter and colour.

    That holds while there are no more sequences than pairs. Each sequence takes the next unused
    number; a preempted one keeps its number until another takes it.
    """

    def __init__(self) -> None:
        self.pairs = len(LETTERS) * len(COLOURS)
        self.numbers: dict[int, int] = {}  # by arrival
        self._turn = 0

    def of(self, states: Iterable[int], more: Iterable[int] = ()) -> list[int]:
        """The states with numbers in place of arrivals. `more`: arrivals that are shown too."""
        states = list(states)
        shown = {*more, *(state for state in states if state >= 0)}
        taken = {self.numbers[arrival] for arrival in shown & self.numbers.keys()}
        for arrival in sorted(shown - self.numbers.keys()):
            while self._turn in taken and len(taken) < self.pairs:
                self._turn = (self._turn + 1) % self.pairs
            for gone in [holder for holder, number in self.numbers.items() if number == self._turn]:
                if gone not in shown:
                    del self.numbers[gone]
            self.numbers[arrival] = self._turn
            taken.add(self._turn)
            self._turn = (self._turn + 1) % self.pairs
        return [self.numbers.get(state, state) for state in states]


def mark(state: int) -> str:
    """The character for a block: a letter for a sequence, taken in turn."""
    return LETTERS[state % len(LETTERS)] if state >= 0 else MARKS[state]


def look(state: int) -> str:
    """The style of that character, for rich: a colour for a sequence, taken in turn.

    No two of 520 consecutive sequences share both letter and colour.
    """
    if state >= 0:
        return f"reverse {COLOURS[colour(state, len(COLOURS))]}"
    return "bold" if state == SHARED else "dim"


def colour(state: int, count: int) -> int:
    """The place of a sequence's colour among `count`; each round of letters shifts it by one."""
    return (state + state // len(LETTERS)) % count


def lines(states: Sequence[int], width: int, height: int) -> list[Text]:
    """The map of `blockmap` as up to `height` lines of up to `width` characters, one per block.

    A line begins with the number of its first block. If not all blocks fit, the last line counts
    the remaining ones.
    """
    margin = len(str(len(states))) + 1
    room = max(1, width - margin)
    room = room - room % 10 or room  # round numbers make a block's number easy to read
    starts = range(0, len(states), room)
    cut = len(starts) > height
    drawn = []
    for start in starts[: max(0, height - cut)]:
        line = Text(f"{start:>{margin - 1}} ", style="", no_wrap=True, overflow="crop")
        for state, group in groupby(states[start : start + room]):
            line.append(mark(state) * len(list(group)), look(state))
        drawn.append(line)
    if cut and height > 0:
        words = _count(states[len(drawn) * room :])
        drawn.append(Text(words, style="dim", no_wrap=True, overflow="crop"))
    for line in drawn:
        line.truncate(max(0, width))
    return drawn


def _count(states: Sequence[int]) -> str:
    """The states of the blocks that are not drawn."""
    count = Counter(min(state, 0) for state in states)
    return (
        f"and {len(states)} more blocks: {count[0]} of one sequence, {count[SHARED]} shared, "
        f"{count[CACHED]} cached, {count[FREE]} free"
    )


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
