"""Eight weights on grids."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, arrow, box, canvas, line, words

WEIGHTS = (0.613, -2.54, 0.352, 1.27, -0.067, 0.5, -1.128, 0.009)  # those of the lesson
LEFT, UNIT = 42.0, 11.0  # where 0 lies, and the length of 1
GRIDS: dict[str, tuple[float, float, int, int]] = {  # scale, minimum, first and last code
    "int4, symmetric": (2.54 / 7, 0.0, -7, 7),
    "int4, with a minimum": (3.81 / 15, -2.54, 0, 15),
    "int8, symmetric": (0.02, 0.0, -127, 127),
}


def across(number: float) -> float:
    return LEFT + UNIT * number


def grid() -> Figure:
    """Eight weights, and the codes that a format has for them."""
    figure, axes = canvas("A weight moves to the next code; a finer grid moves it less", 72, 31)
    for weight in WEIGHTS:
        line(axes, (across(weight), 4.4), (across(weight), 29), colour="#c9c9d2", dashed=True)
        box(axes, across(weight) - 0.35, 3.4, 0.7, 1.4, fill=NAVY)
    words(axes, 12, 4.1, "eight weights", ha="right")
    for row, (name, (scale, minimum, first, last)) in enumerate(GRIDS.items()):
        y = 10.5 + 8 * row
        words(axes, 12, y, name.replace(", ", ",\n"), ha="right")
        ticks = [minimum + scale * code for code in range(first, last + 1)]
        line(axes, (across(ticks[0]), y), (across(ticks[-1]), y))
        for code, place in zip(range(first, last + 1), ticks, strict=True):
            line(axes, (across(place), y - 0.6), (across(place), y + 0.6))
            if last < 100 or code in (first, 0, last):
                words(axes, across(place), y + 1.9, str(code))
        for weight in WEIGHTS:
            near = minimum + scale * round((weight - minimum) / scale)
            arrow(axes, (across(weight), y - 3.2), (across(near), y - 0.7), colour=ORANGE)
    return figure


DRAW = (grid,)
