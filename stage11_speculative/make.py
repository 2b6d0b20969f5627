"""What this stage offers to the tools that drive every stage: an engine, and answers to many
prompts."""

from __future__ import annotations

from typing import Any

from stage04_continuous.make import answer as answer
from stage09_kernels.make import make as make_plain

from .draft_model import DraftModel
from .drafts import DraftScheduler, Proposer
from .engine import Engine, Verifier
from .grammar import Forced
from .lengths import Adaptive, Lengths, measure_passes
from .proposers import NGram
from .records import Recorder
from .rejection import Rejection
from .suffix import Suffix


def with_drafts(
    plain: Any,
    proposer: Proposer,
    most: int = 4,
    lengths: Lengths | None = None,
    verify: Verifier | None = None,
) -> Engine:
    """The engine that verifies drafts, with the parts of `plain`, which stage 05's `make` or a
    later one made. most, lengths: see DraftScheduler. verify: see Engine."""
    scheduler = DraftScheduler(plain.scheduler, Forced(proposer), most, lengths)
    recorder, *observers = plain.observers
    return Engine(
        plain.runner,
        scheduler,
        plain.eos_ids,
        Recorder(recorder),
        observers,
        plain.sample_tokens,
        verify,
    )


def with_draft_model(
    plain: Any, draft: Any, most: int = 4, lengths: Lengths | None = None, drawn: bool = False
) -> Engine:
    """The same with drafts of the model `draft`. drawn: sampling requests get drafts drawn from its
    distribution, by rejection: their answers keep their distribution, and not their seed's
    tokens. Raises UserError if the models do not fit."""
    inner = plain.scheduler
    swap = inner.swap_pool.count if inner.swap_pool else 0
    proposer = DraftModel(
        draft,
        plain.config,
        inner.pool,
        inner.tables,
        most,
        inner.max_sequences,
        swap,
        drawn,
        plain.eos_ids,
    )
    engine = with_drafts(plain, proposer, most, lengths, Rejection(proposer) if drawn else None)
    engine.scheduler.prepare = proposer.prepare
    engine.observers.append(proposer)
    return engine


def speculate(plain: Any, kind: str, count: int, draft: Any = None, drawn: bool = False) -> Engine:
    """For the server: drafts of `kind`, which OFFER names, as many as pay, at most `count` in a
    pass of a request. draft, drawn: the draft model, see `with_draft_model`. Raises UserError if it
    does not fit."""
    lengths = Adaptive(measure_passes(plain.runner, plain.scheduler.pool.count))
    if kind == "draft":
        return with_draft_model(plain, draft, count, lengths, drawn)
    return with_drafts(plain, NGram() if kind == "ngram" else Suffix(), count, lengths)


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 09's engine with drafts from the request's own text and from past answers. options:
    those of its `make`."""
    return with_drafts(make_plain(model, contexts, **options), Suffix())
