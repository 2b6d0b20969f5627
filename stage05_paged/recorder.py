"""What each step ran and which memory it used, recorded by an observer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stage04_continuous.plan import Plan
from stage04_continuous.recorder import STEPS_KEPT, SharesRecord, fields

from .blocks import Move
from .scheduler import Scheduler


@dataclass(frozen=True)
class BlocksRecord(SharesRecord):
    """A record by request, with the state of the blocks during the pass."""

    owned_blocks: int = 0  # in at least one table
    used_tokens: int = 0  # positions of running requests that have keys and values after the pass
    moves: tuple[Move, ...] = ()  # memory work before the pass


class Recorder:
    """Keeps the records of the last STEPS_KEPT steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.steps: deque[BlocksRecord] = deque(maxlen=STEPS_KEPT)
        self._memory: dict[str, int] = {}

    def before(self, plan: Plan) -> None:
        """Note the state of the blocks now: requests that end in this step give theirs back."""
        computed = sum(request.computed for request in self.scheduler.running)
        self._memory = {
            "owned_blocks": self.scheduler.pool.owned,
            "used_tokens": computed + sum(work.count for work in plan.work),
        }

    def after(self, plan: Plan) -> None:
        """Append the record of a step that had work."""
        if plan:
            known = fields(plan, self.scheduler) | self._memory
            self.steps.append(BlocksRecord(**known, moves=tuple(plan.moves)))
