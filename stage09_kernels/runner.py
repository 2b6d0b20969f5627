"""A runner whose passes are one C call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.config import Config

from .cache import KernelCache
from .program import Program


class KernelRunner:
    """Runs passes of `model` over the keys and values in `cache`, as stage 04's Runner does.
    release: see Program."""

    def __init__(self, model: Any, cache: KernelCache, release: bool = False) -> None:
        self.cache = cache
        self.config: Config = model.config
        self.program = Program(model, cache, release)
        self.unused = getattr(model, "unused", None)

    def move(self, moves: Sequence[Any]) -> None:
        self.cache.move(moves)

    @torch.inference_mode()
    def run(self, ids: Sequence[int], shares: Sequence[Any], rows: Sequence[int]) -> Tensor:
        """Logits (R, V) of one pass over N packed tokens, valid until the next pass."""
        if not ids:
            return torch.empty(0, self.config.vocab_size)
        logits = self.program.run(ids, self.cache.extend(shares), rows)
        return logits if self.unused is None else logits.index_fill_(-1, self.unused, -torch.inf)
