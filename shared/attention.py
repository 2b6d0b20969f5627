"""PyTorch's attention kernel, and what is faster where that is slow.

Stages give it a query's mask and what the query may see. How heads share keys, and which dtypes a
processor is slow at, stays here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V: q (B, H, T, D) over keys and values (B, H_kv, S, D), views into a
    cache -> (B, H, T, D).

    `mask` (..., T, S) is True where a query sees a key; None: each query sees all keys, or, if
    `causal` (T = S), its own key and those before it. Keys and values are converted to q's
    dtype. H may be a multiple of H_kv: then H / H_kv query heads share a head of keys and values.
    """
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    group = q.shape[1] // keys.shape[1]
    if causal:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=group > 1)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    if q.shape[2] == 1 and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        if len(q) == 1:  # then float32 is faster than two products, the conversion included
            return attention(q.float(), keys, values, mask).to(q.dtype)
        attend = by_hand
    if group == 1:
        return attend(q, keys, values, mask)
    # Queries that share keys become rows of one product, so that keys and values are read once.
    rows = q.reshape(len(q), keys.shape[1], -1, q.shape[3])  # (B, H_kv, group * T, D)
    if mask is not None:
        mask = mask.repeat(*[1] * (mask.ndim - 2), group, 1)
    return attend(rows, keys, values, mask).reshape(q.shape)


def by_hand(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The sum that the kernel computes, written out, for H = H_kv.

    On a CPU, the fused kernel is slow for single bfloat16 queries; two products are up to three
    times as fast. The first must be keys times query: query times keys is the same sum at half
    the speed.
    """
    scores = keys @ (q * q.shape[-1] ** -0.5).transpose(2, 3)  # (B, H, S, T)
    scores = scores.transpose(2, 3).to(torch.promote_types(q.dtype, torch.float32))  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values  # (B, H, T, S) @ (B, H, S, D)
