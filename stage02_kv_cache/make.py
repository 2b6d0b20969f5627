"""What this stage offers to the tools that drive every stage: an engine, and answers to many prompts."""

from __future__ import annotations

from typing import Any

from stage01_forward.make import answer as answer
from stage01_forward.model import GPT2

from .engine import Engine


def make(model: GPT2, contexts: int | None = None, **options: Any) -> Engine:
    """An engine for `model`. It has one sequence at a time, so that more `contexts` than one do not matter."""
    return Engine(model, **options)
