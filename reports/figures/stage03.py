"""Three prompts one after the other, and as one batch with its waste."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from . import ORANGE, WASTE, Look, canvas, cells, legend, words

# The rows of each step. A capital letter is run, a small one is read from the cache. "_" is padding
# that is run, "-" padding in the cache, and "*" goes before the token of a row that has ended.
SINGLE = [["ABCD"], ["abcdE"], ["abcdeF"], ["PQ"], ["X"], ["xY"]]
BATCH = [
    ["ABCD", "__PQ", "___X"],
    ["abcdE", ["-", "-", "p", "q", "*R"], "---xY"],
    ["abcdeF", ["-", "-", "p", "q", "r", "*R"], ["-", "-", "-", "x", "y", "*Z"]],
]
READ = "#d5ecea"


def look(key: str) -> Look:
    if key[0] in "_*":
        return WASTE
    return (ORANGE, "") if key.isupper() else (READ if key.islower() else "white", "")


def static() -> Figure:
    """Steps from left to right, and how many of the tokens that they run are needed."""
    figure, axes = canvas("A batch shares each reading of the weights, and pays in tokens", 88, 34)
    words(axes, 1, 1, "one after the other (stage 02)", ha="left", weight="bold")
    _steps(axes, 3, SINGLE)
    words(axes, 1, 14, "as one batch (this stage)", ha="left", weight="bold")
    _steps(axes, 16, BATCH)
    legend(
        axes, 30.5, (1, look("A"), "run and needed"), (22, look("*"), "run in vain"),
        (43, look("a"), "read from the cache"), (64, look("-"), "padding, hidden"), size=2.4,
    )  # fmt: skip
    return figure


def _steps(axes: Any, top: float, steps: list[Any]) -> None:
    left, run = 1.0, 0
    for number, rows in enumerate(steps, 1):
        keys = [key for row in rows for key in row if key == "_" or key[-1].isupper()]
        run += len(keys)
        words(axes, left, top + 1, f"step {number}", ha="left")
        cells(axes, left, top + 2.4, rows, look, size=(2.4, 2.4), label=lambda key: key[-1:])
        words(axes, left, top + 3.8 + 2.4 * len(rows), f"{len(keys)} run", ha="left")
        left += max(2.4 * len(rows[0]), 5.5) + 3
    needed = sum(key.isupper() and key[0] != "*" for rows in steps for row in rows for key in row)
    total = f"{len(steps)} steps,\n{run} tokens run,\n{needed} needed"
    words(axes, left + 1, top + 2.4 + 1.2 * len(steps[0]), total, ha="left", weight="bold")


DRAW = (static,)
