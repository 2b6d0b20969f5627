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

from shared.config import ALL, Config
from shared.windows import sees


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (H, T, D) -> (H, T, D), every step by hand."""
    t = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (H, T, D) x (H, D, T) -> (H, T, T)
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(diagonal=1)
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)  # rows sum to 1
    return weights @ v  # (H, T, T) x (H, T, D) -> (H, T, D)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, window: int = ALL) -> Tensor:
    """One kernel for the same sum, never storing all scores (Dao et al., FlashAttention, 2022)."""
    # PyTorch takes the fused path only for four dimensions: (1, H, T, D).
    grouped = len(q) > len(k)  # several query heads share a head of keys and values
    if (tokens := q.shape[1]) > window:  # never in GPT-2: a query sees all tokens before it
        mask = sees(torch.arange(tokens, device=q.device), tokens, window)  # (T, T)
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, enable_gqa=grouped
        )[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=grouped
    )[0]


class Recompute:
    """Attention of one forward pass over a whole sequence. It keeps nothing for the next one.

    config: the model's; None if no layer has a sliding window.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.windows = config.windows if config else ()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (T, H, D) -> (T, H, D)."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (T, H, D) -> (H, T, D)
        window = self.windows[layer] if self.windows else ALL
        return fused_attention(q, k, v, window).transpose(0, 1)
