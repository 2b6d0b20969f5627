"""Positions as rotations."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from . import ORANGE, TEAL, Point, arrow, canvas, line, words

# Degrees of a query and a key at position 0, and degrees a token, of two pairs of channels.
PAIRS = {"an early pair: 25 degrees a token": (20, 10, 25), "a late one: 2 degrees": (60, 25, 2)}


def rotation() -> Figure:
    """Two pairs of channels of a query and a key, at two pairs of positions two tokens apart."""
    figure, axes = canvas("Both rotations differ, and the angle between them stays", 72, 61)
    for row, (pair, (*starts, turn)) in enumerate(PAIRS.items()):
        for left, first in ((18.0, 4), (54.0, 8)):
            middle = (left, 15.0 + 31 * row)
            line(axes, *[_on(middle, angle, 10) for angle in range(0, 361, 5)], colour="#9a9aa6")
            ends = []
            looks = (("q", first, ORANGE), ("k", first - 2, TEAL))
            for start, (name, place, colour) in zip(starts, looks, strict=True):
                line(axes, middle, _on(middle, start, 10), colour=colour, dashed=True)
                ends.append(start + turn * place)
                arrow(axes, middle, _on(middle, ends[-1], 10), colour=colour, width=2)
                x, y = _on(middle, ends[-1], 11.6)
                words(axes, x, y, f"{name} at {place}", ha="left" if x > left else "right")
            line(axes, *[_on(middle, angle, 4) for angle in range(ends[1], ends[0] + 1)])
            words(axes, left, middle[1] + 13.5, "two tokens apart: the same score")
        words(axes, 36, 1.5 + 31 * row, f"{pair} (dashed: at position 0)", weight="bold")
    return figure


def _on(middle: Point, angle: float, radius: float) -> Point:
    """A point of the circle around `middle`; the angle in degrees."""
    x, y = middle
    return x + radius * math.cos(math.radians(angle)), y - radius * math.sin(math.radians(angle))


DRAW = (rotation,)
