"""Two threads, what crosses between them, and a client that leaves."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, VIOLET, WASTE, arrow, box, canvas, line, words

GREY = "#555555"
A, B, LOOP, QUEUE, THREAD = 5.0, 15.0, 30.0, 45.0, 60.0  # where the lifelines stand


def threads() -> Figure:
    """The life of a request whose client leaves, time downwards."""
    figure, axes = canvas("The event loop never waits for a step", 78, 62)
    for x, name, colour in (
        (A, "client A", NAVY), (B, "client B", TEAL), (LOOP, "event loop", VIOLET),
        (QUEUE, "queue", PALE), (THREAD, "engine's thread", ORANGE),
    ):  # fmt: skip
        if x != THREAD:
            line(axes, (x, 4), (x, 60), colour=GREY, dashed=True)
        wide = 15 if x == THREAD else 9
        box(axes, x - wide / 2, 1, wide, 3.2, name, fill=colour, weight="bold")
    steps = (
        (6, 17, "step 7", "others"), (21, 32, "step 8", "A's prompt,\nfirst token"),
        (36, 47, "step 9", "A's token,\nin vain"),
        (51, 59, "step 10", "without A,\nwhose blocks\nare free"),
    )  # fmt: skip
    for top, end, name, note in steps:
        fill, hatch = WASTE if "vain" in note else (PALE, "")
        box(axes, THREAD - 4, top, 8, end - top, fill=fill, hatch=hatch)
        back = {"facecolor": PALE, "edgecolor": "none", "pad": 2}  # so that no hatching crosses it
        words(axes, THREAD, (top + end) / 2, name, bbox=back)
        words(axes, THREAD + 5.5, (top + end) / 2, note, ha="left")
        line(axes, (THREAD, end), (THREAD, min(end + 4, 60)), colour=GREY, dashed=True)
    _send(axes, A, LOOP, 8, "POST")
    _command(axes, 9, 19, "add")
    for y in (12.5, 43.5):  # answered at once
        _send(axes, B, LOOP, y, "/health", TEAL)
        arrow(axes, (LOOP, y + 2), (B, y + 2), colour=TEAL)
    for y in (17, 32, 47):  # the results of a step, in one call
        arrow(axes, (THREAD, y), (LOOP, y + 1.5), colour=ORANGE)
        words(axes, 38.5, y + 2.4, "tokens, ends", color=ORANGE)
        box(axes, LOOP - 0.7, y + 0.7, 1.4, 2.4, fill=VIOLET)
    _send(axes, LOOP, A, 35, "event: token")
    _send(axes, A, LOOP, 39, "closes")
    _command(axes, 40, 49, "abort")
    return figure


def _send(axes: Any, start: float, end: float, y: float, text: str, colour: str = NAVY) -> None:
    """From a client to the loop, or back."""
    arrow(axes, (start, y), (end, y), colour=colour, dashed=text == "closes")
    words(axes, min(start, end) + 1, y - 1.1, text, ha="left", color=colour)
    box(axes, LOOP - 0.7, y - 1, 1.4, 3, fill=VIOLET)


def _command(axes: Any, put: float, taken: float, name: str) -> None:
    """Into the queue at once, and out of it between two steps."""
    arrow(axes, (LOOP, put), (QUEUE, put), colour=VIOLET)
    words(axes, (LOOP + QUEUE) / 2, put - 1.1, name, color=VIOLET)
    box(axes, QUEUE - 1, put, 2, taken - put, fill=VIOLET)
    arrow(axes, (QUEUE, taken), (THREAD, taken), colour=VIOLET)
    words(axes, (QUEUE + THREAD) / 2, taken + 1.3, name, color=VIOLET)


DRAW = (threads,)
