"""The runner: a model and its cache. It knows tokens and addresses, but no requests.

This is the second seam: requests above, tensors below. A new kernel is another cache in this
runner, and a quantized model has other layers. Tensor parallelism is a runner that sends its
arguments, which are plain integers, to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.config import Config
from stage01_forward.model import Model

from .plan import Move, Share


class Attention(Protocol):
    """The attention of one pass over N packed tokens, as the model calls it."""

    @property
    def order(self) -> Tensor: ...  # (N,): the caller's tokens in the order the model gets them

    @property
    def positions(self) -> Tensor: ...  # (N,): of the tokens in that order

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Cache(Protocol):
    """What a runner needs of a cache."""

    def move(self, moves: Sequence[Move]) -> None: ...

    def extend(self, shares: Sequence[Share]) -> Attention: ...


class AnyRunner(Protocol):
    """What an engine needs of a runner."""

    config: Config

    def move(self, moves: Sequence[Move]) -> None: ...

    def run(self, ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor: ...


class Runner:
    """Runs passes of `model` over the keys and values in `cache`."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache, self.config = model, cache, model.config

    def move(self, moves: Sequence[Move]) -> None:
        """Prepare memory for the next pass, as if one move after the other."""
        self.cache.move(moves)

    @torch.inference_mode()
    def run(self, ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor:
        """Logits (R, V) of one pass over N packed tokens.

        ids: N token ids, those of one share after the other.
        shares: where each sequence is kept, its first position in this pass, and how many tokens
            follow. The shares of one pass belong to different sequences.
        rows: the R places among `ids` whose logits are wanted; any number of them in a share.
        """
        if not ids:
            return torch.empty(0, self.config.vocab_size, device=self.model.device)
        attention = self.cache.extend(shares)
        order = attention.order  # (N,): the cache's preferred order; only this function sees it
        tokens = torch.tensor(ids)[order].to(self.model.device)  # (N,)
        hidden = self.model(tokens, attention.positions, attention.attend)  # (N,) -> (N, C)
        wanted = order.argsort()[torch.tensor(rows, dtype=torch.int64)]  # (R,)
        return self.model.logits(hidden[wanted.to(hidden.device)])  # (R, C) -> (R, V)
