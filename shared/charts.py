"""One house style for all charts: readable in grey and by the colour-blind, the same bytes for the
same data.

Series differ in colour, lightness, and marker, line style or hatching, any one of which tells them
apart. Each has its name beside it instead of in a legend. There is no global state: pyplot is not
used, and the output depends only on matplotlib's version. A chart function returns a Figure; `save`
and `render` turn it into SVG.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator

# From dark to light in even steps of lightness; the hues stay distinct under the three kinds of
# colour-blindness (tested).
COLOURS = ("#16213f", "#6f3f9a", "#c8501e", "#3aa6a0", "#e9b824")
MARKERS = ("o", "s", "^", "D", "v")
LINES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (3, 1, 1, 1, 1, 1)),
)
# No dots: each would be an outline of its own, 200 kB in all.
HATCHES = ("", "////", "|||", "\\\\\\\\", "xxxx")
MARKS = 12  # markers of a line, about
INK, FAINT = "#222222", "#d9d9d9"
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind words on a mark or line

STYLE: dict[str, Any] = {
    "svg.hashsalt": "staircase",  # ids inside the file would be random
    "svg.fonttype": "none",  # letters stay letters: to be searched, selected and read aloud
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 0.8,
}

# Verdana and Geneva have the widths of DejaVu Sans, for which the pictures are laid out.
FONTS = b"'DejaVu Sans', Verdana, Geneva, sans-serif"
# On a dark page light and dark change places, and hues stay.
DARK = b"""<style>@media (prefers-color-scheme: dark) {
svg { filter: invert(0.89) hue-rotate(180deg); background: #ffffff }
}</style>"""


def new_figure(
    title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (7.2, 4.2)
) -> tuple[Figure, Any]:
    """A figure of `size` inches with one pair of axes, in the house style; the best title states
    the finding.

    For charts that `lines` and `bars` do not cover: draw them with
    `matplotlib.rc_context(style())`. Text added later must be at least 9 points.
    """
    with matplotlib.rc_context(style()):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
    return figure, axes


def lines(
    title: str,
    xlabel: str,
    ylabel: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    dashed: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Lines over the common `x`, each with its name at its end.

    series: name -> a value for each x, at most five names; NaN leaves a gap. dashed: names of
    predictions, drawn thin, broken and without a marker, in the colours of the other series, in
    their order. limits: name -> a value that nothing can exceed, as a horizontal line.
    """
    _check(series, len(x))
    figure, axes = new_figure(title, xlabel, ylabel)
    with matplotlib.rc_context(style()):
        if log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(x), [f"{value:g}" for value in x])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
            # Powers of ten would set exponents too small to read.
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        ends = []
        measured = [name for name in series if name not in dashed]
        for number, (name, values) in enumerate(series.items()):
            group = dashed if name in dashed else measured
            colour = COLOURS[group.index(name)]
            if name in dashed:
                axes.plot(x, values, color=colour, linestyle=(0, (2, 2)), linewidth=1.2)
            else:
                axes.plot(
                    x,
                    values,
                    color=colour,
                    linestyle=LINES[number],
                    marker=MARKERS[number],
                    markeredgecolor="white",
                    markevery=max(1, len(x) // MARKS),
                )
            drawn = [(at, value) for at, value in zip(x, values, strict=True) if value == value]
            ends.append((*drawn[-1], name, colour))
        for name, value in (limits or {}).items():
            axes.axhline(value, color=INK, linewidth=1.0, linestyle=(0, (8, 3)))
            _note(axes, name, (0, value), (4, 4), xycoords=("axes fraction", "data"))
        if not log_y:
            axes.set_ylim(bottom=0)
        _label_ends(figure, axes, ends)
    return figure


def bars(
    title: str,
    xlabel: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    limits: Mapping[str, float] | None = None,
    others: Sequence[str] = (),
    digits: int = 1,
) -> Figure:
    """Horizontal bars in `groups` from top to bottom. Each bar shows its value, and the first bar
    of a series its name.

    series: name -> a value for each group, at most five names; NaN leaves a bar out. limits: name
    -> a value that nothing can exceed, as a vertical line. others: groups drawn lighter, because
    they are not ours.
    """
    _check(series, len(groups))
    thick = 0.8 / len(series)
    height = max(2.4, 1.4 + len(groups) * (0.25 + 0.27 * len(series)))
    figure, axes = new_figure(title, xlabel, "", size=(7.2, height))
    most = max(value for values in series.values() for value in values if value == value)
    with matplotlib.rc_context(style()):
        for number, (name, values) in enumerate(series.items()):
            light = number > 2  # the hatching must show on dark bars and on light ones
            at = [group - 0.4 + (number + 0.5) * thick for group in range(len(groups))]
            drawn = axes.barh(
                at,
                values,
                thick * 0.9,
                color=COLOURS[number],
                hatch=HATCHES[number],
                edgecolor=INK if light else "white",
            )
            drawn[0].set_label(name)
            for bar, whose in zip(drawn, groups, strict=True):
                if whose in others:
                    bar.set_facecolor(COLOURS[3])
            first = next((group for group, value in enumerate(values) if value == value), -1)
            for group, value in enumerate(values):
                if value != value:
                    continue
                text = f"{value:,.{digits}f}" + (
                    f"  {name}" if group == first and len(series) > 1 else ""
                )
                _note(axes, text, (value, at[group]), (5, 0), va="center", zorder=5, bbox=CLEAR)
        for name, value in (limits or {}).items():
            outlined = [withStroke(linewidth=3, foreground="white")]  # it crosses dark bars
            dashes: dict[str, Any] = {"linestyle": (0, (8, 3)), "path_effects": outlined}
            axes.axvline(value, color=INK, linewidth=1.0, **dashes)
            beside = {"xycoords": ("data", "axes fraction"), "ha": "right"}
            _note(axes, name, (value, 0), (-4, 4), **beside)
            most = max(most, value)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5 + (0.3 if limits else 0), -0.5)
        axes.set_xlim(0, most * 1.05)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
    return figure


