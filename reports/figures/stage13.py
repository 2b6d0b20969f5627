"""A picture of stage 13: the keys of two sequences divided among programs."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, WHITE, arrow, box, canvas, words

PIECE = 11.0  # width of 256 keys
SEQUENCES = (("a", 3.6, NAVY), ("b", 1.4, TEAL))  # and how many pieces of keys they have


def pieces() -> Figure:
    """Pieces count from position 0, whatever runs beside: a program each, merged in order."""
    figure, axes = canvas("A program for each piece of 256 keys, the same in any company", 72, 27)
    for row, (name, count, colour) in enumerate(SEQUENCES):
        y, whole = 3 + 12 * row, int(count)
        words(axes, 0, y + 1.5, f"keys of {name}", ha="left", weight="bold")
        for number in range(whole + 1):
            width = PIECE * min(1.0, count - number)
            left = 10 + number * PIECE
            box(axes, left, y, width - 0.4, 3, str(number), fill=colour)
            box(axes, left, y + 5, PIECE - 1, 3, f"program {number}", fill=PALE)
            arrow(axes, (left + width / 2, y + 3), (left + width / 2, y + 5))
        for number in range(whole + 1, 4):
            box(axes, 10 + number * PIECE, y + 5, PIECE - 1, 3, "returns", fill=WHITE)
        box(axes, 62, y + 5, 9, 3, "merge", fill=PALE)
        arrow(axes, (10 + 4 * PIECE - 1, y + 6.5), (62, y + 6.5), colour=ORANGE)
    words(axes, 58, 7.2, "best, total,\nmixed", color=ORANGE)
    words(axes, 10, 25.5, "Beside a longer neighbour, programs without keys return.", ha="left")
    return figure


DRAW = (pieces,)
