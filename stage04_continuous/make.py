"""What this stage offers to the tools that drive every stage: an engine, and answers to many
prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stage01_forward.families import plain
from stage01_forward.generation import Token
from stage01_forward.model import Model
from stage01_forward.params import SamplingParams

from .cache import SlotCache
from .engine import Engine
from .plan import Observer
from .records import STEPS_KEPT, Recorder
from .request import Request
from .runner import Runner
from .scheduler import Scheduler


def make(
    model: Model,
    contexts: int | None = None,
    *,
    scheduler: Scheduler | None = None,
    eos_ids: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    steps_kept: int = STEPS_KEPT,
    **options: Any,
) -> Engine:
    """The engine for `model` with `contexts` slots (default 8) of a whole context each.

    options: those of Scheduler; or give a `scheduler`. Raises UserError for invalid settings.
    """
    if contexts is not None:
        options["max_sequences"] = contexts
    if scheduler is None:
        scheduler = Scheduler(**options)
    config, slot_count = plain(model.config), scheduler.max_sequences
    cache = SlotCache(config, slot_count, dtype=model.dtype, device=model.device)
    recorder = Recorder(scheduler, steps_kept)
    return Engine(Runner(model, cache, config), scheduler, eos_ids, recorder, observers)


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> Iterator[tuple[int, Token]]:
    """Answer `prompts`, which arrive together. Yields (index of the prompt, token) for each
    token at once."""
    requests = [
        engine.add(Request(list(prompt), params))
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    places = {request.id: place for place, request in enumerate(requests)}
    for id, token in engine.run():
        yield places[id], token
