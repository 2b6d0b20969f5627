"""The rule for drafts that were drawn."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import NAVY, ORANGE, WASTE, box, canvas, legend, words

P, Q = (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)  # those of the lesson
UNIT = 26.0  # the height of a probability of 1


def rule() -> Figure:
    """Bars of p and q with what is accepted, and what is missing."""
    figure, axes = canvas("What q lacks is drawn after a refusal, so p comes out", 72, 29)
    base = 24.0
    for place, (p, q) in enumerate(zip(P, Q, strict=True)):
        x, both = 8 + 17 * place, min(p, q)
        box(axes, x, base - UNIT * both, 5, UNIT * both, f"{both:.1f}", fill=NAVY)
        box(axes, x + 6, base - UNIT * both, 5, UNIT * both, f"{both:.1f}", fill=NAVY)
        height, text = UNIT * abs(q - p), f"{abs(q - p):.1f}"
        if q > p:
            box(axes, x, base - UNIT * q, 5, height, text, fill=WASTE[0], hatch=WASTE[1])
        else:
            box(axes, x + 6, base - UNIT * p, 5, height, text, fill=ORANGE)
        words(axes, x + 2.5, base + 1.5, "q")
        words(axes, x + 8.5, base + 1.5, "p")
        words(axes, x + 5.5, base + 3.5, "abc"[place], weight="bold")
    legend(axes, 6, (58, (NAVY, ""), "accepted"))
    legend(axes, 10, (58, WASTE, "refused"))
    legend(axes, 14, (58, (ORANGE, ""), "drawn after\na refusal"))
    return figure


DRAW = (rule,)
