"""Blocks gathered and read in place."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, WHITE, arrow, box, canvas, words

BLOCKS, OURS = 11, (6, 1, 9)  # blocks in memory; those of one sequence, in the order of its table
EACH = 4.0  # width of a block


def _memory(axes: Any, y: float) -> list[float]:
    """Blocks in memory, three of which are the sequence's; where those three begin."""
    for block in range(BLOCKS):
        ours = block in OURS
        text = str(OURS.index(block)) if ours else ""
        box(axes, 12 + block * EACH, y, EACH, 3.4, text, fill=NAVY if ours else PALE)
    words(axes, 11, y + 1.7, "blocks in\nmemory", ha="right")
    return [12 + block * EACH + EACH / 2 for block in OURS]


def in_place() -> Figure:
    """A gather copies a sequence's blocks before attention; a kernel follows the table."""
    figure, axes = canvas("Gathered, keys and values are moved three times; in place, once", 72, 30)
    words(axes, 0, 1.5, "stage 05", ha="left", weight="bold")
    places = _memory(axes, 3)
    for number, place in enumerate(places):
        target = 28 + number * EACH
        arrow(axes, (place, 6.4), (target + EACH / 2, 10.4), colour=ORANGE)
        box(axes, target, 10.4, EACH, 3.4, str(number), fill=TEAL)
    words(axes, 27, 12.1, "a copy", ha="right")
    words(axes, 12, 8.4, "\u2460 read, \u2461 write", ha="left", color=ORANGE)
    box(axes, 61, 10.4, 10, 3.4, "attention")
    arrow(axes, (40, 12.1), (61, 12.1), colour=ORANGE)
    words(axes, 50.5, 13.2, "\u2462 read", color=ORANGE)
    words(axes, 0, 18.5, "stage 09", ha="left", weight="bold")
    places = _memory(axes, 20)
    box(axes, 61, 26, 10, 3.4, "attention")
    box(axes, 28, 26, 12, 3.4, f"table: {', '.join(map(str, OURS))}", fill=WHITE)
    arrow(axes, (61, 27.7), (40, 27.7), dashed=True)
    for place in places:
        arrow(axes, (place, 23.4), (61, 26.6), colour=ORANGE)
    words(axes, 57, 24.2, "\u2460 read", ha="left", color=ORANGE)
    return figure


DRAW = (in_place,)
