"""What this stage offers to the tools that drive every stage."""

from __future__ import annotations

from collections.abc import Sequence

from stage01_forward.make import answer as answer
from stage01_forward.model import GPT2

from .engine import Engine


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model`. It runs one sequence at a time, so `contexts` has no effect."""
    return Engine(model, eos_ids)
