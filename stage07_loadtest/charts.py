"""Charts of a load test, drawn from summaries alone: of one server, or of several by name.

Unless named otherwise, latencies count from the intended start and are adjusted: a failed request
took infinitely long. So a line ends where a percentile is infinite, and marks are hollow where some
requests failed. Points with the same load are repeats: the line connects their medians, and a
stroke shows their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator

from shared import charts

from .metrics import (
    CURVE,
    E2E,
    E2E_INTENDED,
    ITL,
    PER_REQUEST,
    TPOT,
    TTFT,
    TTFT_INTENDED,
    Slo,
    Summary,
    knee,
)

Servers = Mapping[str, Sequence[Summary]]  # points by the name of a server, at most five
TITLES = {
    TTFT: "TTFT from sending",
    TTFT_INTENDED: "TTFT",
    TPOT: "TPOT",
    ITL: "ITL",
    E2E: "E2E latency from sending",
    E2E_INTENDED: "E2E latency",
}
SHOWN = (50, 90, 95)  # percentiles of a single server
USERS, RATE = "users (closed loop)", "requests/s offered (open loop)"
HOLLOW = "hollow: some requests failed"
DASHES = (0, (8, 3))
TICKS, EDGES = (0, 50, 75, 90, 95, 98, 99, 100), {0: "fastest", 100: "slowest"}  # of a distribution

# Load on the x axis, values of all repeats, whether requests failed.
Mark = tuple[float, list[float], bool]


def throughput(servers: Servers, title: str = "Throughput against users") -> Figure:
    """Output tok/s against users."""
    marks = {
        name: _marks(_closed(points), lambda point: point.output_rate)
        for name, points in servers.items()
    }
    return _curves(title, USERS, "output tok/s", marks, log_x=True)


def latency(servers: Servers, name: str, percent: int = 95, title: str = "") -> Figure:
    """One latency against users: the percentiles SHOWN of one server, or the `percent`th of
    several."""
    closed = {server: _closed(points) for server, points in servers.items()}
    ylabel, marks = _percentiles(closed, name, percent)
    return _curves(
        title or f"{TITLES[name]} against users", USERS, ylabel, marks, log_x=True, log_y=True
    )


def offered(points: Sequence[Summary]) -> Figure:
    """The percentiles SHOWN of E2E latency against the offered load. The knee is marked by a line,
    or only noted if the loads do not reach both sides of it."""
    opened = _opened(points)
    ylabel, marks = _percentiles({"": opened}, E2E_INTENDED)
    figure = _curves("E2E latency against offered load", RATE, ylabel, marks, log_y=True)
    axes: Any = figure.axes[0]
    if (best := knee(opened)) is None:
        return figure
    at, least, most = _load(best), min(map(_load, opened)), max(map(_load, opened))
    text, place, offset, align = f"knee, {at:.3g}/s", at, 4, "left"
    if least < at < most:
        axes.axvline(at, color=charts.INK, linewidth=1.0, linestyle=DASHES, zorder=1)
    elif at == least:
        text = f"no knee from {at:.3g}/s on"
    else:
        text, place, offset, align = f"no knee up to {at:.3g}/s", axes.get_xlim()[1], -4, "right"
    where: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(text, (place, 0), (offset, 4), **where, fontsize=9, ha=align)
    return figure


def distribution(points: Mapping[str, Summary], name: str, title: str = "") -> Figure:
    """The percentiles of TTFT or ITL of up to five points, by name.

    Points without values are left out. The axis is stretched towards the slowest values, since that
    is where points differ.
    """
    raw = {
        label: point.latency[name].curve for label, point in points.items() if name in point.latency
    }
    unit, factor = _unit([value for curve in raw.values() for value in curve])
    # Chunks that arrived together have a gap of 0, which has no logarithm.
    curves = {
        label: [value * factor if 0 < value < math.inf else math.nan for value in curve]
        for label, curve in raw.items()
    }
    curves = {label: curve for label, curve in curves.items() if not all(map(math.isnan, curve))}
    xlabel = f"percentile of the {'gaps' if name == ITL else 'requests'}"
    if any(math.isinf(value) for curve in raw.values() for value in curve):
        xlabel += "; a line ends where requests failed"
    figure = charts.lines(
        title or f"{TITLES[name]}: from the fastest to the slowest",
        xlabel,
        f"{TITLES[name]}, {unit}",
        [_stretched(percent) for percent in CURVE],
        curves,
        log_y=True,
    )
    axes: Any = figure.axes[0]
    axes.set_xticks(
        [_stretched(percent) for percent in TICKS],
        [f"p{percent}" if 0 < percent < 100 else EDGES[percent] for percent in TICKS],
    )
    for line in axes.get_lines():
        line.set_markevery([CURVE.index(percent) for percent in TICKS])
    medians = [curve[CURVE.index(50)] for curve in curves.values()]
    # Values below a tenth of the medians would squeeze the rest.
    least = min((value for value in medians if not math.isnan(value)), default=0.0) / 10
    axes.set_ylim(bottom=max(axes.get_ylim()[0], least))
    _plain_ticks(axes)
    return figure


def goodput(points: Sequence[Summary]) -> Figure:
    """Requests/s within the limits against the offered load, beside all that succeeded."""
    opened = _opened(points)
    marks = {
        "answered": _marks(opened, lambda point: point.request_rate),
        "within limits": _marks(opened, lambda point: point.goodput),
    }
    figure = _curves(f"Goodput: {opened[0].slo}", RATE, "requests/s", marks)
    most = max(map(_load, opened))
    axes: Any = figure.axes[0]
    axes.plot([0, most], [0, most], color=charts.INK, linewidth=1.0, linestyle=DASHES, zorder=1)
    middle, beside = (most / 2, most / 2), {"textcoords": "offset points", "ha": "right"}
    axes.annotate("all that is offered", middle, (-6, 4), **beside, fontsize=9)
    return figure


def figures(points: Sequence[Summary]) -> dict[str, Callable[[], Figure]]:
    """Every chart for which a run has enough points, by the stem of its file."""
    by_stem: dict[str, Callable[[], Figure]] = {}
    closed, opened = _closed(points), _opened(points)
    servers = {" and ".join(sorted({point.workload for point in points})): points}
    if len({point.users for point in closed}) > 1:
        by_stem["throughput"] = partial(throughput, servers)
    for name in (TTFT_INTENDED, TPOT):
        if len({point.users for point in _answered(closed, name)}) > 1:
            by_stem[f"{name}_users"] = partial(latency, servers, name)
    if len({point.rate for point in _answered(opened, E2E_INTENDED)}) > 1:
        by_stem["offered_load"] = partial(offered, points)
        if all(point.slo != Slo() for point in opened):
            by_stem["goodput"] = partial(goodput, points)
    for name in (TTFT_INTENDED, ITL):
        answered = _answered(closed or opened or points, name)
        if by_load := {point.load: point for point in _spread(answered)}:
            by_stem[f"{name}_distribution"] = partial(distribution, by_load, name)
    return by_stem


def draw(points: Sequence[Summary], folder: Path) -> list[Path]:
    """Write the charts of `figures` into `folder`; returns the files."""
    paths = []
    for stem, figure in figures(points).items():
        paths.append(folder / f"{stem}.svg")
        charts.save(figure(), paths[-1])
    return paths


# ---- from points to marks -----------------------------------------------------------------------


def _closed(points: Sequence[Summary]) -> list[Summary]:
    return [point for point in points if point.users is not None]


def _opened(points: Sequence[Summary]) -> list[Summary]:
    """Points with Poisson arrivals: bursts and traces do not belong on an axis of rates."""
    return [point for point in points if point.kind == "poisson"]


def _answered(points: Sequence[Summary], name: str) -> list[Summary]:
    """Points whose median of this latency is finite and can be drawn."""
    medians = [_percentile(point, name, 50) for point in points]
    return [
        point
        for point, value in zip(points, medians, strict=True)
        if value is not None and 0 < value < math.inf
    ]


def _spread(points: Sequence[Summary]) -> list[Summary]:
    """At most five points, spread from the least load to the most."""
    by_load = {_load(point): point for point in points}
    ordered = [by_load[load] for load in sorted(by_load)]
    most = len(charts.COLOURS)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(number * (len(ordered) - 1) / (most - 1))] for number in range(most)]


def _load(point: Summary) -> float:
    """A point's place on the x axis."""
    return float(point.users if point.users is not None else point.rate or 0.0)


