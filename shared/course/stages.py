"""The stages by name, for the tools that drive all of them.

A stage that has an engine says so in its `make.py`:

    make(model, contexts=None, **options) -> Engine         memory for `contexts` whole contexts
    answer(engine, prompts, sampling) -> (place, Token)...  all prompts, as fast as the engine can

A new stage is found by its folder and needs no edit here. Stages are imported only on demand,
because `--mine` first lays a student's copy over a stage.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import paths


def names() -> list[str]:
    """The stages that have an engine, in reading order."""
    return [name for name in paths.discover() if (paths.ROOT / name / "make.py").exists()]


def engines() -> dict[str, Callable[..., Any]]:
    """The `make` of each stage with an engine."""
    return {name: importlib.import_module(f"{name}.make").make for name in names()}


def answer(
    name: str, engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[Any]
) -> Iterator[tuple[int, Any]]:
    """Answer all `prompts` with the engine of stage `name`; yields (place of the prompt, Token)."""
    tokens: Iterator[tuple[int, Any]] = importlib.import_module(f"{name}.make").answer(
        engine, prompts, sampling
    )
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
