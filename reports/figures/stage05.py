"""Two block tables over one pool, and the life of a request with the memory that it holds."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import ORANGE, PALE, TEAL, VIOLET, WASTE, YELLOW, arrow, box, canvas, legend, words

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


def life() -> Figure:
    """The states of a request, what moves it on, and what memory it holds in each."""
    figure, axes = canvas("Only a running request holds blocks", 84, 33)
    states = {
        "waiting": (5, "nothing; after a swap:\nblocks of the swap pool"),
        "running": (34, "the blocks of its table,\nsome of them shared"),
        "finished": (63, "nothing; its full blocks\nare cached, unowned"),
    }
    for name, (x, memory) in states.items():
        box(axes, x, 11, 16, 5, name, fill=YELLOW if name == "running" else PALE, weight="bold")
        box(axes, x - 1, 18, 18, 5.4, memory, fill="#ffffff", dashed=True)
    words(axes, 1, 25.6, "dashed: the memory that it holds", ha="left")
    arrow(axes, (13, 4.5), (13, 11))
    words(axes, 14, 6, "add", ha="left")
    arrow(axes, (21, 12.6), (34, 12.6))
    words(axes, 27.5, 11.3, "admit")
    arrow(axes, (34, 14.6), (21, 14.6), colour=ORANGE)
    words(axes, 27.5, 16.2, "preempt", color=ORANGE)
    arrow(axes, (50, 13.5), (63, 13.5))
    words(axes, 56.5, 12.2, "last token,")
    words(axes, 56.5, 14.9, "or abort")
    arrow(axes, (16, 11), (71, 11), bend=-0.2, dashed=True)
    words(axes, 43, 3.6, "abort")
    arrow(axes, (36, 11), (48, 11), bend=-0.75)
    words(axes, 42, 9.4, "a step")
    notes = (
        "admit: it shares the blocks that it finds, and takes the others",
        "a step: it takes one block more when the last one is full",
        "preempt: it gives all blocks back and keeps its tokens",
    )
    for place, note in enumerate(notes):
        words(axes, 34, 25.6 + 2.4 * place, note, ha="left")
    return figure


DRAW = (tables, life)
