"""What this stage offers to the tools that drive every stage: an engine, and answers to many prompts."""

from __future__ import annotations

from typing import Any

from stage01_forward.model import GPT2
from stage04_continuous.make import answer as answer

from .blocks import BlockPool
from .engine import Engine
from .scheduler import Scheduler


def make(
    model: GPT2,
    contexts: int | None = None,
    block_size: int = 16,
    sanitize: bool = False,
    **options: Any,
) -> Engine:
    """An engine for `model` with blocks for `contexts` whole contexts; None: the default memory.

    `options` are the scheduler's.
    """
    if contexts is None:
        return Engine(model, sanitize=sanitize, **options)
    pool = BlockPool(contexts * -(-model.config.n_positions // block_size), block_size)
    return Engine(model, scheduler=Scheduler(pool, **options), sanitize=sanitize)
