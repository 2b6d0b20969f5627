"""What each step ran, recorded by an observer, for tests, charts and reports."""

from __future__ import annotations

import time
from collections import deque
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
class SharesRecord(StepRecord):
    """A StepRecord by request; `started` is `time.perf_counter()`."""

    started: float = 0.0
    shares: tuple[ShareRecord, ...] = ()
    waiting: int = 0  # requests that do not run


@dataclass(frozen=True)
class SlotsRecord(SharesRecord):
    slots: tuple[int, ...] = ()  # of each share


def fields(plan: Plan, scheduler: AnyScheduler) -> dict[str, Any]:
    """The fields of a SharesRecord, at the end of a step."""
    seconds = time.perf_counter() - plan.started  # excludes writing this record
    shares = []
    for work in plan.work:
        prefill, request = work.prefill_tokens, work.request
        reason = request.output.finish_reason
        shares.append(ShareRecord(request.id, prefill, work.count - prefill, reason))
    return {
        "rows": len(shares),
        "prefill_tokens": sum(share.prefill_tokens for share in shares),
        "decode_tokens": sum(share.decode_tokens for share in shares),
        "seconds": seconds,
        "started": plan.started,
        "shares": tuple(shares),
        "waiting": len(scheduler.waiting),
    }


class Recorder:
    """Keeps the records of the last STEPS_KEPT steps."""

    def __init__(self, scheduler: AnyScheduler) -> None:
        self.scheduler = scheduler
        self.steps: deque[SlotsRecord] = deque(maxlen=STEPS_KEPT)

    def before(self, plan: Plan) -> None:
        """Nothing to note: the slots are still known after the step."""

    def after(self, plan: Plan) -> None:
        """Append the record of a step that had work."""
        if plan:
            slots = tuple(work.table for work in plan.work)
            self.steps.append(SlotsRecord(**fields(plan, self.scheduler), slots=slots))
