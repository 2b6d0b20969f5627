"""The seam that all stages share."""

from __future__ import annotations

from matplotlib.figure import Figure

from shared.charts import COLOURS

from . import NAVY, ORANGE, PALE, WASTE, Look, arrow, box, canvas, cells, line, words

# Slots: of three sequences, of new tokens, and unused ones.
SLOTS: dict[str, Look] = dict(zip("abc", ((COLOURS[n], "") for n in (3, 1, 4)), strict=True))
SLOTS |= {"x": (ORANGE, ""), ".": WASTE}
PLUGS = (
    ("01 forward", "Recompute", "keeps nothing: all tokens are new", ["xxxxxx"]),
    ("02 kv_cache", "CachedAttention", "slot = position", ["aaaax."]),
    ("03 batching", "PaddedAttention", "slot = (row, padded position)",
     ["aaaax.", "..bbx.", "...cx."]),
    ("04 continuous", "PackedAttention", "slot = (row, position)", ["aaaax.", "bbx...", "cxxxx."]),
    ("05 paged", "PagedAttention", "slot = (table[position // B], position % B)",
     ["aa bb x.", "cx bx aa", ".. .. .."]),
)  # fmt: skip


def seam() -> Figure:
    """One GPT-2, and the five ways in which the stages fill in `attend`."""
    figure, axes = canvas("One model, and attend plugged in five ways", 80, 50)
    box(axes, 3, 1, 18, 3.6, "ids, positions")
    box(axes, 3, 6.6, 18, 3.6, "embedding", fill=PALE)
    box(axes, 0.5, 12.2, 23, 20.4, fill=PALE)
    words(axes, 1.5, 14, "L blocks", ha="left", weight="bold")
    box(axes, 3, 15.8, 18, 3.6, "norm; q, k, v")
    box(axes, 3, 21, 18, 4, "attend", fill=ORANGE, weight="bold")
    box(axes, 3, 26.6, 18, 4.8, "projection, add\nnorm, MLP, add")
    box(axes, 3, 34.6, 18, 3.6, "norm, output layer", fill=PALE)
    heights = (4.6, 6.6, 10.2, 15.8, 19.4, 21, 25, 26.6, 31.4, 34.6, 38.2, 42.6)
    for start, end in zip(heights[::2], heights[1::2], strict=True):
        arrow(axes, (12, start), (12, end), colour=NAVY, width=2)
    words(axes, 12, 44, "logits")
    line(axes, (27.5, 4.5), (27.5, 41.3), colour=ORANGE)
    line(axes, (21, 23), (27.5, 23), colour=ORANGE)
    for number, (stage, name, slot, rows) in enumerate(PLUGS):
        top = 0.5 + 9.2 * number
        arrow(axes, (27.5, top + 4), (31.5, top + 4), colour=ORANGE)
        box(axes, 31.5, top, 48, 8.2)
        words(axes, 32.7, top + 2, stage, ha="left", weight="bold")
        words(axes, 32.7, top + 4.2, name, ha="left")
        words(axes, 32.7, top + 6.4, slot, ha="left")
        down = top + 3.2 - len(rows) * 0.8
        cells(axes, 64, down, rows, SLOTS.__getitem__, size=(1.8, 1.6))
    key = ["x      abc           ."]
    cells(axes, 31.5, 47.4, key, SLOTS.__getitem__, size=(1.8, 1.6))
    for left, name in ((34, "new tokens"), (50.5, "kept, by sequence"), (72, "unused")):
        words(axes, left, 48.2, name, ha="left")
    return figure


DRAW = (seam,)
