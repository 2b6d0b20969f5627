"""Sliding windows: in some layers of some models a query sees only the last `window` tokens.

A cache makes the attention of a pass for one window. `by_layer` makes one for each distinct window,
and each layer runs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import ALL


def sees(queries: Tensor, end: int, window: int) -> Tensor:
    """Which of the keys at 0..end-1 the queries at positions (..., T) see, as (..., T, end): their
    own and the `window` - 1 before it."""
    keys, queries = torch.arange(end, device=queries.device), queries[..., None]
    return (keys <= queries) & (keys > queries - window)


def by_layer(windows: Sequence[int], make: Callable[[int], Any]) -> Any:
    """The attention of one pass for layers with these `windows` (empty: no layer has one); `make`
    makes it for one window."""
    kinds = {window: make(window) for window in set(windows) or {ALL}}
    return ByLayer(windows, kinds) if len(kinds) > 1 else kinds.popitem()[1]


class ByLayer:
    """Attention of one pass, by each layer's own window. All write to the same slots."""

    def __init__(self, windows: Sequence[int], kinds: dict[int, Any]) -> None:
        self.layers = [kinds[window] for window in windows]
        self.positions = self.layers[0].positions
        self.order = getattr(self.layers[0], "order", None)  # of engines that pack their tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layers[layer].attend(layer, q, k, v)
