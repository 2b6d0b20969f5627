"""One house style for all charts: readable in grey and by the colour-blind, the same bytes for the
same data.

Series differ in colour, lightness, and marker, line style or hatching, any one of which tells them
apart. There is no global state: pyplot is not used, and the output depends only on matplotlib's
version. A chart function returns a Figure; `render` turns it into SVG.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

# From dark to light in even steps of lightness; the hues stay distinct under the three kinds of
# colour-blindness.
COLOURS = ("#16213f", "#6f3f9a", "#c8501e", "#3aa6a0", "#e9b824")
MARKERS = ("o", "s", "^", "D", "v")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))
# No dots: each would be an outline of its own, 200 kB in all.
HATCHES = ("", "////", "|||", "\\\\\\\\", "xxxx")
MARKS = 12  # markers of a line, about
INK, FAINT = "#222222", "#d9d9d9"
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # right of the axes

STYLE: dict[str, Any] = {
    "svg.hashsalt": "staircase",  # ids inside the file would be random
    "svg.fonttype": "none",  # letters stay letters: to be searched, selected and read aloud
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
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
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE |= dict.fromkeys(INKED, INK)

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
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def lines(
    title: str,
    xlabel: str,
    ylabel: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    dashed: Sequence[str] = (),
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Lines over the common `x`, named beside the axes from the highest end to the lowest.

    series: name -> a value for each x, at most five names; NaN leaves a gap. dashed: names of
    predictions and limits, drawn thin, broken and without a marker, in the colours of the other
    series, in their order.
    """
    figure, axes = new_figure(title, xlabel, ylabel)
    measured = [name for name in series if name not in dashed]
    with matplotlib.rc_context(style()):
        for number, (name, values) in enumerate(series.items()):
            group = dashed if name in dashed else measured
            look: dict[str, Any] = {"linestyle": (0, (2, 2)), "linewidth": 1.2}
            if group is measured:
                look = {"linestyle": LINES[number], "marker": MARKERS[number]}
                look |= {"markeredgecolor": "white", "markevery": max(1, len(x) // MARKS)}
            axes.plot(x, values, label=name, color=COLOURS[group.index(name)], **look)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(x), [f"{value:g}" for value in x])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")  # an exponent is too small to read
        else:
            axes.set_ylim(bottom=0)
        ends = sorted(axes.get_lines(), key=lambda line: -line.get_ydata()[-1])
        axes.legend(handles=ends, **BESIDE)
    return figure


def bars(
    title: str,
    xlabel: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    digits: int = 1,
) -> Figure:
    """Horizontal bars in `groups` from top to bottom, each with its value.

    series: name -> a value for each group, at most five names; NaN leaves a bar out.
    """
    thick = 0.8 / len(series)
    height = max(2.4, 1.4 + len(groups) * (0.25 + 0.27 * len(series)))
    figure, axes = new_figure(title, xlabel, "", size=(7.2, height))
    with matplotlib.rc_context(style()):
        for number, (name, values) in enumerate(series.items()):
            at = [group - 0.4 + (number + 0.5) * thick for group in range(len(groups))]
            edge = INK if number > 2 else "white"  # hatching shows on dark bars and on light ones
            look = {"color": COLOURS[number], "hatch": HATCHES[number], "edgecolor": edge}
            drawn = axes.barh(at, values, 0.9 * thick, label=name, **look)
            clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # if a line crosses it
            axes.bar_label(drawn, fmt=f"{{:,.{digits}f}}", padding=5, fontsize=9, bbox=clear)
        if len(series) > 1:
            axes.legend(**BESIDE)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.margins(x=0.15)  # room for the values
        axes.grid(False, axis="y")
    return figure


def render(figure: Figure) -> bytes:
    """The figure as SVG: the same bytes for the same figure and the same version of matplotlib.

    A screen reader reads its title, and as its description all other words in it. On a dark page it
    is dark.
    """
    target, title = io.BytesIO(), figure.axes[0].get_title(loc="left")
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


def style() -> dict[str, Any]:
    """The whole style: matplotlib's defaults with ours, whatever the user's own matplotlibrc
    says."""
    defaults = matplotlib.rcParamsDefault.items()
    return {key: value for key, value in defaults if not key.startswith("backend")} | STYLE
