"""What each step ran, recorded by an observer, for tests, charts and reports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.records import StepRecord

from .plan import AnyScheduler, Plan

STEPS_KEPT = 5_000  # the newest: as many take 25 MB


@dataclass(frozen=True)
class ShareRecord:
    """One request's share of a pass, and why its request ended if it did."""

    request_id: str
    prefill_tokens: int
    decode_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class PassRecord(StepRecord):
    """A StepRecord by request; `started` is `time.perf_counter()`."""

    started: float = 0.0
    shares: tuple[ShareRecord, ...] = ()
    waiting: int = 0  # requests that do not run
    memory: Any = None  # in use during the pass: here the slot of each share


def slots(plan: Plan) -> tuple[int, ...]:
    """The slot of each share."""
    return tuple(work.table for work in plan.work)


class Recorder:
    """Keeps the records of the last STEPS_KEPT steps, with the `memory` that each uses."""

    def __init__(self, scheduler: AnyScheduler, memory: Callable[[Plan], Any] = slots) -> None:
        self.scheduler, self.memory = scheduler, memory
        self.steps: deque[PassRecord] = deque(maxlen=STEPS_KEPT)
        self._used: Any = None

    def before(self, plan: Plan) -> None:
        """Note the memory now: requests that end in this step give theirs back."""
        self._used = self.memory(plan)

    def after(self, plan: Plan) -> None:
        """Append the record of a step that had work."""
        if not plan:
            return
        seconds = time.perf_counter() - plan.started  # excludes writing this record
        shares = []
        for work in plan.work:
            prefill, request = work.prefill_tokens, work.request
            reason = request.output.finish_reason
            shares.append(ShareRecord(request.id, prefill, work.count - prefill, reason))
        record = PassRecord(
            rows=len(shares),
            prefill_tokens=sum(share.prefill_tokens for share in shares),
            decode_tokens=sum(share.decode_tokens for share in shares),
            seconds=seconds,
            started=plan.started,
            shares=tuple(shares),
            waiting=len(self.scheduler.waiting),
            memory=self._used,
        )
        self.steps.append(record)
