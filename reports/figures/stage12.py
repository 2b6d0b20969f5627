"""A block on two ranks."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, WHITE, arrow, box, canvas, words


def ranks() -> Figure:
    """Two matrices of a block on two ranks: the first split by its columns, the second by its
    rows; the partial sums are added."""
    figure, axes = canvas("Two matrices, one sum: what each rank holds and computes", 72, 36)
    titles = {
        8: "x, whole", 17: "first matrix,\nby its outputs", 31: "own\noutputs",
        39: "second matrix,\nby its inputs", 52: "partial\nsums", 65: "y, whole",
    }  # fmt: skip
    for left, title in titles.items():
        words(axes, left, 3.5, title, ha="left", weight="bold")
    for rank, colour in enumerate((NAVY, TEAL)):
        y = 8 + 13 * rank
        words(axes, 0, y + 4, f"rank {rank}", ha="left", weight="bold")
        box(axes, 9, y, 3, 8, fill=PALE)
        box(axes, 17, y, 10, 8, dashed=True)
        box(axes, 17 + 5 * rank, y, 5, 8, fill=colour)
        box(axes, 32, y + 4 * rank, 3, 4, fill=colour)
        box(axes, 39, y, 8, 8, dashed=True)
        box(axes, 39, y + 4 * rank, 8, 4, fill=colour)
        box(axes, 52, y, 3, 8, fill=colour)
        box(axes, 66, y, 3, 8, fill=ORANGE)
        for x, end in ((12, 17), (27, 32), (35, 39), (47, 52), (55, 58), (62, 66)):
            arrow(axes, (x + 0.4, y + 4), (end - 0.4, y + 4))
    box(axes, 58, 8, 4, 21, fill=ORANGE)
    words(axes, 60, 18.5, "all-reduce", rotation=90, color=WHITE)
    words(axes, 0, 32, "Until the sum, no rank needs another. The bias is", ha="left")
    words(axes, 0, 34, "added once, after it. A block has two: attention, and the MLP.", ha="left")
    return figure


DRAW = (ranks,)
