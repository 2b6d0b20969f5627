"""What this stage offers to the tools that drive every stage."""

from __future__ import annotations

from typing import Any

from stage01_forward.make import answer as answer
from stage01_forward.model import GPT2

from .engine import Engine


def make(model: GPT2, contexts: int | None = None, **options: Any) -> Engine:
    """An engine for `model`. It runs one sequence at a time, so `contexts` has no effect."""
    return Engine(model, **options)
