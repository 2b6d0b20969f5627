"""The table that closes a lesson: what was predicted by hand, what this machine's limits allow,
what was measured, and why they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shared.measure import Limits

from .rows import Draw, Results, table

# The machine of round numbers, for which the lessons predict by hand.
ROUND = Limits("cpu", 1, 40.0, {"float32": 200.0, "bfloat16": 400.0})
OFF = 1.25  # a ratio that differs from its prediction by more than this factor was missed


class Claim(NamedTuple):
    """One line. predicted: from the limits of the `Results`. unit: "ms", "s" and "tok/s" are
    approached from one side, so their share of the limit is shown; "x" is a ratio, and it or a
    number of anything else is held or missed."""

    what: str
    predicted: float
    measured: float
    unit: str
    why: str

    @property
    def verdict(self) -> str:
        quotient = self.measured / self.predicted
        if self.unit not in ("ms", "s", "tok/s"):
            return "held" if 1 / OFF <= quotient <= OFF else "**missed**"
        return f"{quotient if self.unit == 'tok/s' else 1 / quotient:.0%} of the limit"

    def show(self, value: float) -> str:
        """Three digits and the unit."""
        digits = max(0, 3 - len(f"{value:.0f}"))
        return f"{value:,.{digits}f}{self.unit if self.unit == 'x' else f' {self.unit}'}"


def closing(claims: Callable[[Results], Iterable[Claim]]) -> Draw:
    """The table of the claims that `claims` makes, for the machine of round numbers and for the one
    that measured."""

    def draw(results: Results) -> str:
        by_hand, lines = Results({**results.content, "limits": vars(ROUND)}), []
        for hand, here in zip(claims(by_hand), claims(results), strict=True):
            cells = {"prediction": here.what, "by hand": here.show(hand.predicted)}
            cells |= {"this machine": here.show(here.predicted)}
            cells |= {"measured": here.show(here.measured), "result": here.verdict}
            lines.append(cells | {"why": here.why})
        return table(lines)

    return draw
