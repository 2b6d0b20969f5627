"""What the slots did, step by step: as a Gantt chart, and as a trace for ui.perfetto.dev or chrome://tracing.

Both are drawn from the engine's step records and from nothing else, so they show what was run and not what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared import charts

from .engine import SlotsRecord

# Prefill is dark and hatched, decode light and plain: enough for a print in grey.
LOOKS: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": charts.COLOURS[1], "hatch": charts.HATCHES[1], "edgecolor": "white"},
    "decode": {"facecolor": charts.COLOURS[4], "edgecolor": "none"},
}
LETTER = 0.72  # width of a letter as a share of its size, rounded up


@dataclass
class Bar:
    """One request's time in one slot: steps `start` to `end`, the last not counted, and the pieces that computed something.

    pieces: (kind, start, end), "prefill" or "decode". Between two pieces the budget had nothing left for it.
    """

    slot: int
    request_id: str
    start: int
    end: int
    pieces: list[tuple[str, int, int]]


def bars(steps: Sequence[SlotsRecord]) -> list[Bar]:
    """Who had which slot and when, by slot and then by time. Steps are counted from the first of `steps`, which is 0."""
    done: list[Bar] = []
    open_bars: dict[int, Bar] = {}  # by slot
    for number, step in enumerate(steps):
        for each in step.slots:
            bar = open_bars.get(each.slot)
            if (
                bar is None or bar.request_id != each.request_id
            ):  # an aborted request leaves without a word in the record
                bar = open_bars[each.slot] = Bar(each.slot, each.request_id, number, number, [])
                done.append(bar)
            kind = "prefill" if each.prefill_tokens else "decode"
            if bar.pieces and bar.pieces[-1][::2] == (kind, number):
                bar.pieces[-1] = (kind, bar.pieces[-1][1], number + 1)
            else:
                bar.pieces.append((kind, number, number + 1))
            bar.end = number + 1
            if each.finish_reason is not None:
                del open_bars[each.slot]
    return sorted(done, key=lambda bar: (bar.slot, bar.start))


def gantt(steps: Sequence[SlotsRecord], title: str, slots: int | None = None) -> Figure:
    """Slots from top to bottom, steps from left to right: one bar for each request in a slot, labelled where there is room.

    slots: how many to draw, used or not; None: up to the highest that was used. ValueError if there are no steps.
    """
    if not steps:
        raise ValueError("no steps, so there is nothing to draw")
    tenants = bars(steps)
    rows = max(slots or 0, 1 + max((bar.slot for bar in tenants), default=0))
    figure, axes = charts.new_figure(title, "step", "slot", size=(7.2, min(12, 1.8 + 0.3 * rows)))
    with matplotlib.rc_context(charts.style()):
        for slot in range(rows):
            mine = [bar for bar in tenants if bar.slot == slot]
            for kind, look in LOOKS.items():
                pieces = [
                    (start, end - start)
                    for bar in mine
                    for of, start, end in bar.pieces
                    if of == kind
                ]
                if pieces:
                    axes.broken_barh(pieces, (slot - 0.4, 0.8), linewidth=0, **look)
            axes.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in mine], (slot - 0.4, 0.8),
                facecolor="none", edgecolor=charts.INK, linewidth=0.8,
            )  # fmt: skip
        axes.set_xlim(0, len(steps))
        axes.set_ylim(rows - 0.5, -0.5)
        every = next(every for every in (1, 2, 4, 8, 16, 32, rows) if rows / every <= 24)
        axes.set_yticks(range(0, rows, every))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        keys = [Patch(label=kind, linewidth=0, **look) for kind, look in LOOKS.items()]
        # A title may take the whole width above the axes, so the key stands below them.
        figure.legend(
            handles=keys,
            ncols=2,
            loc="outside lower right",
            frameon=False,
            borderaxespad=0.1,
            fontsize=9,
        )
        _label(figure, axes, tenants)
    return figure


def _label(figure: Figure, axes: Any, tenants: Sequence[Bar]) -> None:
    """Write each request's id into the longest decode of its bar, if it fits there: hatching hides letters."""
    figure.draw_without_rendering()  # lays the axes out, so that steps can be told in points
    box = axes.get_window_extent()
    points = 72 / figure.dpi
    step, height = (
        box.width * points / axes.get_xlim()[1],
        box.height * points / abs(axes.get_ylim()[0] - axes.get_ylim()[1]),
    )
    if height * 0.8 < 10:
        return
    for bar in tenants:
        plain = [(end - start, start, end) for kind, start, end in bar.pieces if kind == "decode"]
        if not plain:
            continue
        room, start, end = max(plain)
        for words in (
            bar.request_id,
            bar.request_id.removeprefix("request-"),
        ):  # the engine's own names end in a number
            if LETTER * 9 * len(words) + 4 <= room * step:
                axes.text(
                    (start + end) / 2, bar.slot, words, ha="center", va="center_baseline", fontsize=9, parse_math=False
                )  # fmt: skip
                break


def perfetto(steps: Sequence[SlotsRecord]) -> dict[str, Any]:
    """Chrome's trace event format, as an object for json.dump: microseconds from the start of the first step.

    A track for each slot, with a slice for each request and pass; counters for the rows of a pass and for the requests that
    wait for a slot.
    """
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(steps))}


def _events(steps: Sequence[SlotsRecord]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "engine"}}
    for slot in sorted({each.slot for step in steps for each in step.slots}):
        # Tracks are told apart by the thread id, and 0 would not be one of its own in every viewer.
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": slot + 1,
            "args": {"name": f"slot {slot}"},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": 1,
            "tid": slot + 1,
            "args": {"sort_index": slot},
        }
    end = 0.0
    for number, step in enumerate(steps):
        start = round((step.started - steps[0].started) * 1e6, 3)
        end = round((step.started + step.seconds - steps[0].started) * 1e6, 3)
        for counter, value in (("rows", step.rows), ("waiting", step.waiting)):
            yield {
                "ph": "C",
                "name": counter,
                "pid": 1,
                "tid": 0,
                "ts": start,
                "args": {counter: value},
            }
        for each in step.slots:
            args: dict[str, Any] = {
                "step": number,
                "prefill_tokens": each.prefill_tokens,
                "decode_tokens": each.decode_tokens,
            }
            if each.finish_reason is not None:
                args["finish_reason"] = each.finish_reason
            yield {
                "ph": "X",
                "name": each.request_id,
                "cat": "prefill" if each.prefill_tokens else "decode",
                "pid": 1,
                "tid": each.slot + 1,
                "ts": start,
                "dur": round(end - start, 3),
                "args": args,
            }
    if steps:
        for counter in ("rows", "waiting"):  # or the last values would seem to last for ever
            yield {"ph": "C", "name": counter, "pid": 1, "tid": 0, "ts": end, "args": {counter: 0}}