def _marks(points: Sequence[Summary], of: Callable[[Summary], float | None]) -> list[Mark]:
    """The values of `of` for each load, over its repeats; None values are left out."""
    marks = []
    for load in sorted({_load(point) for point in points}):
        repeats = [point for point in points if _load(point) == load]
        values = [value for value in map(of, repeats) if value is not None]
        if values:
            marks.append((load, values, any(point.succeeded < point.requests for point in repeats)))
    return marks


def _percentiles(
    servers: Servers, name: str, percent: int = 95
) -> tuple[str, dict[str, list[Mark]]]:
    """The label of the y axis, and the lines."""
    shown = SHOWN if len(servers) == 1 else (percent,)
    seconds = [
        _percentile(point, name, percent)
        for points in servers.values()
        for point in points
        for percent in shown
    ]
    unit, factor = _unit([value for value in seconds if value is not None])

    def value(percent: int, point: Summary) -> float | None:
        seconds = _percentile(point, name, percent)
        return None if seconds is None else seconds * factor

    if len(servers) > 1:
        marks = {
            server: _marks(points, partial(value, percent)) for server, points in servers.items()
        }
        return f"{TITLES[name]}, p{percent}, {unit}", marks
    (points,) = servers.values()
    return f"{TITLES[name]}, {unit}", {
        f"p{percent}": _marks(points, partial(value, percent)) for percent in SHOWN
    }


