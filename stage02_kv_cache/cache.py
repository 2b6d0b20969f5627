"""The KV cache: one line of slots, and the slot of a token is its position.

A token's key and value never change once they are computed, because attention only looks back. So they are written
down once, and a forward pass runs over the new tokens alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.checkpoint import Config
from shared.errors import UserError


class KVCache:
    """Keys and values of one sequence, allocated once: `kv` is (layers, 2, H, capacity, D).

    `length` slots hold tokens; what lies behind them is never read. Heads come before positions, so that the keys of
    a head lie in one piece and attention reads them as a view.
    """

    def __init__(
        self,
        config: Config,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = config.n_positions if capacity is None else capacity
        if not 1 <= self.capacity <= config.n_positions:
            raise UserError(
                f"A cache for {config.name} holds 1 to {config.n_positions} tokens, not {self.capacity}."
            )
        self.kv = torch.zeros(
            config.n_layer,
            2,
            config.n_head,
            self.capacity,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.length = 0

    @property
    def bytes(self) -> int:
        """Memory taken, used or not: 2 * layers * C * capacity * bytes a number."""
        return self.kv.nbytes

    def crop(self, length: int) -> None:
        """Forget all tokens from position `length` on; 0 empties the cache. Nothing is erased, only never read again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length}: the cache holds {self.length} tokens")
        self.length = length

    def extend(self, count: int) -> CachedAttention:
        """Take the next `count` slots, and return the attention of the forward pass that fills them."""
        if count < 1 or self.length + count > self.capacity:
            raise ValueError(
                f"cannot add {count} tokens: {self.length} of {self.capacity} slots are taken"
            )
        start, self.length = self.length, self.length + count
        return CachedAttention(self.kv, start, self.length)


class CachedAttention:
    """Attention of one forward pass over the tokens at positions start..end-1, which see all tokens before them.

    What is the same in every layer (the slots, the mask) is worked out here, once a pass.
    """

    def __init__(self, kv: Tensor, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.new = kv[:, :, :, start:end]  # (layers, 2, H, T, D): where this pass writes
        self.seen = kv[
            :, :, :, :end
        ]  # (layers, 2, H, end, D): what it reads; views, nothing is copied
        self.positions = torch.arange(start, end, device=kv.device)  # (T,)
        # A square pass is causal, and a single token sees everything. In between, row i sees start + i + 1 tokens;
        # `is_causal` would align the triangle with the first column instead and hide the past. (nanoVLM's first cache
        # met this too: its pull request 69.)
        self.square = start == 0
        self.mask = None
        if not self.square and end - start > 1:
            columns = torch.arange(end, device=kv.device)
            self.mask = columns <= self.positions[:, None]  # (T, end)
        # A CPU's fused kernel is slow for one row of bfloat16: widening the cache to float32 on the way is faster,
        # copy included, and twice as fast from 500 tokens on. The only copy of keys and values that there is.
        self.widen = end - start == 1 and kv.device.type == "cpu" and kv.dtype == torch.bfloat16

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of the new tokens (T, H, D) -> (T, H, D)."""
        self.new[layer, 0] = k.transpose(0, 1)  # (T, H, D) -> (H, T, D)
        self.new[layer, 1] = v.transpose(0, 1)
        keys, values = self.seen[layer]  # each (H, end, D)
        if self.widen:
            q, keys, values = q.float(), keys.float(), values.float()
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self.mask,
            is_causal=self.square,
        )  # (1, H, T, D)
        return out[0].transpose(0, 1).to(k.dtype)
