"""Slots that are handed on."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, VIOLET, WASTE, YELLOW, Look, canvas, cells, legend, words

# The owner of each place in each step; "-" is a row that has ended, "." an empty place.
STATIC = ["PP---RRRTTTT", "QQQQQS--...."]
SLOTS = ["PPRRRS...", "QQQQQTTTT"]
OWNERS = {"P": NAVY, "Q": VIOLET, "R": ORANGE, "S": TEAL, "T": YELLOW}


def owner(key: str) -> Look:
    return WASTE if key == "-" else (OWNERS.get(key, PALE), "")


def static_continuous() -> Figure:
    """Five requests in two rows and in two slots."""
    figure, axes = canvas("The same 15 tokens in 12 steps and in 9", 72, 29)
    plans = {"static (stage 03): rows": STATIC, "continuous: slots": SLOTS}
    for top, (name, rows) in zip((1, 14), plans.items(), strict=True):
        words(axes, 1, top, name, ha="left", weight="bold")
        for step in range(len(rows[0])):
            words(axes, 10.2 + 3.4 * step, top + 2.4, str(step + 1))
        words(axes, 7.6, top + 2.4, "step", ha="right")
        for number in range(2):
            words(axes, 7.6, top + 5.2 + 3.2 * number, str(number), ha="right")
        label = lambda key: key if key in OWNERS else ""  # noqa: E731
        cells(axes, 8.5, top + 3.6, rows, owner, size=(3.4, 3.2), label=label)
        used, places = sum(key in OWNERS for row in rows for key in row), 2 * len(rows[0])
        text = f"{used} of {places} places\nin use: {used / places:.1%}"
        words(axes, 51, top + 6.8, text, ha="left", weight="bold")
    legend(
        axes, 26, (1, owner("P"), "a token for request P"),
        (21, owner("-"), "computed in vain: its answer has ended"), (55, owner("."), "empty"),
    )  # fmt: skip
    return figure


DRAW = (static_continuous,)
