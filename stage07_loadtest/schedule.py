"""When requests are sent: worked out before the first one, so that a slow server cannot put off what it is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from shared.errors import UserError

from .workload import Ask


@dataclass(frozen=True)
class Schedule:
    """When requests start. Times are seconds from the start of the measured part.

    A closed loop has `users`: each sends its next request when its last one has ended, so nobody knows the times beforehand.
    All others are open loops and have `starts`: they send whether or not the server has answered.
    """

    kind: Literal["closed", "poisson", "bursts", "trace"]
    users: int | None  # of a closed loop
    starts: list[float] | None  # of an open loop, in order
    rate: float | None = None  # requests/s that an open loop offers

    def __str__(self) -> str:
        return in_words(self.kind, self.users, self.rate)


def in_words(kind: str, users: int | None, rate: float | None) -> str:
    """The load in a few words: "4 users", "poisson, 2/s", "trace"."""
    if users is not None:
        return f"{users} user{'' if users == 1 else 's'}"
    return kind if rate is None else f"{kind}, {rate:.3g}/s"


def closed(users: int, count: int) -> Schedule:
    """So many users who share `count` requests. Raises ValueError if some of them would get none."""
    if not 1 <= users <= count:
        raise ValueError(f"{count} requests are too few for {users} users")
    return Schedule("closed", users, None)


def poisson(rate: float, count: int, seed: int) -> Schedule:
    """Arrivals of people who do not know of each other: `rate` of them per second on average, `count` in all.

    The gaps are exponential and then stretched so that the last request starts at count / rate exactly: otherwise the rate of a
    hundred requests would be off by 10 % by chance alone, and so would everything that is said about it.
    """
    if rate <= 0 or count < 1:
        raise ValueError(f"a rate of {rate} requests/s and {count} requests are no schedule")
    chance = random.Random(f"poisson {seed}")
    times = list(accumulate(chance.expovariate(1.0) for _ in range(count)))
    return Schedule("poisson", None, [time * count / rate / times[-1] for time in times], rate)


def bursts(size: int, every: float, count: int) -> Schedule:
    """`size` requests at once, every so many seconds, until there are `count`."""
    if size < 1 or every <= 0 or count < 1:
        raise ValueError(f"{size} requests every {every} s, {count} in all, are no schedule")
    return Schedule("bursts", None, [index // size * every for index in range(count)], size / every)


def trace(asks: Sequence[Ask]) -> Schedule:
    """As it was recorded. Raises UserError if some request has no time."""
    if not asks or any(ask.at is None for ask in asks):
        raise UserError(
            "A trace needs requests, and each of them a time: write 'at', in seconds, in every line."
        )
    return Schedule("trace", None, sorted(ask.at for ask in asks if ask.at is not None))
