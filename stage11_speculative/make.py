"""What this stage offers to the tools that drive every stage: an engine, and answers to many
prompts."""

from __future__ import annotations

from typing import Any

from stage04_continuous.make import answer as answer
from stage09_kernels.make import make as make_plain

from .drafts import DraftScheduler, Proposer
from .engine import Engine
from .lengths import Lengths
from .records import Recorder


def with_drafts(
    plain: Any, proposer: Proposer, most: int = 4, lengths: Lengths | None = None
) -> Engine:
    """The engine that verifies drafts, with the parts of `plain`, which stage 05's `make` or a
    later one made. most, lengths: see DraftScheduler."""
    scheduler = DraftScheduler(plain.scheduler, proposer, most, lengths)
    recorder, *observers = plain.observers
    return Engine(
        plain.runner, scheduler, plain.eos_ids, Recorder(recorder), observers, plain.sample_tokens
    )


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 09's engine with drafts from the request's own text. options: those of its `make`."""
    from .proposers import NGram

    return with_drafts(make_plain(model, contexts, **options), NGram())
