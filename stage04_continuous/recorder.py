"""What each step ran, recorded by an observer, for tests, charts and reports."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from shared.records import StepRecord, Stopwatch

from .plan import AnyScheduler, Plan

STEPS_KEPT = 100_000


@dataclass(frozen=True)
class SlotRecord:
    """One slot's share of a pass, and why its request ended if it did."""

    slot: int
    request_id: str
    prefill_tokens: int
    decode_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class SlotsRecord(StepRecord):
    """A StepRecord by slot; `started` is `time.perf_counter()`."""

    started: float = 0.0
    slots: tuple[SlotRecord, ...] = ()
    waiting: int = 0  # requests without a slot
    bookkeeping_seconds: float = 0.0  # part of `seconds`: scheduling, sampling, postprocessing


class Recorder:
    """Keeps the records of the last `kept` steps. The engine times each pass with `model_time`."""

    def __init__(self, scheduler: AnyScheduler, kept: int = STEPS_KEPT) -> None:
        self.scheduler, self.model_time = scheduler, Stopwatch()
        self.steps: deque[SlotsRecord] = deque(maxlen=kept)

    def before(self, plan: Plan) -> None:
        """Nothing to note: the slots are still known after the step."""

    def after(self, plan: Plan) -> None:
        """Append the record of a step that had work."""
        if not plan:
            return
        seconds = time.perf_counter() - plan.started  # excludes writing this record
        slots = []
        for work in plan.work:
            prefill, output = work.prefill_tokens, work.request.output
            slots.append(
                SlotRecord(
                    work.table, work.request.id, prefill, work.count - prefill, output.finish_reason
                )
            )
        self.steps.append(
            SlotsRecord(
                rows=len(slots),
                prefill_tokens=sum(slot.prefill_tokens for slot in slots),
                decode_tokens=sum(slot.decode_tokens for slot in slots),
                seconds=seconds,
                started=plan.started,
                slots=tuple(slots),
                waiting=len(self.scheduler.waiting),
                bookkeeping_seconds=seconds - self.model_time.seconds,
            )
        )
