"""Pictures of stage 11: a pass that verifies drafts, and the rule for drafts that were drawn."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, WASTE, WHITE, arrow, box, canvas, line, words

P, Q = (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)  # those of the lesson
UNIT = 26.0  # the height of a probability of 1


def verified() -> Figure:
    """Four rows of one pass: the newest token and three drafts."""
    figure, axes = canvas("The first token that is not the draft ends the pass", 72, 23)
    words(axes, 13, 6, "computed in one pass", ha="right")
    words(axes, 13, 12, "sampled, one by one", ha="right")
    words(axes, 13, 18, "compared with", ha="right")
    rows = (("on", "the", "the"), ("the", "mat", "mat"), ("mat", ".", "and"), ("and", "", ""))
    for place, (row, token, draft) in enumerate(rows):
        x = 15 + 14 * place
        box(axes, x, 4.5, 9, 3, row, fill=WHITE if place == 0 else PALE)
        if not token:
            box(axes, x, 10.5, 9, 3, "", fill=WASTE[0], hatch=WASTE[1])
            words(axes, x + 4.5, 15, "never looked at")
            continue
        arrow(axes, (x + 4.5, 7.5), (x + 4.5, 10.5))
        box(axes, x, 10.5, 9, 3, token, fill=TEAL if token == draft else ORANGE)
        line(axes, (x + 4.5, 13.5), (x + 4.5, 16.5), dashed=True)
        box(axes, x, 16.5, 9, 3, draft, fill=PALE)
        words(axes, x + 4.5, 21, "equal: go on" if token == draft else "not equal: the end")
    words(axes, 15, 2, "newest token", ha="left")
    words(axes, 29, 2, "three drafts", ha="left")
    return figure


def rule() -> Figure:
    """Bars of p and q with what is accepted, and what is missing."""
    figure, axes = canvas("What q lacks is drawn after a refusal, so p comes out", 72, 29)
    base = 24.0
    for place, (p, q) in enumerate(zip(P, Q, strict=True)):
        x, both = 8 + 17 * place, min(p, q)
        box(axes, x, base - UNIT * both, 5, UNIT * both, f"{both:.1f}", fill=NAVY)
        if q > p:
            height = UNIT * (q - p)
            box(axes, x, base - UNIT * q, 5, height, f"{q - p:.1f}", fill=WASTE[0], hatch=WASTE[1])
        box(axes, x + 6, base - UNIT * both, 5, UNIT * both, f"{both:.1f}", fill=NAVY)
        if p > q:
            height = UNIT * (p - q)
            box(axes, x + 6, base - UNIT * p, 5, height, f"{p - q:.1f}", fill=ORANGE)
        words(axes, x + 2.5, base + 1.5, "q")
        words(axes, x + 8.5, base + 1.5, "p")
        words(axes, x + 5.5, base + 3.5, "abc"[place], weight="bold")
    for y, fill, hatch, text in (
        (6, NAVY, "", "accepted"),
        (10, *WASTE, "refused"),
        (14, ORANGE, "", "drawn after\na refusal"),
    ):
        box(axes, 58, y, 3, 2, fill=fill, hatch=hatch)
        words(axes, 62, y + 1, text, ha="left")
    return figure


DRAW = (verified, rule)
