"""Charts of a load test, drawn from summaries alone: of one server, or of several by name.

Latencies count from the intended start if nothing else is said, and are adjusted: a failed request is one that took forever. So
a line ends where a percentile is infinite, and where some requests failed its mark is hollow. Points with the same load are
repeats: the line goes through their medians, and a stroke shows their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
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
WORDS = {
    TTFT: "TTFT from sending", TTFT_INTENDED: "TTFT", TPOT: "TPOT", ITL: "ITL", E2E: "E2E latency from sending",
    E2E_INTENDED: "E2E latency",
}  # fmt: skip
SHOWN = (50, 90, 95)  # percentiles, where there is one server
USERS, RATE = "users (closed loop)", "requests/s offered (open loop)"
HOLLOW, RINGED = "hollow: some requests failed", "ringed: the knee"
TICKS, EDGES = (0, 50, 75, 90, 95, 98, 99, 100), {0: "fastest", 100: "slowest"}  # of a distribution

# A mark: place on the x axis, values of all repeats, whether requests failed.
Mark = tuple[float, list[float], bool]


def throughput(servers: Servers, title: str = "Throughput against users") -> Figure:
    """Output tok/s against users."""
    marks = {
        name: _marks(_closed(points), lambda point: point.output_rate)
        for name, points in servers.items()
    }
    return _curves(title, USERS, "output tok/s", marks, log_x=True)


def latency(servers: Servers, name: str, percent: int = 95, title: str = "") -> Figure:
    """One latency against users: some percentiles of one server, or the `percent`th of several."""
    closed = {server: _closed(points) for server, points in servers.items()}
    ylabel, marks = _percentiles(closed, name, percent)
    return _curves(
        title or f"{WORDS[name]} against users", USERS, ylabel, marks, log_x=True, log_y=True
    )


def offered(
    servers: Servers, name: str = E2E_INTENDED, percent: int = 95, title: str = ""
) -> Figure:
    """One latency against the load that is offered: some percentiles of one server, or the `percent`th of several. The knee is
    marked."""
    opened = {server: _opened(points) for server, points in servers.items()}
    ylabel, marks = _percentiles(opened, name, percent)
    alone = len(servers) == 1
    figure = _curves(
        title or f"{WORDS[name]} against offered load",
        RATE if alone else f"{RATE}; {RINGED}",
        ylabel,
        marks,
        log_y=True,
    )
    axes: Any = figure.axes[0]
    for server, points in opened.items():
        found, loads = knee(points), sorted(_load(point) for point in points)
        if found is None:
            continue
        at, values = _load(found), {place: median(each) for place, each, _ in marks.get(server, [])}
        if not alone:
            if at < loads[-1] and math.isfinite(values.get(at, math.inf)):
                ring = {"markerfacecolor": "none", "markeredgecolor": charts.INK}
                axes.plot(at, values[at], marker="o", markersize=13, zorder=5, **ring)
            continue
        text, side, place = f"knee, {at:.3g}/s", 1, (at, 0)
        if at == loads[-1]:  # it lies farther up, if anywhere
            text, side, place = f"no knee up to {at:.3g}/s", -1, (axes.get_xlim()[1], 0)
        else:
            axes.axvline(at, color=charts.INK, linewidth=1.0, linestyle=(0, (8, 3)), zorder=1)
        axes.annotate(
            text, place, (4 * side, 4), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9,
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    return figure


def distribution(points: Mapping[str, Summary], name: str, title: str = "") -> Figure:
    """TTFT or ITL of up to five points, by name: how much time so many percent of the values do not exceed. Points without values
    are left out. The axis is stretched towards the slowest, since that is where points differ."""
    found = {
        label: point.latency[name].curve for label, point in points.items() if name in point.latency
    }
    unit, factor = _unit([value for curve in found.values() for value in curve])
    # Chunks that came together are no time apart, for which a logarithm has no place.
    curves = {
        label: [value * factor if 0 < value < math.inf else math.nan for value in curve]
        for label, curve in found.items()
    }
    curves = {
        label: curve for label, curve in curves.items() if any(value == value for value in curve)
    }
    xlabel = f"percentile of the {'gaps' if name == ITL else 'requests'}"
    if any(math.isinf(value) for curve in found.values() for value in curve):
        xlabel += "; a line ends where requests failed"
    figure = charts.lines(
        title or f"{WORDS[name]}: from the fastest to the slowest", xlabel, f"{WORDS[name]}, {unit}",
        [_stretched(percent) for percent in CURVE], curves, log_y=True,
    )  # fmt: skip
    axes: Any = figure.axes[0]
    axes.set_xticks(
        [_stretched(percent) for percent in TICKS],
        [f"p{percent}" if 0 < percent < 100 else EDGES[percent] for percent in TICKS],
    )
    for line in axes.get_lines():
        line.set_markevery([CURVE.index(percent) for percent in TICKS])
    medians = [curve[CURVE.index(50)] for curve in curves.values()]
    least = (
        min((value for value in medians if value == value), default=0.0) / 10
    )  # what is faster still would squeeze the rest
    axes.set_ylim(bottom=max(axes.get_ylim()[0], least))
    _plain_ticks(axes)
    return figure


def goodput(servers: Servers, title: str = "") -> Figure:
    """Requests/s within the limits against what is offered: of one server beside all that succeeded, or of several."""
    opened = {name: _opened(points) for name, points in servers.items()}
    limits = next(str(point.slo) for points in opened.values() for point in points)
    marks = {name: _marks(points, lambda point: point.goodput) for name, points in opened.items()}
    if len(servers) == 1:
        (points,) = opened.values()
        marks = {
            "answered": _marks(points, lambda point: point.request_rate),
            "within limits": _marks(points, lambda point: point.goodput),
        }
    figure = _curves(title or f"Goodput: {limits}", RATE, "requests/s", marks)
    most = max(at for each in marks.values() for at, _, _ in each)
    figure.axes[0].plot(
        [0, most], [0, most], color=charts.INK, linewidth=1.0, linestyle=(0, (8, 3)), zorder=1
    )
    figure.axes[0].annotate(
        "all that is offered",
        (most / 2, most / 2),
        (-6, 4),
        textcoords="offset points",
        fontsize=9,
        ha="right",
    )
    return figure


def figures(points: Sequence[Summary]) -> dict[str, Callable[[], Figure]]:
    """Every chart that one run's points are enough for, by the stem of its file."""
    found: dict[str, Callable[[], Figure]] = {}
    closed, opened = _closed(points), _opened(points)
    servers = {" and ".join(sorted({point.workload for point in points})): points}
    if len({point.users for point in closed}) > 1:
        found["throughput"] = partial(throughput, servers)
    for name in (TTFT_INTENDED, TPOT):
        if len({point.users for point in _answered(closed, name)}) > 1:
            found[f"{name}_users"] = partial(latency, servers, name)
    if len({point.rate for point in _answered(opened, E2E_INTENDED)}) > 1:
        found["offered_load"] = partial(offered, servers)
        if all(point.slo != Slo() for point in opened):
            found["goodput"] = partial(goodput, servers)
    for name in (TTFT_INTENDED, ITL):
        if some := {
            point.load: point for point in _spread(_answered(closed or opened or points, name))
        }:
            found[f"{name}_distribution"] = partial(distribution, some, name)
    return found


