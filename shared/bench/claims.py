"""The table that closes a lesson: what was predicted by hand, what this machine's limits allow,
what was measured, and why they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.measure import Limits

from .rows import Draw, Results, Row, table

# The machine of round numbers, for which the lessons predict by hand.
ROUND = Limits("cpu", 1, 40.0, {"float32": 200.0, "bfloat16": 400.0})
FASTER = "the machine was faster than at the start, when its limits were measured"
OFF = 1.25  # a ratio that differs from its prediction by more than this factor was missed


@dataclass(frozen=True)
class Claim:
    """One line. predicted: from the limits of the `Results`. unit: for "ms", "s" and "tok/s",
    `predicted` is a limit, and the share of it is shown; for "x", a ratio, and for a number without
    a unit, the prediction is held or missed. by_hand: what the lesson predicts; None: `predicted`
    from the limits of ROUND. aim: `predicted` is not a limit, but the most that was aimed at."""

    what: str
    predicted: float
    measured: float
    unit: str
    why: str
    by_hand: float | None = None
    aim: bool = False

    @property
    def share(self) -> float | None:
        """The share of the limit, where there is one."""
        quotient = self.measured / self.predicted
        shares = {"ms": 1 / quotient, "s": 1 / quotient, "tok/s": quotient}
        return None if self.aim else shares.get(self.unit)

    @property
    def verdict(self) -> str:
        if self.share is not None:
            return f"{self.share:.0%} of the limit"
        low, high = (0, 1) if self.aim else (1 / OFF, OFF)
        return "held" if low <= self.measured / self.predicted <= high else "**missed**"

    @property
    def reason(self) -> str:
        """Why the two differ; `why` explains a shortfall, and the limit itself can be too low."""
        return FASTER if self.share is not None and self.share > 1 else self.why

    def show(self, value: float) -> str:
        """Three digits and the unit; a value without a unit as a whole number."""
        digits = max(0, 3 - len(f"{value:.0f}")) if self.unit else 0
        return f"{value:,.{digits}f}{self.unit if len(self.unit) < 2 else f' {self.unit}'}"


def faster(
    what: str, row: Row, variants: tuple[str, str], least: Callable[[Row], float], why: str
) -> Claim:
    """The speedup of the second of a row's two variants over the first, predicted by `least`
    seconds."""
    slow, fast = map(least, map(row.of, variants))
    return Claim(what, slow / fast, row.gain(*variants), "x", why)


def takes(what: str, row: Row, least: Callable[[Row], float], why: str) -> Claim:
    """A row's milliseconds, predicted by its `least` seconds."""
    return Claim(what, least(row) * 1e3, row.median * 1e3, "ms", why)


def speed(what: str, row: Row, least: Callable[[Row], float], why: str) -> Claim:
    """A row's tokens per second, predicted by its `least` seconds."""
    return Claim(what, row.tokens / least(row), row.rate.median, "tok/s", why)


def closing(claims: Callable[[Results], Iterable[Claim]]) -> Draw:
    """The table of the claims that `claims` makes, for the machine of round numbers and for the one
    that measured."""

    def draw(results: Results) -> str:
        by_hand = Results({**results.content, "limits": vars(ROUND)})
        return table(
            {
                "prediction": here.what,
                "by hand": here.show(hand.predicted if hand.by_hand is None else hand.by_hand),
                "this machine": here.show(here.predicted),
                "measured": here.show(here.measured),
                "result": here.verdict,
                "why": here.reason,
            }
            for hand, here in zip(claims(by_hand), claims(results), strict=True)
        )

    return draw
