"""The KV cache: one line of slots, in which a token's slot is its position.

The key and value of a token never change once they are computed, because attention only looks back.
The cache stores them once, and a forward pass runs over the new tokens alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.attention import attention
from shared.config import Config


class KVCache:
    """Keys and values of one sequence, allocated once: `kv` is (layers, 2, H_kv, capacity, D).

    The first `length` slots hold tokens; the rest is never read. Heads come before positions, so
    that attention reads one head's keys as a view. `dtype` may differ from that of the weights.
    """

    def __init__(
        self, config: Config, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = config.n_positions
        shape = (config.n_layer, 2, config.n_kv_head, self.capacity, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0  # to make it smaller forgets the newest tokens

    def extend(self, count: int) -> CachedAttention:
        """Take the next `count` slots, and return the attention of the step that fills them."""
        if count < 1 or self.length + count > self.capacity:
            raise ValueError(
                f"cannot add {count} tokens: {self.length} of {self.capacity} slots are taken"
            )
        start, self.length = self.length, self.length + count
        return CachedAttention(self.kv, start, self.length)


class CachedAttention:
    """Attention of one forward pass over the tokens at positions start..end-1 and all before them:
    what all layers share (the slots, the mask), computed once per step."""

    def __init__(self, kv: Tensor, start: int, end: int) -> None:
        self.new = kv[:, :, :, start:end]  # (layers, 2, H_kv, T, D): where this step writes
        self.seen = kv[:, :, :, :end]  # (layers, 2, H_kv, end, D): what it reads, in place
        self.positions = torch.arange(start, end, device=kv.device)  # (T,)
        # A square step is causal, and a single token sees everything. In between, row i sees
        # start + i + 1 tokens; `is_causal` would align the triangle with the first column instead
        # and hide the past. (nanoVLM's first cache hit this too: see its pull request 69.)
        self.square = start == 0
        self.mask = None
        if not self.square and end - start > 1:
            columns = torch.arange(end, device=kv.device)
            self.mask = columns <= self.positions[:, None]  # (T, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, D), and k and v (T, H_kv, D), of the new tokens -> (T, H, D)."""
        self.new[layer, 0] = k.transpose(0, 1)  # (T, H_kv, D) -> (H_kv, T, D)
        self.new[layer, 1] = v.transpose(0, 1)
        keys, values = self.seen[layer][:, None]  # each (1, H_kv, end, D): a batch of one
        out = attention(q.transpose(0, 1)[None], keys, values, self.mask, self.square)
        return out[0].transpose(0, 1)  # (1, H, T, D) -> (T, H, D)
