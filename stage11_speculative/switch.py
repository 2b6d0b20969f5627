"""Whether drafts pay, measured as the engine runs: they are on or off for all requests of a pass.

A draft costs one more row of its pass, and saves a pass if it is accepted. What a row costs depends
on the machine, the model and the number of requests; how many drafts are accepted depends on the
text. In place of a model of all that, `Measured` keeps two numbers for each size of the crowd: the
tokens a second of passes with drafts, and of passes without. The better way runs. What the worse
one gives may change, so it is tried again. A try costs time, and the next one waits until the loss
is one hundredth of the time that has passed since. So no more than that is lost to the better of
off and fixed, but for the first tries.

Passes that compute prompts, too, count for neither way: beside a prompt every draft looks cheap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ALLOWANCE = 0.01  # of the time: what tries may lose
MEMORY = 20  # passes: older ones count less and less
FEWEST = 3  # passes, after which a way is known


@dataclass
class Way:
    """One of both ways to run passes. tokens, seconds: of a pass, the newest counting most."""

    passes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second; infinite until it is known, so that it is tried."""
        return self.tokens / self.seconds if self.passes >= FEWEST else math.inf

    def add(self, tokens: int, seconds: float) -> None:
        self.passes += 1
        share = 1 / min(self.passes, MEMORY)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)


@dataclass
class Pair:
    """Both ways for crowds of one size. debt: seconds lost by tries, less those allowed since."""

    ways: dict[bool, Way] = field(default_factory=lambda: {True: Way(), False: Way()})
    debt: float = 0.0

    @property
    def better(self) -> bool:
        return self.ways[True].speed >= self.ways[False].speed


class Measured:
    """On while drafts pay. Crowds of 1, 2, 3 to 4, 5 to 8 ... requests are measured apart. clock:
    gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.pairs = clock, dict[int, Pair]()
        self._began = 0.0

    def on(self, requests: int) -> bool:
        """Whether the pass that begins should have drafts. requests: those whose next token it
        gives."""
        self._began = self.clock()
        pair = self.pairs.setdefault((requests - 1).bit_length(), Pair())
        known = all(way.passes >= FEWEST for way in pair.ways.values())
        return pair.better if not known or pair.debt > 0 else not pair.better

    def note(self, requests: int, drafted: bool, tokens: int, prompts: bool) -> None:
        """A pass has ended: with what it began, and the tokens that it gave. prompts: whether it
        computed parts of prompts, too."""
        if prompts or not requests:
            return
        pair = self.pairs[(requests - 1).bit_length()]
        seconds, better = self.clock() - self._began, pair.better
        pair.ways[drafted].add(tokens, seconds)
        speed = pair.ways[better].speed
        if drafted == better or math.isinf(speed):
            pair.debt -= ALLOWANCE * seconds
        else:
            pair.debt += max(0.0, seconds - tokens / speed) + ALLOWANCE * seconds
