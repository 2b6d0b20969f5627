"""How many drafts a pass should verify: as many as are expected to gain more than they cost.

A draft costs one more row of the pass. It gains a token if it is accepted, and so are all before
it: with the probability of the product of their rates, its survival. The best n drafts of all
requests are those with the highest survival, and n is the number that maximises the tokens a
second, (requests + sum of the n survivals) / T(rows + n), with T the measured time of a pass.
n = 0 is among them. What a pass computes of prompts has to be computed anyway, so its time does
not count: beside it every draft would look cheap. Survival falls along a request, so what is chosen
of it is a beginning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from stage04_continuous.request import Request

ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS, LEAST = 3, 0.1  # rounds that measure passes, and seconds: as many more as fit in them
MEMORY = 0.9  # of a request's rate, what is left of the past after another draft
PRIOR = 0.5  # the rate of all requests before anything is known
PATIENCE = 64  # passes: of so many without a draft, a request tries one in the last


class Lengths(Protocol):
    """Chooses how many drafts of each request a pass verifies."""

    def hopeless(self, requests: Sequence[Request], most: Sequence[int], rows: int) -> bool:
        """Whether a pass of `rows` tokens needs no proposals: of at most `most` drafts of each
        request it would verify none, whatever they are."""
        ...

    def choose(self, requests: Sequence[Request], proposed: Sequence[int], rows: int) -> list[int]:
        """For `requests` with `proposed` drafts each, in a pass of `rows` tokens without any."""
        ...

    def note(self, request: Request, count: int, accepted: int) -> None:
        """Of `count` drafts of a request, the first `accepted` were accepted."""

    def forget(self, request: Request) -> None:
        """Called when the request has ended."""


class Fixed:
    """All that is proposed."""

    def hopeless(self, requests: Sequence[Request], most: Sequence[int], rows: int) -> bool:
        return False

    def choose(self, requests: Sequence[Request], proposed: Sequence[int], rows: int) -> list[int]:
        return list(proposed)

    def note(self, request: Request, count: int, accepted: int) -> None:
        """Nothing is learned."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass by its rows: measured for `rows`, and on the line between two of them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        pairs = list(zip(self.rows, self.seconds, strict=True))
        if rows <= pairs[0][0]:
            return pairs[0][1]
        for (low, fast), (high, slow) in zip(pairs, pairs[1:], strict=False):
            if rows <= high or high == pairs[-1][0]:
                return fast + (slow - fast) * (rows - low) / (high - low)
        raise ValueError("at least two points are needed")


def measure_passes(runner: Any, blocks: int, rows: Sequence[int] = ROWS) -> PassTimes:
    """Times of decode passes of `runner`, a row a block: call it while no block is owned. Blocks
    then have the content that they had. Longer passes never count as faster than shorter ones: that
    would be noise. Each round runs all sizes once, so a program that takes the processor for a
    moment slows no size in all rounds."""
    from shared import measure

    sizes = [count for count in rows if count <= blocks] or [1]
    memory = runner.cache.memory
    contents = memory.read(range(max(sizes))).cpu()
    shares = [([block], 0, 1) for block in range(max(sizes))]
    runs = [partial(runner.run, [0] * n, shares[:n], list(range(n))) for n in sizes]
    for run in runs:
        run()
    rounds, until = list[list[float]](), time.perf_counter() + LEAST
    while len(rounds) < REPEATS or time.perf_counter() < until:
        rounds.append(list(map(measure.seconds, runs)))
    seconds = list(accumulate(map(min, zip(*rounds, strict=True)), max))
    for block, content in enumerate(contents):
        memory.write(block, bytearray(content.numpy()))
    if len(sizes) == 1:
        sizes, seconds = [*sizes, 2 * sizes[0]], [*seconds, 2 * seconds[0]]
    return PassTimes(tuple(sizes), tuple(seconds))


class Adaptive:
    """Chooses by the rates of each request and by `seconds` of a pass, as above.

    A request's rate is that of its latest drafts, the newest counting most. A new request has the
    rate of all before it. A request whose drafts do not pay tries one again every PATIENCE passes.
    """

    def __init__(self, seconds: PassTimes) -> None:
        self.seconds = seconds
        self.rates: dict[Request, float] = {}
        self.common = PRIOR  # rate of all requests
        self.idle: dict[Request, int] = {}  # passes without a draft
        self._asked: tuple[Any, bool] = (), False  # the last question of `hopeless`, its answer

    def hopeless(self, requests: Sequence[Request], most: Sequence[int], rows: int) -> bool:
        """If `choose` takes none of the most that can be proposed, it takes none of fewer: each
        number of drafts then gains at most as much. While nothing is learned the answer stays."""
        question = [self.rates.get(request, self.common) for request in requests], most, rows
        if question != self._asked[0]:
            idle, self.idle = self.idle, {}  # none has a try
            self._asked = question, not any(self.choose(requests, most, rows))
            self.idle = idle
        if not self._asked[1]:
            return False
        pairs = zip(requests, most, strict=True)
        waited = [self.idle.get(request, 0) + (count > 0) for request, count in pairs]
        if max(waited, default=0) >= PATIENCE:  # `choose` has one try
            return False
        self.idle |= zip(requests, waited, strict=True)
        return True

    def choose(self, requests: Sequence[Request], proposed: Sequence[int], rows: int) -> list[int]:
        slots = [
            (self.rates.get(request, self.common) ** (place + 1), -place, index)
            for index, (request, count) in enumerate(zip(requests, proposed, strict=True))
            for place in range(count)
        ]
        slots.sort(reverse=True)
        prompts = self.seconds(rows) - self.seconds(len(requests))
        best, chosen, expected = 0.0, 0, float(len(requests))
        for number, survival in enumerate([0.0, *(survival for survival, _, _ in slots)]):
            expected += survival
            if (speed := expected / (self.seconds(rows + number) - prompts)) > best:
                best, chosen = speed, number
        lengths = [0] * len(requests)
        for _, _, index in slots[:chosen]:
            lengths[index] += 1
        for index, (request, count) in enumerate(zip(requests, proposed, strict=True)):
            idle = 0 if lengths[index] else self.idle.get(request, 0) + (count > 0)
            if idle >= PATIENCE:
                lengths[index], idle = 1, 0
            self.idle[request] = idle
        return lengths

    def note(self, request: Request, count: int, accepted: int) -> None:
        rate = self.rates.get(request, self.common)
        for place in range(min(count, accepted + 1)):  # those after a refused one say nothing
            rate = MEMORY * rate + (1 - MEMORY) * (place < accepted)
            self.common = MEMORY * self.common + (1 - MEMORY) * (place < accepted)
        self.rates[request] = rate

    def forget(self, request: Request) -> None:
        self.rates.pop(request, None)
        self.idle.pop(request, None)
