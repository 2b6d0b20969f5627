"""A request and the replicas that know its beginning."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, TEAL, VIOLET, WHITE, arrow, box, canvas, cells, legend, words

FILLS = {"S": NAVY, "T": TEAL, "a": VIOLET, "?": WHITE}


def routing() -> Figure:
    """The request's prefix is on replica 0, part of it on replica 1, and nothing on replica 2."""
    figure, axes = canvas(
        "What is computed, and what waits: the cheapest replica gets the request", 72, 36
    )
    words(axes, 0, 5.5, "request", ha="left", weight="bold")
    cells(axes, 10, 4, ["SSSSa?"], lambda key: (FILLS[key], ""))
    words(axes, 19, 2.5, "six blocks, each with the digest of all before it")
    box(axes, 36, 3.5, 10, 4, "routing")
    arrow(axes, (28.5, 5.5), (35.6, 5.5))
    words(axes, 0, 12.5, "replica", ha="left", weight="bold")
    titles = {10: "blocks sent there", 38: "to compute", 50: "in flight", 61: "cost, in blocks"}
    for left, title in titles.items():
        words(axes, left, 12.5, title, ha="left", weight="bold")
    replicas = (("SSSSa", 1, 2), ("SSTTT", 4, 0), ("TTTT", 6, 0))
    for number, (known, compute, flight) in enumerate(replicas):
        y = 15 + 5.5 * number
        words(axes, 3, y + 1.5, str(number))
        cells(axes, 10, y, [known], lambda key: (FILLS[key], ""))
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


DRAW = (routing,)
