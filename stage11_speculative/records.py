"""Records of steps with drafts: those of the engine inside, and what was computed in vain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .drafts import DraftPlan


class Recorder:
    """The records of `inner`, another stage's recorder. Refused drafts are `wasted_tokens`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.steps, self.model_time = inner, inner.steps, inner.model_time

    def before(self, plan: DraftPlan) -> None:
        self.inner.before(plan)

    def after(self, plan: DraftPlan) -> None:
        self.inner.after(plan)
        if plan and plan.refused:
            self.steps[-1] = replace(self.steps[-1], wasted_tokens=plan.refused)