def render(figure: Figure) -> bytes:
    """The figure as SVG: the same bytes for the same figure and the same version of matplotlib.

    A screen reader reads its title, and as its description all other words in it. On a dark page it
    is dark.
    """
    target = io.BytesIO()
    title = figure.axes[0].get_title(loc="left") if figure.axes else ""
    if figure.get_suptitle():
        title = figure.get_suptitle()
    with matplotlib.rc_context(style()):
        metadata: dict[str, Any] = {"Date": None, "Title": " ".join(title.split())}
        figure.savefig(target, format="svg", bbox_inches="tight", metadata=metadata)
    # matplotlib leaves blanks at the ends of lines, which git complains about.
    content = b"\n".join(line.rstrip() for line in target.getvalue().splitlines()) + b"\n"
    content = content.replace(b"'DejaVu Sans'", FONTS)
    # Its ids are hashes of floats, whose last bits differ from processor to processor.
    ids = dict.fromkeys(re.findall(rb'id="([a-z][0-9a-f]{10})"', content))
    mark = zlib.crc32(title.encode())
    for number, name in enumerate(ids):
        content = content.replace(name, b"i%08x-%d" % (mark, number))
    words = dict.fromkeys(re.findall(rb"<text[^>]*>([^<]*[A-Za-z][^<]*)</text>", content))
    words.pop(metadata["Title"].encode(), None)
    described = b"<desc>" + b"; ".join(words) + b"</desc>\n" + DARK
    return content.replace(b"</title>", b"</title>\n" + described, 1)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, and make its folder if that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(render(figure))


def style() -> dict[str, Any]:
    """The whole style: matplotlib's defaults with ours, whatever the user's own matplotlibrc
    says."""
    return {
        key: value
        for key, value in matplotlib.rcParamsDefault.items()
        if not key.startswith("backend")
    } | STYLE


def _check(series: Mapping[str, Sequence[float]], length: int) -> None:
    """Raises ValueError where a chart would lie or fail: also where all rows were refused."""
    if not 1 <= len(series) <= len(COLOURS):
        raise ValueError(f"{len(series)} series: one to {len(COLOURS)} can be told apart")
    for name, values in series.items():
        if len(values) != length or all(value != value for value in values):
            raise ValueError(f"{name!r} has {len(values)} values for {length} places, or only NaN")


def _label_ends(figure: Figure, axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name right of its end, moved up or down where two would overlap, and never
    up into the title."""
    figure.draw_without_rendering()  # lays out the axes, so that data can be converted to pixels
    right, top = axes.transAxes.transform((1, 1))
    gap = 13 * figure.dpi / 72  # points between two lines of text
    wanted = sorted((axes.transData.transform(end[:2])[1], end) for end in ends)
    heights: list[float] = []
    for height, _ in wanted:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    shift = sum(height - want[0] for height, want in zip(heights, wanted, strict=True)) / len(
        wanted
    )
    shift = max(shift, heights[-1] - top + gap / 2)
    for height, (middle, (x, y, name, colour)) in zip(heights, wanted, strict=True):
        start = axes.transData.transform((x, y))[0]
        offset = (right - start + 8, height - shift - middle)
        points = offset[0] * 72 / figure.dpi, offset[1] * 72 / figure.dpi
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)}
        look = {"va": "center", "color": INK, "annotation_clip": False}
        _note(axes, name, (x, y), points, arrowprops=line | {"shrinkA": 0, "shrinkB": 6}, **look)


def _note(
    axes: Any, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """Words beside a point of the data, `offset` in points from it."""
    axes.annotate(text, at, offset, textcoords="offset points", fontsize=9, **look)
