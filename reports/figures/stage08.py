"""Positions as rotations."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from . import ORANGE, TEAL, Point, arrow, canvas, line, words


def rotation() -> Figure:
    """One pair of channels of a query and a key, at two pairs of positions two tokens apart."""
    figure, axes = canvas("Both rotations differ, and the angle between them stays", 72, 30)
    start = {"q": (20.0, ORANGE), "k": (10.0, TEAL)}  # degrees at position 0, and colour
    turn = 25.0  # degrees a token
    for left, places in ((18.0, {"q": 4, "k": 2}), (54.0, {"q": 8, "k": 6})):
        round_it = [math.radians(angle) for angle in range(0, 361, 5)]
        line(axes, *[_on(left, angle, 10.0) for angle in round_it], colour="#9a9aa6")
        ends = {}
        for name, (angle, colour) in start.items():
            ends[name] = angle + turn * places[name]
            arrow(
                axes, (left, 14), _on(left, math.radians(ends[name]), 10.0), colour=colour, width=2
            )
            x, y = _on(left, math.radians(ends[name]), 11.6)
            words(axes, x, y, f"{name} at {places[name]}", ha="left" if x > left else "right")
        between = range(int(min(ends.values())), int(max(ends.values())) + 1)
        line(axes, *[_on(left, math.radians(angle), 4.0) for angle in between])
        words(axes, left, 28, f"difference {places['q'] - places['k']}: the same score")
    return figure


def _on(left: float, angle: float, radius: float) -> Point:
    """A point of the circle around (left, 14)."""
    return left + radius * math.cos(angle), 14 - radius * math.sin(angle)


DRAW = (rotation,)
