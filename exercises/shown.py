"""What programs under `shows:` share: the embedded model, any engine by its name, and answers."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from shared import models, registry
from shared.tokenizer import load_tokenizer

ONCE = "Once upon a time"
CROWD = (
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
    ONCE,
)
load = registry.load


@functools.cache
def stories() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    weights = models.load("stories")
    return models.load_model(weights), load_tokenizer(weights.folder)


def engine(name: str, contexts: int | None = None, **options: Any) -> Any:
    """An engine of shared/registry.py for the embedded model."""
    return load(registry.ENGINES[name])(stories()[0], contexts, **options)


def encode(text: str) -> list[int]:
    """Its token ids."""
    return list(stories()[1].encode(text))


def decode(ids: Sequence[int]) -> str:
    """Their text."""
    return str(stories()[1].decode(list(ids))).strip()


def params(count: int, **options: Any) -> Any:
    """SamplingParams for `count` tokens, greedy by default."""
    return load("stage01_forward.params:SamplingParams")(max_tokens=count, **options)


def request(prompt: str | list[int], count: int, id: str = "", **options: Any) -> Any:
    """A request of stage 04 and later."""
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    return load("stage04_continuous.request:Request")(ids, params(count, **options), id)


def tell(engine: Any, prompts: Sequence[str], count: int = 40, **options: Any) -> None:
    """Answer prompts together, and print each with its answer."""
    outputs = engine.generate([encode(prompt) for prompt in prompts], params(count, **options))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(textwrap.fill(f"{prompt} / {decode(output.token_ids)}", 96))
        reason = output.error or f"{len(output.token_ids)} tokens, {output.finish_reason}"
        print(f"    [{reason}]", flush=True)