def draw(points: Sequence[Summary], folder: Path) -> list[Path]:
    """Write those charts into `folder`; returns the files."""
    paths = []
    for stem, figure in figures(points).items():
        paths.append(folder / f"{stem}.svg")
        charts.save(figure(), paths[-1])
    return paths


# ---- from points to marks -------------------------------------------------------------------------------------------


def _closed(points: Sequence[Summary]) -> list[Summary]:
    return [point for point in points if point.users is not None]


def _opened(points: Sequence[Summary]) -> list[Summary]:
    """Poisson arrivals only: a burst or a trace is no place on an axis of rates."""
    return [point for point in points if point.kind == "poisson"]


def _answered(points: Sequence[Summary], name: str) -> list[Summary]:
    """Those in which at least half of the requests have this latency, and it can be seen."""
    medians = [_percentile(point, name, 50) for point in points]
    return [
        point
        for point, value in zip(points, medians, strict=True)
        if value is not None and 0 < value < math.inf
    ]


def _spread(points: Sequence[Summary]) -> list[Summary]:
    """At most five of them, from the least load to the most."""
    by_load = {_load(point): point for point in points}
    ordered = [by_load[load] for load in sorted(by_load)]
    most = len(charts.COLOURS)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(number * (len(ordered) - 1) / (most - 1))] for number in range(most)]


