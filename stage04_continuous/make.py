"""What this stage offers to the tools that drive every stage: an engine, and answers to many prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stage01_forward.generation import Token
from stage01_forward.model import GPT2
from stage01_forward.sampling import SamplingParams

from .engine import Engine
from .request import Request
from .scheduler import Scheduler


def make(model: GPT2, contexts: int | None = None, **options: Any) -> Engine:
    """An engine for `model` with `contexts` slots, each a whole context; None: the scheduler's default.

    `options` are the scheduler's.
    """
    slots = {} if contexts is None else {"max_sequences": contexts}
    return Engine(model, scheduler=Scheduler(**slots, **options))


def answer(
    engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> Iterator[tuple[int, Token]]:
    """Answer `prompts`, which arrive together; yields each token with its prompt's place, as soon as it exists."""
    requests = [
        engine.add(Request(list(prompt), params))
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    places = {request.id: place for place, request in enumerate(requests)}
    for id, token in engine.run():
        yield places[id], token
