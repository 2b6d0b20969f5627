"""The latencies of one request on one axis."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.figure import Figure

from . import NAVY, ORANGE, PALE, TEAL, VIOLET, YELLOW, box, canvas, line, words

INTENDED, SENT, CHUNKS = 0, 20, (120, 140, 760, 780, 800)  # ms, the request of the lesson
LEFT, MS = 13.0, 0.077  # where 0 ms is, and how wide a millisecond is


def latencies() -> Figure:
    """Client queue, TTFT, ITL, TPOT and E2E latency of one request."""
    figure, axes = canvas("One request: only ITL shows the gap", 78, 34)
    first, last, count = CHUNKS[0], CHUNKS[-1], len(CHUNKS) - 1
    mean = (last - first) / count
    line(axes, (LEFT, 6), (_at(last) + 2, 6), colour=NAVY)
    for number, ms in enumerate((INTENDED, SENT, *CHUNKS)):
        chunk = ms in CHUNKS
        mark = _at(ms) - 0.35, 5, 0.7, 2
        box(axes, *mark, fill=ORANGE if chunk else NAVY)
        name = {INTENDED: "\nintended", SENT: "\nsent"}.get(ms, "")
        aside = {760: -0.7, 800: 0.7}.get(ms, 0)
        words(axes, _at(ms) + aside, 9 if number % 2 else 3.2, f"{ms}{name}")
    words(axes, _at(440), 4.4, "chunks, with a token each; ms", color=ORANGE)
    rows: dict[str, tuple[str, list[tuple[float, float]]]] = {
        "client queue": (VIOLET, [(INTENDED, SENT)]),
        "TTFT": (TEAL, [(SENT, first)]),
        "TTFT, intended": (TEAL, [(INTENDED, first)]),
        "ITL": (YELLOW, list(pairwise(CHUNKS))),
        "TPOT": (PALE, [(first + n * mean, first + (n + 1) * mean) for n in range(count)]),
        "E2E": (NAVY, [(SENT, last)]),
        "E2E, intended": (NAVY, [(INTENDED, last)]),
    }
    for number, (name, (fill, spans)) in enumerate(rows.items()):
        y = 12 + 3 * number
        words(axes, LEFT - 1, y + 1.1, name, ha="right")
        for begin, end in spans:
            text = f"{end - begin:g}" if end - begin > 50 else ""
            box(axes, _at(begin), y, _at(end) - _at(begin), 2.2, text, fill=fill)
    return figure


def _at(ms: float) -> float:
    return LEFT + MS * ms


DRAW = (latencies,)
