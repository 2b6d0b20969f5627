"""Two block tables over one pool."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import ORANGE, PALE, TEAL, VIOLET, WASTE, arrow, box, canvas, legend, words

SIZE = 4
# After step 2 of the lesson: whose tokens each block holds ("s": shared), and the tables.
BLOCKS = ["ssss", "ssss", "aaa ", "bbb ", "", "", "", ""]
TABLES = {"A": [0, 1, 2], "B": [0, 1, 3]}
FILLS = {"s": VIOLET, "a": ORANGE, "b": TEAL}


def tables() -> Figure:
    """A shared beginning, reference counts, and a last block that is not full."""
    figure, axes = canvas("Two tables over one pool of blocks", 84, 35)
    wide, left = 9.4, 5.2
    for (name, blocks), top in zip(TABLES.items(), (2.5, 22.5), strict=True):
        words(axes, 13, top + 1.5, f"table of {name}", ha="right", weight="bold")
        for index, block in enumerate(blocks):
            x, above = 15.0 + 4 * index, top < 10
            box(axes, x, top, 4, 3, str(block), fill=PALE)
            words(axes, x + 2, top + (-1.2 if above else 4.2), f"[{index}]", color="#777777")
            start = x + 2, top + (3 if above else 0)
            target = left + wide * block + (3.2 if above else 5.2), (10 if above else 17.4)
            arrow(axes, start, target, colour=ORANGE if name == "A" else TEAL)
    words(axes, 1, 13.4, "pool", ha="left", weight="bold")
    for block, held in enumerate(BLOCKS):
        x = left + wide * block
        first = SIZE * next((row.index(block) for row in TABLES.values() if block in row), 0)
        for place, key in enumerate(held or "    "):
            fill, hatch = (FILLS[key], "") if key != " " else WASTE if held else ("#ffffff", "")
            position = str(first + place) if key != " " else ""
            box(axes, x + 2.1 * place, 10, 2.1, 5.2, position, fill=fill, hatch=hatch)
        count = sum(block in blocks for blocks in TABLES.values())
        words(axes, x + 4.2, 16.4, f"block {block}: {count}")
    words(axes, 44, 19.2, "number of the block: in how many tables (references)", ha="left")
    sample = "position 9 of B: 9 // 4 = 2, and table[2] = 3;\n9 % 4 = 1, so slot 3 * 4 + 1 = 13"
    words(axes, 32, 24, sample, ha="left")
    legend(
        axes, 30.5, (1, (VIOLET, ""), "positions in both tables"), (27, (ORANGE, ""), "of A"),
        (35, (TEAL, ""), "of B"), (43, WASTE, "reserved, waits for a token"),
        (67, ("#ffffff", ""), "free"),
    )  # fmt: skip
    return figure


DRAW = (tables,)
