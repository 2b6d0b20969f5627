"""Attention of one query over blocks by an online softmax, as in FlashAttention, with PyTorch.

fast/attention.c does the same in C, with several queries and 256 keys at a time. `merge` puts
together what several threads have read, as in Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(q: Tensor, keys: Tensor, values: Tensor, table: Sequence[int], tokens: int) -> Tensor:
    """Attention (D,) of q (D,) to the first `tokens` tokens of the blocks in `table`.

    keys, values: (blocks, block, D). Slots after the last token may hold anything, even NaN. Only
    the largest score so far, the sum of weights and the weighted sum of values are kept from block
    to block (Milakov and Gimelshein, 2018).
    """
    block, largest = keys.shape[1], q.new_tensor(-torch.inf)
    total, output = q.new_zeros(()), torch.zeros_like(q)
    for number, first in enumerate(range(0, tokens, block)):
        index, count = table[number], min(block, tokens - first)
        scores = keys[index, :count] @ q / len(q) ** 0.5  # (count,)
        now = torch.maximum(largest, scores.max())
        weights, decay = (scores - now).exp(), (largest - now).exp()
        output = decay * output + weights @ values[index, :count]
        total = decay * total + weights.sum()
        largest = now
    return output / total


def merge(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Attention (D,) from the parts of threads that each read some of the blocks.

    A part is the largest score, the sum of weights and the weighted sum of values (D,) of its
    blocks, with weights exp(score - largest). A part without tokens has -inf, 0 and zeros. The
    order of parts does not matter.
    """
    largest = torch.stack([part[0] for part in parts])  # (P,)
    decay = (largest - largest.max()).exp()
    total = decay @ torch.stack([part[1] for part in parts])
    return decay @ torch.stack([part[2] for part in parts]) / total
