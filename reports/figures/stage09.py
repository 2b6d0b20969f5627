"""Blocks gathered and read in place, and tiles."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from shared.charts import INK

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
    """A gather copies the blocks of a sequence before attention reads them; a kernel follows the
    table."""
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


def a_tile() -> Figure:
    """A tile of x, one of weights and one of sums: registers of 16 rows of 64 bytes."""
    figure, axes = canvas(
        "One instruction: 16 x 32 numbers times 32 x 16, added to 16 x 16", 76, 40
    )
    for left, top, title, under in (
        (4, 22, "x", "16 rows of 32 inputs"),
        (44, 4, "weights", "16 pairs of inputs, of 16 outputs each"),
        (44, 22, "sums", "16 rows of 16 outputs, in float32"),
    ):
        columns = 16 if title == "sums" else 32
        lines = {"colors": INK, "linewidth": 0.5}
        axes.vlines(
            [left + i * 25.6 / columns for i in range(columns + 1)], top, top + 12.8, **lines
        )
        axes.hlines([top + i * 0.8 for i in range(17)], left, left + 25.6, **lines)
        if title == "x":
            box(axes, left, top + 4, 25.6, 0.8, fill=ORANGE)
        elif title == "weights":
            box(axes, left + 14.4, top, 1.6, 12.8, fill=ORANGE)
        else:
            box(axes, left + 14.4, top + 4, 1.6, 0.8, fill=TEAL)
        words(axes, left + 12.8, top - 1.2, title, weight="bold")
        words(axes, left + 12.8, top + 14.1, under)
    words(axes, 17, 8, "a register: 16 rows of 64 bytes\n= 32 bfloat16 or 16 float32 a row")
    arrow(axes, (31, 28.4), (43, 28.4))
    arrow(axes, (59.2, 19.2), (59.2, 20.2))
    return figure


DRAW = (in_place, a_tile)
