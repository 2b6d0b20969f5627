"""A replica in simulated time: stage 05's scheduler and blocks, and a fitted time for each pass."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from shared.errors import UserError
from stage01_forward.generation import Token
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool
from stage05_paged.scheduler import Scheduler

from .passes import PassTime


def simpy() -> Any:
    """Raises UserError where SimPy is not installed."""
    try:
        return import_module("simpy")
    except ImportError:
        raise UserError(
            "The simulator needs SimPy: run python -m pip install -r requirements-distributed.txt"
        ) from None


class Server:
    """Requests to a scheduler over a pool of its own, whose passes take `pass_time`. Times are
    those of SimPy's environment `env`."""

    def __init__(
        self, env: Any, blocks: int, sequences: int, budget: int, pass_time: PassTime,
        chance: random.Random,
    ) -> None:  # fmt: skip
        self.env, self.pass_time, self.chance = env, pass_time, chance
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, sequences, max(budget, sequences))
        self.dead, self.busy, self.born, self.gone = False, 0.0, env.now, math.inf
        self._ends: dict[Request, tuple[Any, list[float]]] = {}
        self._work = env.event()
        env.process(self._run())

    def submit(self, request: Request, times: list[float]) -> Any:
        """The event of its end, or of the replica's; `times` gets those of its tokens."""
        self.scheduler.add(request)
        if not self._work.triggered:
            self._work.succeed()
        self._ends[request] = self.env.event(), times
        return self._ends[request][0]

    def receive(self, digests: Sequence[bytes]) -> None:
        """Blocks with these digests were copied here, as many as there is room for."""
        missing = digests[len(self.pool.match(digests)) :][: self.pool.available]
        blocks = [self.pool.take() for _ in missing]
        for block, digest in reversed(list(zip(blocks, missing, strict=True))):
            self.pool.publish(block, digest)
            self.pool.give_back(block)

    def kill(self) -> None:
        self.dead, self.gone = True, self.env.now
        for ended, _ in self._ends.values():
            ended.succeed()

    def _run(self) -> Iterator[Any]:
        while True:
            if not self.scheduler.unfinished:
                self._work = self.env.event()
                yield self._work
            plan = self.scheduler.schedule()
            seconds = self.pass_time.seconds(plan, self.chance)
            yield self.env.timeout(seconds)
            if self.dead:
                return
            self.busy += seconds
            self.scheduler.advance(plan)
            for request in [work.request for work in plan.work if work.rows]:
                answer, (ended, times) = request.output, self._ends[request]
                last = len(answer.token_ids) + 1 == request.sampling.max_tokens
                answer.append(Token(0, None, "length" if last else None))
                times.append(self.env.now)
                if last:
                    self.scheduler.finish(request)
                    del self._ends[request]
                    ended.succeed()
