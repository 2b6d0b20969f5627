"""How long a pass takes, fitted to passes of the real engine. The simulator replaces only this.

Vidur learned the time of each operator, but with a scheduler of its own: when vLLM's changed, Vidur
was off by multiples. Here the scheduler is the real one, and five costs are fitted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from shared.kit import greedy
from stage04_continuous.plan import Plan

AMOUNTS = ("a pass", "a further token of a row", "a row", "a token to attend to", "a pair")
CROWDS = (1, 2, 4, 8, 16, 32)  # requests at a time, while the engine is timed
LENGTHS = (8, 32, 128, 300)  # of their prompts, in tokens
VOCABULARY = 256  # every tokenizer has these ids


def amounts(plan: Plan) -> tuple[int, ...]:
    """The amounts of a pass that have a cost (AMOUNTS): the pass itself; tokens beyond one a row;
    rows; tokens whose keys and values are read; pairs of a query and a key."""
    work = plan.work
    ends = [w.start + w.count for w in work]
    pairs = sum(w.count * (w.start + end + 1) for w, end in zip(work, ends, strict=True)) // 2
    return 1, sum(w.count for w in work) - len(work), len(work), sum(ends), pairs


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: a cost for each of its `amounts`, times a random one of `ratios`, which
    are measured over fitted seconds."""

    costs: tuple[float, ...]
    ratios: tuple[float, ...] = (1.0,)

    def seconds(self, plan: Plan, rng: random.Random) -> float:
        return sum(map(mul, self.costs, amounts(plan))) * rng.choice(self.ratios)

    @classmethod
    def fit(cls, steps: Sequence[Sequence[float]]) -> PassTime:
        """Least squares of the relative error, without the cost that is furthest below zero until
        there is none. steps: amounts and seconds of passes."""
        table = np.array(steps, dtype=float)
        done, seconds = table[:, :-1], table[:, -1]
        unit = np.maximum(done.max(0), 1)  # of each column, so that all are of one size
        share, kept = done / unit / seconds[:, None], [*range(len(AMOUNTS))]
        while True:
            solution = np.linalg.lstsq(share[:, kept], np.ones(len(share)), rcond=None)[0]
            if (solution >= 0).all():
                break
            del kept[int(solution.argmin())]
        costs = np.zeros(len(AMOUNTS))
        costs[kept] = solution / unit[kept]
        ratios = np.quantile(seconds / (done @ costs), np.linspace(0.005, 0.995, 100))
        return cls(tuple(costs.tolist()), tuple(ratios.tolist()))


class Meter:
    """An observer of an engine: `steps` has the amounts and seconds of its passes."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []
        self._ended = 0.0  # the last step: what happens between two steps counts towards the second

    def before(self, plan: Plan) -> None:
        """The time of a pass is known at its end."""

    def after(self, plan: Plan) -> None:
        now = time.perf_counter()
        if plan:
            self.steps.append((*amounts(plan), now - max(plan.started, self._ended)))
        self._ended = now


def calibrate(engine: Any, tokens: int = 6) -> list[tuple[float, ...]]:
    """Steps of a short run of the real engine: prompts of many lengths in CROWDS, and answers of
    `tokens`. The engine warms up first."""
    rng, config = random.Random("calibration"), engine.config
    longest, ids = config.n_positions - tokens - 1, range(min(VOCABULARY, config.vocab_size))
    engine.generate([[0] * 32] * 4, greedy(tokens))
    meter = Meter()
    engine.observers.append(meter)
    for count in CROWDS:
        lengths = [min(longest, rng.choice(LENGTHS)) for _ in range(count)]
        prompts = [rng.choices(ids, k=length) for length in lengths]
        engine.generate(prompts, greedy(tokens))
    engine.observers.remove(meter)
    return meter.steps
