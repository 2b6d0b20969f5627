"""What this stage offers to the tools that drive every stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stage01_forward.generation import Output, Token
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams

from .engine import Engine


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model` with at most `contexts` prompts in a batch; None: its default."""
    return Engine(model, eos_ids) if contexts is None else Engine(model, eos_ids, contexts)


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> Iterator[tuple[int, Token]]:
    """Answer `prompts` batch by batch. Yields (index of the prompt, token) as soon as each token is
    sampled."""
    return engine.run([Output(list(prompt)) for prompt in prompts], sampling)
