"""The slots step by step: a Gantt chart. It is drawn from the engine's step records alone, so it
shows what ran, not what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared import charts

from .recorder import PassRecord

Fields = dict[str, Any]

# Prefill is dark and hatched, decode light and plain: they differ in greyscale too.
LOOKS: dict[str, Fields] = {
    "prefill": {"facecolor": charts.COLOURS[1], "hatch": charts.HATCHES[1], "edgecolor": "white"},
    "decode": {"facecolor": charts.COLOURS[4], "edgecolor": "none"},
}
LETTERS = 70  # that fit side by side into the chart's width


@dataclass
class Bar:
    """One request's time in one slot: steps `start` to `end` (exclusive).

    pieces: (kind, start, end) of the steps that computed its tokens, "prefill" or "decode". Between
        two pieces the budget had no token left for it.
    """

    slot: int
    request_id: str
    start: int
    end: int
    pieces: list[tuple[str, int, int]]


def bars(steps: Sequence[PassRecord]) -> list[Bar]:
    """The bars of all slots, by slot and then by time. The first of `steps` is step 0."""
    drawn: list[Bar] = []
    open_bars: dict[int, Bar] = {}  # by slot
    for number, step in enumerate(steps):
        for slot, share in zip(step.memory, step.shares, strict=True):
            bar = open_bars.get(slot)
            # An aborted request leaves no record of its end.
            if bar is None or bar.request_id != share.request_id:
                bar = open_bars[slot] = Bar(slot, share.request_id, number, number, [])
                drawn.append(bar)
            kind = "prefill" if share.prefill_tokens else "decode"
            if bar.pieces and bar.pieces[-1][::2] == (kind, number):
                bar.pieces[-1] = (kind, bar.pieces[-1][1], number + 1)
            else:
                bar.pieces.append((kind, number, number + 1))
            bar.end = number + 1
            if share.finish_reason is not None:
                del open_bars[slot]
    return sorted(drawn, key=lambda bar: (bar.slot, bar.start))


def draw(tenants: Sequence[Bar], steps: int, title: str, slots: int = 1) -> Figure:
    """Slots from top to bottom, at least `slots`, steps from left to right; a bar for each request,
    with its id."""
    rows = max(slots, 1 + max((bar.slot for bar in tenants), default=0))
    figure, axes = charts.new_figure(title, "step", "slot", size=(7.2, min(12, 1.8 + 0.3 * rows)))
    with matplotlib.rc_context(charts.style()):
        for slot in range(rows):
            mine = [bar for bar in tenants if bar.slot == slot]
            for kind, look in LOOKS.items():
                spans = (piece for bar in mine for piece in bar.pieces)
                if pieces := [(start, end - start) for of, start, end in spans if of == kind]:
                    axes.broken_barh(pieces, (slot - 0.4, 0.8), linewidth=0, **look)
            outlines = [(bar.start, bar.end - bar.start) for bar in mine]
            frame: Fields = {"facecolor": "none", "edgecolor": charts.INK, "linewidth": 0.8}
            axes.broken_barh(outlines, (slot - 0.4, 0.8), **frame)
        axes.set_xlim(0, steps)
        axes.set_ylim(rows - 0.5, -0.5)
        every = next(every for every in (1, 2, 4, 8, 16, 32, rows) if rows / every <= 24)
        axes.set_yticks(range(0, rows, every))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        keys = [Patch(label=kind, linewidth=0, **look) for kind, look in LOOKS.items()]
        # A title may take the whole width above the axes, so the key is below them.
        place: Fields = {"loc": "outside lower right", "borderaxespad": 0.1}
        figure.legend(handles=keys, ncols=2, frameon=False, fontsize=9, **place)
        style: Fields = {"ha": "center", "va": "center_baseline", "fontsize": 9}
        for bar in tenants:  # its id, in its longest decode if it fits there; not over hatching
            decodes = [(end - start, start) for kind, start, end in bar.pieces if kind == "decode"]
            room, start = max(decodes, default=(0, 0))
            name = bar.request_id.removeprefix("request-")
            if len(name) < LETTERS * room / steps:
                axes.text(start + room / 2, bar.slot, name, parse_math=False, **style)
    return figure
