"""What each step ran and which memory it used, recorded by an observer."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from shared.records import StepRecord, Stopwatch
from stage04_continuous.plan import Plan
from stage04_continuous.recorder import STEPS_KEPT

from .blocks import Move
from .scheduler import Scheduler


@dataclass(frozen=True)
class SequenceRecord:
    """One request's share of a pass, its blocks, and why it ended if it did."""

    request_id: str
    prefill_tokens: int
    decode_tokens: int
    blocks: int
    finish_reason: str | None


@dataclass(frozen=True)
class BlocksRecord(StepRecord):
    """A StepRecord by sequence, with the blocks' state; `started` is `time.perf_counter()`."""

    started: float = 0.0
    sequences: tuple[SequenceRecord, ...] = ()
    waiting: int = 0  # requests that do not run
    swapped: int = 0  # requests whose keys and values are in the swap pool
    owned_blocks: int = 0  # during the pass, in at least one table
    shared_blocks: int = 0  # during the pass, in at least two
    cached_blocks: int = 0  # during the pass, unowned and findable; all others are free
    used_tokens: int = 0  # positions of running requests that have keys and values after the pass
    moves: tuple[Move, ...] = ()  # memory work before the pass
    preempted: int = 0  # requests that lost their memory before the pass
    bookkeeping_seconds: float = (
        0.0  # part of `seconds`: scheduling, moves, sampling, postprocessing
    )


class Recorder:
    """Keeps the records of the last `kept` steps. The engine times each pass with `model_time`."""

    def __init__(self, scheduler: Scheduler, kept: int = STEPS_KEPT) -> None:
        self.scheduler, self.model_time = scheduler, Stopwatch()
        self.steps: deque[BlocksRecord] = deque(maxlen=kept)
        self._memory: dict[str, int] = {}
        self._preemptions = 0  # up to the last step

    def before(self, plan: Plan) -> None:
        """Note the state of the blocks now: requests that end in this step give theirs back."""
        pool, preemptions = self.scheduler.pool, self.scheduler.counts.preemptions
        computed = sum(request.computed for request in self.scheduler.running)
        self._memory = {
            "owned_blocks": pool.owned,
            "shared_blocks": pool.shared,
            "cached_blocks": len(pool.cached),
            "used_tokens": computed + sum(work.count for work in plan.work),
            "preempted": preemptions - self._preemptions,
        }
        self._preemptions = preemptions

    def after(self, plan: Plan) -> None:
        """Append the record of a step that had work."""
        if not plan:
            return
        seconds = time.perf_counter() - plan.started  # excludes writing this record
        pool, sequences = self.scheduler.pool, []
        for work in plan.work:
            prefill, output = work.prefill_tokens, work.request.output
            blocks = pool.blocks_for(work.start + work.count)
            sequences.append(
                SequenceRecord(
                    work.request.id, prefill, work.count - prefill, blocks, output.finish_reason
                )
            )
        self.steps.append(
            BlocksRecord(
                rows=len(sequences),
                prefill_tokens=sum(sequence.prefill_tokens for sequence in sequences),
                decode_tokens=sum(sequence.decode_tokens for sequence in sequences),
                seconds=seconds,
                started=plan.started,
                sequences=tuple(sequences),
                waiting=self.scheduler.unfinished - len(self.scheduler.running),
                swapped=len(self.scheduler.swapped),
                moves=tuple(plan.moves),
                bookkeeping_seconds=seconds - self.model_time.seconds,
                **self._memory,
            )
        )
