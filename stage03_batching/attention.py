"""Attention of many rows at once over keys and values that lie in a cache, each row with a mask of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """q (B, H, T, D) over keys and values (B, H, S, D), views into a cache -> (B, H, T, D).

    `mask` (B, 1, T, S) is True where a query sees a key; None: each sees all, or, if `causal`
    (T = S), itself and what lies before.
    """
    if q.shape[2] == 1 and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _one_query_each(q, keys, values, mask)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)


def _one_query_each(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The same for a single query a row (T = 1), written out.

    A CPU's fused kernel is slow for one query of bfloat16. Two products are up to three times as fast, and the first of
    them must be keys times query: query times keys, the same sum with its sides exchanged, is half as fast again.
    """
    scores = (
        (keys @ (q * q.shape[-1] ** -0.5).transpose(2, 3)).transpose(2, 3).float()
    )  # (B, H, S, 1) -> (B, H, 1, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values  # (B, H, 1, S) @ (B, H, S, D)