def _load(point: Summary) -> float:
    """The place on the x axis."""
    return float(point.users if point.users is not None else point.rate or 0.0)


def _marks(points: Sequence[Summary], of: Callable[[Summary], float | None]) -> list[Mark]:
    """By load, what `of` says of all its repeats; without those of which it says nothing."""
    found = []
    for load in sorted({_load(point) for point in points}):
        repeats = [point for point in points if _load(point) == load]
        values = [value for value in map(of, repeats) if value is not None]
        if values:
            found.append((load, values, any(point.succeeded < point.requests for point in repeats)))
    return found


def _percentiles(servers: Servers, name: str, percent: int) -> tuple[str, dict[str, list[Mark]]]:
    """The label of the y axis, and the lines."""
    shown = SHOWN if len(servers) == 1 else (percent,)
    every = [
        _percentile(point, name, each)
        for points in servers.values()
        for point in points
        for each in shown
    ]
    unit, factor = _unit([value for value in every if value is not None])

    def value(percent: int, point: Summary) -> float | None:
        found = _percentile(point, name, percent)
        return None if found is None else found * factor

    if len(servers) > 1:
        marks = {
            server: _marks(points, partial(value, percent)) for server, points in servers.items()
        }
        return f"{WORDS[name]}, p{percent}, {unit}", marks
    (points,) = servers.values()
    return f"{WORDS[name]}, {unit}", {
        f"p{each}": _marks(points, partial(value, each)) for each in SHOWN
    }


def _percentile(point: Summary, name: str, percent: int) -> float | None:
    """In seconds; adjusted, if failures have a place among the values."""
    return point.at(name, percent, adjusted=name in PER_REQUEST)


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    """In what some times read best, and how many of it a second has."""
    most = max((value for value in seconds if math.isfinite(value)), default=0.0)
    return ("ms", 1e3) if most < 2 else ("s", 1.0)


# ---- drawing --------------------------------------------------------------------------------------------------------


def _curves(
    title: str, xlabel: str, ylabel: str, series: Mapping[str, Sequence[Mark]], **scales: bool
) -> Figure:
    """Lines whose marks need not stand at the same places. Raises ValueError if there is nothing to draw."""
    least = 0.0 if scales.get("log_y") else -math.inf  # a logarithm has no place for nothing
    series = {
        name: [mark for mark in marks if least < median(mark[1]) < math.inf]
        for name, marks in series.items()
    }
    series = {name: marks for name, marks in series.items() if marks}
    places = sorted({at for marks in series.values() for at, _, _ in marks})
    values = {name: {at: median(each) for at, each, _ in marks} for name, marks in series.items()}
    if any(failed for marks in series.values() for _, _, failed in marks):
        xlabel += f"; {HOLLOW}"
    table = {name: [found.get(at, math.nan) for at in places] for name, found in values.items()}
    figure = charts.lines(title, xlabel, ylabel, places, table, **scales)  # type: ignore[arg-type]
    axes: Any = figure.axes[0]
    lines, labels = list(axes.get_lines()), {text.get_text(): text for text in axes.texts}
    for number, (line, (name, marks)) in enumerate(zip(lines, series.items(), strict=True)):
        # A place where only another server was measured is no gap in this one's line, nor is its end far from its name.
        line.set_data([at for at, _, _ in marks], [median(each) for _, each, _ in marks])
        if marks[-1][0] < places[-1]:
            labels[name].xyann = (12, labels[name].xyann[1])
        _details(axes, number, marks)
    if scales.get("log_y"):
        _plain_ticks(axes)
    return figure


def _details(axes: Any, number: int, marks: Sequence[Mark]) -> None:
    """The range of repeats, and hollow marks."""
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
    """Numbers without exponents along an axis of times that may be less than one decade long, or many."""
    low, high = axes.get_ylim()
    steps = (
        (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
        if high / low < 10
        else (1, 2, 5)
        if high / low < 2000
        else (1,)
    )
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()


def _stretched(percent: float) -> float:
    """The place of a percentile: each step is a tenth of the share that is left, and the last one ends at the slowest."""
    return -math.log10(max(1 - percent / 100, 0.003))
