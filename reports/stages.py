"""The stages' engines by the names of their packages, for the tools that drive all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared import models, registry


def entries() -> dict[str, str]:
    """The entry of each stage with an engine, in reading order, but for stage 11's, whose drafts
    are options of other engines."""
    return {
        entry.partition(".")[0]: entry
        for name, entry in registry.ENGINES.items()
        if name != "speculative"
    }


def engines() -> dict[str, Callable[..., Any]]:
    """Their `make`. Stages are imported only here."""
    return {stage: registry.load(entry) for stage, entry in entries().items()}


def answer(
    engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Answer all `prompts`, as many at a time as the engine can; yields (place of the prompt,
    Token) for each token at once."""
    pairs = list(zip(prompts, sampling, strict=True))
    if hasattr(engine, "add"):  # from stage 04 on
        from stage04_continuous.request import Request

        requests = [engine.add(Request(list(prompt), params)) for prompt, params in pairs]
        places = {request.id: place for place, request in enumerate(requests)}
        yield from ((places[id], token) for id, token in engine.run())
    elif hasattr(engine, "run"):  # stage 03, batch by batch
        from stage01_forward.generation import Output

        yield from engine.run([Output(list(prompt)) for prompt in prompts], sampling)
    else:
        for place, (prompt, params) in enumerate(pairs):
            yield from ((place, token) for token in engine.stream(prompt, params))


def oracle(model: Any) -> Any:
    """The first stage's engine, which recomputes everything: its tokens are right by definition."""
    return registry.load(registry.ENGINES["forward"])(model)


def sampling_params() -> Any:
    """The class SamplingParams, which the first stage defines and all others take."""
    from stage01_forward.params import SamplingParams

    return SamplingParams


def load_model(checkpoint: Any, **options: Any) -> Any:
    """The model of a checkpoint."""
    return models.load_model(checkpoint, **options)
