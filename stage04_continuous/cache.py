"""The KV cache in slots: fixed places for sequences that come and go. A token's address is (slot, position).

A pass gets its tokens packed, (N,) without any padding, from any mixture of requests. Where each token's key and value go
is looked up; what its query sees is read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.checkpoint import Config
from shared.errors import UserError
from stage03_batching.attention import masked_attention

Share = tuple[
    int, int, int
]  # slot, first position, and number of the tokens that a sequence computes in a pass

# Sequences of different lengths attend in one call, with a mask over the difference, while that costs less than one more
# call would: about as much as reading so many keys.
CALL = 64


class SlotCache:
    """Keys and values of `slots` sequences of up to `slot_tokens` tokens: `kv` is (layers, 2, slots, H, slot_tokens, D).

    It knows nothing of requests: whoever uses a slot says where its sequence begins.
    """

    def __init__(
        self,
        config: Config,
        slots: int,
        slot_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots, self.slot_tokens = (
            slots,
            config.n_positions if slot_tokens is None else slot_tokens,
        )
        if not 1 < self.slot_tokens <= config.n_positions:
            raise UserError(
                f"A slot for {config.name} holds 2 to {config.n_positions} tokens, not {self.slot_tokens}."
            )
        shape = (config.n_layer, 2, slots, config.n_head, self.slot_tokens, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """Memory taken, used or not: 2 * layers * C * bytes a number, for each of slots * slot_tokens."""
        return self.kv.nbytes

    def reset(self, slot: int, used: int) -> None:
        """Wipe the first `used` positions, for the next tenant.

        A mask alone does not do it: a hidden key weighs 0, but 0 times NaN is NaN, should the last tenant have left one.
        """
        self.kv[:, :, slot, :, :used] = 0

    def extend(self, shares: Sequence[Share]) -> PackedAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other."""
        for slot, start, count in shares:
            if not (
                0 <= slot < self.slots
                and start >= 0
                and count >= 1
                and start + count <= self.slot_tokens
            ):
                raise ValueError(
                    f"no place for {count} tokens at {start} in slot {slot}: {self.slots} x {self.slot_tokens}"
                )
        return PackedAttention(self.kv, shares)


@dataclass(frozen=True)
class Group:
    """Neighbouring shares that attend in one call: B sequences with T new tokens each."""

    rows: slice  # of the N packed tokens: B * T of them
    slots: slice  # B
    end: int  # keys read of each slot
    new: int  # T
    mask: Tensor | None  # (B, 1, T, end); None where all is seen, or where `causal` says it
    causal: bool


def neighbours(shares: Sequence[Share]) -> list[list[Share]]:
    """Cut a pass into runs that can attend together: next to each other in memory, as many new tokens, not too unlike in
    length."""
    runs: list[list[Share]] = []
    for share in shares:
        slot, start, count = share
        if runs:
            run = runs[-1]
            last_slot, _, last_count = run[-1]
            longest = max(before for _, before, _ in run)
            padding = len(run) * max(0, start - longest) + max(
                0, longest - start
            )  # keys read for nothing, if they join
            if (slot, count) == (last_slot + 1, last_count) and padding * count <= CALL:
                run.append(share)
                continue
        runs.append([share])
    return runs


class PackedAttention:
    """Attention of one forward pass over N packed tokens, each of which sees the tokens before it in its own slot.

    What is the same in every layer (where to write, what to read, what is visible) is worked out here, once a pass.
    """

    def __init__(self, kv: Tensor, shares: Sequence[Share]) -> None:
        self.kv = kv
        counts = torch.tensor([count for _, _, count in shares])
        slots = torch.tensor([slot for slot, _, _ in shares]).repeat_interleave(counts)
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in shares])
        self.groups: list[Group] = []
        row = 0
        for run in neighbours(shares):
            rows = slice(row, row + len(run) * run[0][2])
            self.groups.append(self._group(run, rows, positions[rows]))
            row = rows.stop
        self.slots, self.positions = slots.to(kv.device), positions.to(kv.device)  # both (N,)

    def _group(self, run: Sequence[Share], rows: slice, positions: Tensor) -> Group:
        first, count = run[0][0], run[0][2]
        ends = [start + count for _, start, _ in run]
        end = max(ends)
        causal = (
            len(run) == 1 and count == end
        )  # a whole prompt: is_causal draws the triangle better than a mask
        mask = None
        if not causal and (count > 1 or min(ends) < end):
            mask = torch.arange(end) <= positions.view(len(run), 1, count, 1)  # (B, 1, T, end)
            mask = mask.to(self.kv.device)
        return Group(rows, slice(first, first + len(run)), end, count, mask, causal)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of the packed tokens (N, H, D) -> (N, H, D)."""
        keys, values = self.kv[layer]  # each (slots, H, slot_tokens, D)
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            queries = q[group.rows].unflatten(0, (-1, group.new)).transpose(1, 2)  # (B, H, T, D)
            seen = slice(group.end)
            mixed = masked_attention(
                queries,
                keys[group.slots, :, seen],
                values[group.slots, :, seen],
                group.mask,
                group.causal,
            )  # (B, H, T, D)
            out[group.rows] = mixed.transpose(1, 2).flatten(0, 1)
        return out
