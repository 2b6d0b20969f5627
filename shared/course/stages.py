"""The stages by name, for the tools that drive all of them.

A stage says in its `OFFER` what it brings, and a new one needs no edit here. Stages are imported
only on demand, because `--mine` first lays a student's copy over a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import paths


def offers() -> dict[str, Any]:
    """The offers of the stages that have an engine, in reading order."""
    from stage01_forward import offer

    return {entry.stage: entry for entry in offer.offers() if entry.engine}


def engines() -> dict[str, Callable[..., Any]]:
    """The `make` of each stage with an engine."""
    return {name: offer.load(offer.engine).make for name, offer in offers().items()}


def answer(
    name: str, engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Answer all `prompts` with the engine of stage `name`; yields (place of the prompt, Token)."""
    offer = offers()[name]
    tokens: Iterator[tuple[int, Any]] = offer.load(offer.engine).answer(engine, prompts, sampling)
    return tokens


def oracle(model: Any) -> Any:
    """The first stage's engine, which recomputes everything: its tokens are right by definition."""
    return engines()[paths.discover()[0]](model)


def sampling_params() -> Any:
    """The class SamplingParams, which the first stage defines and all others take."""
    from stage01_forward.params import SamplingParams

    return SamplingParams


def families() -> Any:
    """What loads the models of all families, for `cli.load_model_from`."""
    from stage01_forward import families

    return families


def load_model(checkpoint: Any, **options: Any) -> Any:
    """The model of a checkpoint."""
    return families().load_model(checkpoint, **options)
