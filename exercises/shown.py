"""What programs under `shows:` share: the embedded model in any engine, and what it answers."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from shared import models
from shared.registry import ENGINES, SAMPLING, load
from shared.tokenizer import load_tokenizer

ONCE = "Once upon a time"
CROWD = (
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
    ONCE,
)


@functools.cache
def stories() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    weights = models.load("stories")
    return models.load_model(weights), load_tokenizer(weights.folder)


def engine(name: str, blocks: int = 0, **options: Any) -> Any:
    """An engine by its name in shared/registry.py; a paged one with so many blocks of 16 tokens."""
    if blocks:
        options["pool"] = load("stage05_paged.blocks:BlockPool")(blocks, 16)
        options["max_sequences"] = blocks
    return load(ENGINES[name])(stories()[0], **options)


def encode(text: str) -> list[int]:
    return list(stories()[1].encode(text))


def decode(ids: Sequence[int]) -> str:
    return str(stories()[1].decode(list(ids))).strip()


def params(count: int, **options: Any) -> Any:
    """SamplingParams for `count` tokens, greedy by default."""
    return load(SAMPLING)(max_tokens=count, **options)


def request(prompt: str, count: int, id: str = "", **options: Any) -> Any:
    """A request of stage 04 and later."""
    make = load("stage04_continuous.request:Request")
    return make(encode(prompt), params(count, **options), id)


def tell(engine: Any, prompts: Sequence[str], count: int = 40) -> None:
    """Answer prompts together, and print each with its answer."""
    outputs = engine.generate([encode(prompt) for prompt in prompts], params(count))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(textwrap.fill(f"{prompt} / {decode(output.token_ids)}", 96))
        print(f"    [{output.error or output.finish_reason}]")
