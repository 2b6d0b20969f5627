"""Positions as rotations; query heads that share keys."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from . import ORANGE, TEAL, VIOLET, Point, arrow, box, canvas, line, words

KEYS = (TEAL, VIOLET)  # of the two heads of keys
HEADS, GROUP = 4, 2  # query heads, and how many of them share a head of keys
BAR = 12.0  # the length of a head's keys


def grouped() -> Figure:
    """Four query heads over two heads of keys, with keys repeated and with queries as rows."""
    figure, axes = canvas("Queries of a group read their keys together", 84, 33)
    words(axes, 1, 1, "repeated (before): a copy for each query head", ha="left", weight="bold")
    words(axes, 47, 1, "grouped (this stage): a query is a row", ha="left", weight="bold")
    for left in (6.0, 52.0):
        words(axes, left - 1, 5.4, "cache", ha="right")
        for head, colour in enumerate(KEYS):
            corner = (left + 16 * head, 4.0)
            box(axes, *corner, BAR, 2.8, f"k{head}", fill=colour)
            _read(axes, corner, left < 50)
    for head in range(HEADS):
        y = 13.0 + 4.4 * head
        box(axes, 1.0, y, 5, 2.8, f"q{head}", fill=ORANGE)
        words(axes, 8, y + 1.4, "x")
        box(axes, 10.0, y, BAR, 2.8, f"k{head // GROUP}", fill=KEYS[head // GROUP])
    words(axes, 24, 20.8, "4 products of one row,\n4 heads of keys read", ha="left")
    for head, colour in enumerate(KEYS):
        y = 13.0 + 8.8 * head
        for row in range(GROUP):
            box(axes, 47.0, y + 2.8 * row, 5, 2.8, f"q{head * GROUP + row}", fill=ORANGE)
        words(axes, 54, y + 2.8, "x")
        box(axes, 56.0, y + 1.4, BAR, 2.8, f"k{head}", fill=colour)
    words(axes, 70, 20.8, "2 products of two rows,\n2 heads of keys read", ha="left")
    return figure


def _read(axes: Any, corner: Point, copies: bool) -> None:
    """Arrows from a head of keys in the cache to where it is used."""
    x, y = corner[0] + BAR / 2, corner[1] + 2.8
    for shift in (-2.5, 2.5) if copies else (0,):
        arrow(axes, (x + shift, y), (x + shift, y + 4.4))
    words(axes, x + 3.5, y + 2.2, "2 copies" if copies else "read", ha="left")


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


DRAW = (rotation, grouped)
