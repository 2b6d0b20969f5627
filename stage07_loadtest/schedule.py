"""When requests are sent: fixed before the first one, so that a slow server cannot delay the
rest."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Schedule:
    """When requests start. Times are seconds from the start of the measured part.

    A closed loop has `users`: each sends its next request when its last one has ended, so the times
    are not known beforehand. An open loop has `starts`: it sends whether or not the server has
    answered.
    """

    users: int | None = None  # of a closed loop
    starts: list[float] | None = None  # of an open loop, in order
    rate: float | None = None  # requests/s that an open loop offers

    def __str__(self) -> str:
        """A short name: "4 users", "poisson, 2/s"."""
        if self.users is not None:
            return f"{self.users} user{'' if self.users == 1 else 's'}"
        return f"poisson, {self.rate:.3g}/s"


def closed(users: int, count: int) -> Schedule:
    """`users` users who share `count` requests. Raises ValueError if a user would get none."""
    if not 1 <= users <= count:
        raise ValueError(f"{count} requests are too few for {users} users")
    return Schedule(users)


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
    return Schedule(None, [time * count / rate / times[-1] for time in times], rate)
