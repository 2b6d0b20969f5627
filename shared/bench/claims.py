"""The table that closes a lesson: what was predicted by hand, what this machine's limits allow,
what was measured, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.measure import Limits

from .rows import Draw, Results, Row, table

# The machine of round numbers, for which the lessons predict by hand.
ROUND = Limits("cpu", 1, 40.0, {"float32": 200.0, "bfloat16": 400.0})
FASTER = "the machine was faster than when its limits were measured"
OFF = 1.25  # what differs from its prediction by more than this factor was missed


@dataclass(frozen=True)
class Claim:
    """One line. predicted: from the limits of the `Results`. unit: for "ms", "s" and "tok/s",
    `predicted` is a limit, and the share of it is shown beside the verdict. by_hand: what the
    lesson predicts; None: `predicted` from the limits of ROUND. aim: `predicted` is not a limit,
    but the most that was aimed at."""

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

    def held(self, predicted: float) -> bool:
        """Whether the measurement is as `predicted`."""
        low, high = (-math.inf, 1) if self.aim else (1 / OFF, OFF)
        return low <= self.measured / predicted <= high

    def verdict(self, by_hand: float) -> str:
        """Of the prediction made by hand."""
        share = "" if self.share is None else f", {self.share:.0%} of the limit"
        return ("held" if self.held(by_hand) else "**missed**") + share

    def reason(self, by_hand: float, balance: float) -> str:
        """Why the measurement differs from the predictions. `why` explains a shortfall from the
        machine's; but a limit can be too low, and the machine can differ from the round one in
        `balance`, its operations for each byte that it reads."""
        if self.share is not None:
            return FASTER if self.share > 1 else self.why
        rounded = ROUND.gflops["float32"] / ROUND.bandwidth_gb_s
        alike = round(balance) == round(rounded)
        if alike or self.held(by_hand) or not self.held(self.predicted):
            return self.why
        return (
            f"held here: the machine does {balance:.0f} operations a byte read, not {rounded:.0f}"
        )

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
        by_hand = Results(results.content, ROUND)
        balance = results.limits.gflops["float32"] / results.limits.bandwidth_gb_s
        lines = []
        for round_numbers, here in zip(claims(by_hand), claims(results), strict=True):
            hand = round_numbers.predicted if here.by_hand is None else here.by_hand
            line = {
                "prediction": here.what,
                "by hand": here.show(hand),
                "this machine": here.show(here.predicted),
                "measured": here.show(here.measured),
                "result": here.verdict(hand),
                "why": here.reason(hand, balance),
            }
            lines.append(line)
        return table(lines)

    return draw
