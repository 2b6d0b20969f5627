"""The KV cache of a batch: a row for each sequence, and all rows write to the same column.

Prompts differ in length, and a tensor is a rectangle. So short prompts are padded on the left, and
their last tokens share a column: the next token of every row goes into the next column. Two things
undo the padding: positions count from a row's first real token, and a mask hides what precedes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.attention import attention
from shared.config import Config


class PaddedCache:
    """Keys and values of B sequences: `kv` is (layers, 2, B, H_kv, columns, D).

    `length` columns are filled. prompt_lengths: the number of real tokens of each row; row b begins
    after `padding[b]` columns without a token.
    """

    def __init__(
        self,
        config: Config,
        prompt_lengths: Sequence[int],
        columns: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.columns, self.last_position = columns, config.n_positions - 1
        shape = (config.n_layer, 2, len(prompt_lengths), config.n_kv_head, columns, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        padding = [max(prompt_lengths) - length for length in prompt_lengths]
        self.padding = torch.tensor(padding, device=device)  # (B,)
        self.length = 0

    def extend(self, count: int) -> PaddedAttention:
        """Take the next `count` columns, and return the attention of the step that fills them."""
        if count < 1 or self.length + count > self.columns:
            raise ValueError(
                f"cannot add {count} columns: {self.length} of {self.columns} are taken"
            )
        start, self.length = self.length, self.length + count
        return PaddedAttention(self.kv, self.padding, start, self.length, self.last_position)


class PaddedAttention:
    """Attention of one forward pass over the columns start..end-1 of every row.

    What all layers share (columns, positions, mask) is computed here, once per step.
    """

    def __init__(
        self, kv: Tensor, padding: Tensor, start: int, end: int, last_position: int
    ) -> None:
        self.new = kv[:, :, :, :, start:end]  # (layers, 2, B, H_kv, T, D): where this step writes
        self.seen = kv[:, :, :, :, :end]  # (layers, 2, B, H_kv, end, D): what it reads, in place
        columns = torch.arange(end, device=kv.device)
        queries = columns[start:, None]  # (T, 1): the columns of this step
        # Known elsewhere as "cumulative sum of the mask, minus one". Padding has no position, nor
        # has a row that stays in the batch past the end of its context: any valid position will do.
        self.positions = (columns[start:] - padding[:, None]).clamp(0, last_position)  # (B, T)
        real = columns >= padding[:, None, None]  # (B, 1, end): the columns that hold a token
        # A padding query would see nothing, and a plain softmax of nothing is NaN, which spreads:
        # let the query see itself.
        self.mask = ((columns <= queries) & real | (columns == queries))[:, None]  # (B, 1, T, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, T, H, D), and k and v (B, T, H_kv, D), of the new columns -> (B, T, H, D)."""
        self.new[layer, 0] = k.transpose(1, 2)  # (B, T, H_kv, D) -> (B, H_kv, T, D)
        self.new[layer, 1] = v.transpose(1, 2)
        keys, values = self.seen[layer]  # each (B, H_kv, end, D)
        return attention(q.transpose(1, 2), keys, values, self.mask).transpose(1, 2)
