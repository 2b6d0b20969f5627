"""When requests are sent: fixed before the first one, so that a slow server cannot delay the
rest."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """When requests start. Times are seconds from the start of the measured part.

    A closed loop has `users`: each sends its next request when its last one has ended, so the times
    are not known beforehand. All others are open loops and have `starts`: they send whether or not
    the server has answered.
    """

    kind: Literal["closed", "poisson", "bursts"]
    users: int | None  # of a closed loop
    starts: list[float] | None  # of an open loop, in order
    rate: float | None = None  # requests/s that an open loop offers

    def __str__(self) -> str:
        return load_text(self.kind, self.users, self.rate)


def load_text(kind: str, users: int | None, rate: float | None) -> str:
    """A short name for a load: "4 users", "poisson, 2/s"."""
    if users is not None:
        return f"{users} user{'' if users == 1 else 's'}"
    return kind if rate is None else f"{kind}, {rate:.3g}/s"


def closed(users: int, count: int) -> Schedule:
    """`users` users who share `count` requests. Raises ValueError if a user would get none."""
    if not 1 <= users <= count:
        raise ValueError(f"{count} requests are too few for {users} users")
    return Schedule("closed", users, None)


def poisson(rate: float, count: int, seed: int) -> Schedule:
    """Independent arrivals: `rate` per second on average, `count` in all.

    The gaps are exponential, then stretched so that the last request starts at exactly count /
    rate: otherwise the rate of a hundred requests, and every result at that rate, would be off by
    10 % by chance alone. Raises ValueError for a rate or count that is not positive.
    """
    if rate <= 0 or count < 1:
        raise ValueError(f"invalid schedule: {count} requests at {rate} requests/s")
    chance = random.Random(f"poisson {seed}")
    times = list(accumulate(chance.expovariate(1.0) for _ in range(count)))
    return Schedule("poisson", None, [time * count / rate / times[-1] for time in times], rate)


def bursts(size: int, every: float, count: int) -> Schedule:
    """`size` requests at once every `every` seconds, `count` in all. Raises ValueError for values
    that are not positive."""
    if size < 1 or every <= 0 or count < 1:
        raise ValueError(f"invalid schedule: {size} requests every {every} s, {count} in all")
    return Schedule("bursts", None, [index // size * every for index in range(count)], size / every)
