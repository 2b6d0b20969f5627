"""Causal attention over all tokens of one sequence: one version to read, one to run.

`explicit_attention` writes out softmax(Q K^T / sqrt(D)) V with its mask. `Recompute` is this
stage's `attend`: it keeps nothing and lets PyTorch's fused kernel do the same sum without ever
storing the (H, T, T) scores.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (H, T, D) -> (H, T, D), every step by hand."""
    t = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (H, T, D) x (H, D, T) -> (H, T, T)
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(diagonal=1)
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)  # rows sum to 1
    return weights @ v  # (H, T, T) x (H, T, D) -> (H, T, D)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One kernel for the same sum, never storing all scores (Dao et al., FlashAttention, 2022)."""
    # PyTorch takes the fused path only for four dimensions: (1, H, T, D).
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=len(q) > len(k)
    )[0]


class Recompute:
    """Attention of one forward pass over a whole sequence. It keeps nothing for the next one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (T, H, D) -> (T, H, D)."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (T, H, D) -> (H, T, D)
        return fused_attention(q, k, v).transpose(0, 1)