def _percentile(point: Summary, name: str, percent: int) -> float | None:
    """In seconds; adjusted for a latency in which failures count as infinity."""
    return point.at(name, percent, adjusted=name in PER_REQUEST)


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    """(unit, units per second) in which these times are shown."""
    most = max((value for value in seconds if math.isfinite(value)), default=0.0)
    return ("ms", 1e3) if most < 2 else ("s", 1.0)


# ---- drawing ------------------------------------------------------------------------------------


def _curves(
    title: str, xlabel: str, ylabel: str, series: Mapping[str, Sequence[Mark]], **scales: bool
) -> Figure:
    """Lines whose marks need not share their places on the x axis. Raises ValueError if there is
    nothing to draw."""
    least = 0.0 if scales.get("log_y") else -math.inf  # 0 has no logarithm
    series = {
        name: [mark for mark in marks if least < median(mark[1]) < math.inf]
        for name, marks in series.items()
    }
    series = {name: marks for name, marks in series.items() if marks}
    places = sorted({at for marks in series.values() for at, _, _ in marks})
    medians = {
        name: {at: median(values) for at, values, _ in marks} for name, marks in series.items()
    }
    if any(failed for marks in series.values() for _, _, failed in marks):
        xlabel += f"; {HOLLOW}"
    table = {name: [line.get(at, math.nan) for at in places] for name, line in medians.items()}
    figure = charts.lines(title, xlabel, ylabel, places, table, **scales)  # type: ignore[arg-type]
    axes: Any = figure.axes[0]
    lines, labels = list(axes.get_lines()), {text.get_text(): text for text in axes.texts}
    for number, (line, (name, marks)) in enumerate(zip(lines, series.items(), strict=True)):
        # A load that only another server has leaves no gap in a line; a name stays at its line's
        # end.
        line.set_data([at for at, _, _ in marks], [median(values) for _, values, _ in marks])
        if marks[-1][0] < places[-1]:
            labels[name].xyann = (12, labels[name].xyann[1])
        _details(axes, number, marks)
    if inner := [labels[name] for name, marks in series.items() if marks[-1][0] < places[-1]]:
        _lift(axes, inner)
    if scales.get("log_y"):
        _plain_ticks(axes)
    return figure


def _lift(axes: Any, inner: Sequence[Any]) -> None:
    """Move up the names of lines that end early, one line of text at a time, until they cover no
    mark."""
    for _ in range(3):
        axes.figure.draw_without_rendering()
        marks = axes.transData.transform(
            [at for line in axes.get_lines() for at in line.get_xydata()]
        )
        # Text's own extent: that of an annotation includes its line.
        boxes = [Text.get_window_extent(label).padded(6) for label in inner]
        if not any(box.contains(*mark) for box in boxes for mark in marks):
            return
        for label in inner:
            label.xyann = (12, label.xyann[1] + 13)


def _details(axes: Any, number: int, marks: Sequence[Mark]) -> None:
    """Draw the range of repeats, and hollow marks."""
    colour, marker = charts.COLOURS[number], charts.MARKERS[number]
    for at, values, failed in marks:
        known = [value for value in values if math.isfinite(value)]
        if len(values) > 1:
            axes.vlines(at, min(known), max(known), color=colour, linewidth=1.2)
        if failed:
            axes.plot(
                at,
                median(values),
                marker=marker,
                markerfacecolor="white",
                markeredgecolor=colour,
                markeredgewidth=1.4,
                zorder=4,
            )


def _plain_ticks(axes: Any) -> None:
    """Label a logarithmic axis of times without exponents, whether it has many decades or part of
    one."""
    low, high = axes.get_ylim()
    steps: tuple[float, ...] = (1,)
    if high / low < 10:
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    elif high / low < 2000:
        steps = (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()


def _stretched(percent: float) -> float:
    """The place of a percentile on the x axis: equal steps for each tenth of the remaining share,
    ending at the slowest value."""
    return -math.log10(max(1 - percent / 100, 0.003))
