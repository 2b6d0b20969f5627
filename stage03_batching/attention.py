"""Attention of many rows at once over keys and values in a cache, each row with its own mask."""

from __future__ import annotations

import torch

from shared.attention import attention


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
) -> torch.Tensor:
    """q (B, H, T, D) over keys and values (B, H_kv, S, D), views into a cache -> (B, H, T, D).

    `mask` (B, 1, T, S) is True where a query sees a key; None: each query sees all keys, or, if
    `causal` (T = S), its own key and those before it. Keys and values may have another dtype
    than q, which the result has.
    """
    return attention(q, keys.to(q.dtype), values.to(q.dtype), mask, causal)
