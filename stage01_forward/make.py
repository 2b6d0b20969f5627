"""What this stage offers to the tools that drive every stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.cli import Streaming

from .engine import Engine
from .generation import Token
from .model import GPT2
from .params import SamplingParams


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model`. It has no cache, so `contexts` has no effect."""
    return Engine(model, eos_ids)


def answer(
    engine: Streaming, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> Iterator[tuple[int, Token]]:
    """Answer `prompts` one after the other. Yields (index of the prompt, token) as soon as each
    token is sampled."""
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        for token in engine.stream(prompt, params):
            yield index, token
