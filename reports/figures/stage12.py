"""A block on two ranks."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, VIOLET, WHITE, arrow, box, canvas, cells, legend, words

FILLS = {"S": NAVY, "T": TEAL, "a": VIOLET, "?": WHITE}


def routing() -> Figure:
    """The request's prefix is on replica 0, part of it on replica 1, and nothing on replica 2."""
    figure, axes = canvas(
        "What is computed, and what waits: the cheapest replica gets the request", 72, 36
    )
    words(axes, 0, 5.5, "request", ha="left", weight="bold")
    cells(axes, 10, 4, ["SSSSa?"], lambda key: (FILLS[key], ""), label=lambda key: "")
    words(axes, 19, 2.5, "six blocks, each with the digest of all before it")
    box(axes, 36, 3.5, 10, 4, "routing")
    arrow(axes, (28.5, 5.5), (35.6, 5.5))
    words(axes, 0, 12.5, "replica", ha="left", weight="bold")
    for left, title in (
        (10, "blocks sent there"),
        (38, "to compute"),
        (50, "in flight"),
        (61, "cost, in blocks"),
    ):
        words(axes, left, 12.5, title, ha="left", weight="bold")
    for number, (known, compute, flight) in enumerate(
        (("SSSSa", 1, 2), ("SSTTT", 4, 0), ("TTTT", 6, 0))
    ):
        y = 15 + 5.5 * number
        words(axes, 3, y + 1.5, str(number))
        cells(axes, 10, y, [known], lambda key: (FILLS[key], ""), label=lambda key: "")
        words(axes, 42, y + 1.5, str(compute))
        words(axes, 53, y + 1.5, str(flight))
        best = number == 0
        text = f"{compute + flight}{', the least' if best else ''}"
        words(axes, 61, y + 1.5, text, ha="left", color=ORANGE if best else "black")
    legend(
        axes, 31, (0, (NAVY, ""), "system prompt"), (18, (VIOLET, ""), "the chat's"),
        (33, (TEAL, ""), "other prompts"), (51, (WHITE, ""), "in no replica yet"), size=2,
    )  # fmt: skip
    note = "A busy replica costs more, until another one computes the prefix, too."
    words(axes, 0, 34.6, note, ha="left")
    return figure


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
