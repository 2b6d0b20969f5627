"""Slots that are handed on, and a packed step: one line of tokens, fanned out in attention only."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import (
    NAVY,
    ORANGE,
    PALE,
    TEAL,
    VIOLET,
    WASTE,
    YELLOW,
    Look,
    arrow,
    box,
    canvas,
    cells,
    legend,
    words,
)

# The owner of each place in each step; "-" is a row that has ended, "." an empty place.
STATIC = ["PP---RRRTTTT", "QQQQQS--...."]
SLOTS = ["PPRRRS...", "QQQQQTTTT"]
OWNERS = {"P": NAVY, "Q": VIOLET, "R": ORANGE, "S": TEAL, "T": YELLOW}


def owner(key: str) -> Look:
    return WASTE if key == "-" else (OWNERS.get(key, PALE), "")


def static_continuous() -> Figure:
    """Five requests in two rows and in two slots."""
    figure, axes = canvas("The same 15 tokens in 12 steps and in 9", 72, 29)
    for top, name, rows in (
        (1, "static (stage 03): rows", STATIC),
        (14, "continuous: slots", SLOTS),
    ):
        words(axes, 1, top, name, ha="left", weight="bold")
        for step in range(len(rows[0])):
            words(axes, 10.2 + 3.4 * step, top + 2.4, str(step + 1))
        words(axes, 7.6, top + 2.4, "step", ha="right")
        for number in range(2):
            words(axes, 7.6, top + 5.2 + 3.2 * number, str(number), ha="right")
        label = lambda key: key if key in OWNERS else ""  # noqa: E731
        cells(axes, 8.5, top + 3.6, rows, owner, size=(3.4, 3.2), label=label)
        used = sum(key in OWNERS for row in rows for key in row)
        places = 2 * len(rows[0])
        text = f"{used} of {places} places\nin use: {used / places:.1%}"
        words(axes, 51, top + 6.8, text, ha="left", weight="bold")
    legend(
        axes, 26, (1, owner("P"), "a token for request P"),
        (21, owner("-"), "computed in vain: its answer has ended"), (55, owner("."), "empty"),
    )  # fmt: skip
    return figure


# Step 4 of the lesson: the packed rows, the slot of each, and the keys in each slot.
PACK = [("a5", 0), ("b3", 1), ("c3", 2), ("c4", 2), ("c5", 2)]
COLOURS = (VIOLET, ORANGE, TEAL)
KEYS = (6, 4, 6)


def packed() -> Figure:
    """Five rows through the linear layers; in attention each goes to its slot."""
    figure, axes = canvas("Linear layers see five rows; only attention knows their slots", 87, 33)
    tops = [6 + 4.2 * row for row in range(5)]
    for name, left, width in (
        ("q, k, v:\none product\nfor 5 rows", 9.0, 10),
        ("projection\nand MLP:\none product\neach, 5 rows", 61.0, 10),
    ):
        box(axes, left, 5, width, 21.4, name, fill=PALE)
    words(axes, 40, 3.2, "attention, slot by slot, in place", weight="bold")
    for (name, slot), top in zip(PACK, tops, strict=True):
        middle = top + 1.5
        for left in (2.0, 75.0):
            box(axes, left, top, 4.6, 3, name, fill=COLOURS[slot])
        arrow(axes, (6.6, middle), (9, middle))
        arrow(axes, (71, middle), (75, middle))
        centre = 8.5 + 7 * slot
        arrow(axes, (19, middle), (26.6, centre), colour=COLOURS[slot])
        arrow(axes, (53, centre), (61, middle), colour=COLOURS[slot])
    for slot, count in enumerate(KEYS):
        top = 7 + 7 * slot
        words(axes, 27, top + 1.5, f"slot {slot}", ha="left")
        new = [position for name, at in PACK if at == slot for position in [int(name[1])]]
        for position in range(7):
            left, written = 32.2 + 2.9 * position, position < count
            fill = (COLOURS[slot] if position in new else "#dedee6") if written else "#ffffff"
            box(axes, left, top, 2.9, 3, str(position) if written else "", fill=fill)
    for row, top in enumerate(tops):
        wanted = row < 2
        text = "logits" if wanted else ""
        words(axes, 80.2, top + 1.5, text, ha="left")
    words(axes, 2, 29, "packed, (N,)", ha="left")
    words(axes, 27, 29, "coloured: written in this step; grey: before", ha="left")
    words(axes, 60, 29, "c has not reached its last token:\nno logits yet", ha="left")
    return figure


DRAW = (static_continuous, packed)
