"""The KV cache in slots: fixed places for sequences that come and go. A token's address is
(slot, position).

A pass gets its tokens packed, (N,) without padding, from any mixture of requests. Each new key and
value is written to its address; what a query sees is read in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shared.attention import attention
from shared.config import Config

from .plan import Wipe

AShare = TypeVar("AShare", bound=tuple[object, int, int])
Share = tuple[int, int, int]  # slot, first position, number of tokens that a pass computes

# Sequences of different lengths attend in one call, with a mask over the difference, as long as
# that is cheaper than another call, which costs about as much as reading this many keys.
CALL = 64


class SlotCache:
    """Keys and values of `slots` sequences of up to `slot_tokens` tokens (None: a whole context):
    `kv` is (layers, 2, slots, H, slot_tokens, D), with the H heads of keys and values.

    It knows no requests: its caller decides which sequence is in which slot.
    """

    def __init__(
        self,
        config: Config,
        slots: int,
        slot_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        tokens = config.n_positions if slot_tokens is None else slot_tokens
        shape = (config.n_layer, 2, slots, config.n_kv_head, tokens, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)

    def move(self, moves: Sequence[Wipe]) -> None:
        """Wipe slots for their next sequences.

        A mask alone is not enough: it gives a hidden token weight 0, but if the last sequence left
        a NaN there, 0 times NaN is NaN.
        """
        for wipe in moves:
            self.kv[:, :, wipe.slot, :, : wipe.used] = 0

    def extend(self, shares: Sequence[Share]) -> PackedAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other."""
        return PackedAttention(self.kv, shares)


@dataclass(frozen=True)
class Group:
    """Adjacent shares that attend in one call: B sequences with T new tokens each."""

    rows: slice  # of the N packed tokens: B * T of them
    slots: slice  # B
    end: int  # keys read from each slot
    new: int  # T
    mask: Tensor | None  # (B, 1, T, end); None: all is visible, or `causal` is set
    causal: bool


def neighbours(shares: Sequence[Share]) -> list[list[Share]]:
    """Cut a pass into runs that can attend together: adjacent slots, equal counts of new tokens,
    similar lengths."""
    runs: list[list[Share]] = []
    for share in shares:
        slot, start, count = share
        if runs:
            run = runs[-1]
            last_slot, _, last_count = run[-1]
            longest = max(before for _, before, _ in run)
            # Keys read for nothing if the share joins the run.
            padding = len(run) * max(0, start - longest) + max(0, longest - start)
            if (slot, count) == (last_slot + 1, last_count) and padding * count <= CALL:
                run.append(share)
                continue
        runs.append([share])
    return runs


def addresses(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """Slots and positions, (N,) each, of the N packed tokens of `shares`."""
    counts = torch.tensor([count for _, _, count in shares])
    slots = torch.tensor([slot for slot, _, _ in shares]).repeat_interleave(counts)
    return slots, torch.cat([torch.arange(start, start + count) for _, start, count in shares])


class PackedAttention:
    """Attention of one pass over N packed tokens, each of which sees the tokens before it in its
    own slot.

    Shares that can attend together are placed side by side: `order` (N,) lists the caller's tokens
    in the order in which the model gets them. What all layers share (where to write, what to read,
    what is visible) is worked out here, once per pass.
    """

    def __init__(self, kv: Tensor, shares: Sequence[Share]) -> None:
        self.kv = kv
        self.order, ranked = ordered(shares, key=lambda share: (share[2], share[0]))
        slots, positions = addresses(ranked)
        self.groups: list[Group] = []
        row = 0
        for run in neighbours(ranked):
            rows = slice(row, row + len(run) * run[0][2])
            self.groups.append(self._group(run, rows, positions[rows]))
            row = rows.stop
        self.slots, self.positions = slots.to(kv.device), positions.to(kv.device)  # both (N,)

    def _group(self, run: Sequence[Share], rows: slice, positions: Tensor) -> Group:
        """What a run reads and sees; `rows` of the pass are its tokens, at `positions` (B * T,)."""
        first, count = run[0][0], run[0][2]
        ends = [start + count for _, start, _ in run]
        end = max(ends)
        # A whole prompt alone: is_causal is faster than a triangular mask.
        causal = len(run) == 1 and count == end
        mask = None
        if not causal and (count > 1 or min(ends) < end):
            mask = torch.arange(end) <= positions.view(len(run), 1, count, 1)  # (B, 1, T, end)
            mask = mask.to(self.kv.device)
        return Group(rows, slice(first, first + len(run)), end, count, mask, causal)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        keys, values = self.kv[layer]  # each (slots, H, slot_tokens, D)
        keys[self.slots, :, self.positions] = k.to(keys.dtype)
        values[self.slots, :, self.positions] = v.to(keys.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self.groups:
            queries = q[group.rows].unflatten(0, (-1, group.new)).transpose(1, 2)
            read = (group.slots, slice(None), slice(group.end))  # in place
            mixed = attention(queries, keys[read], values[read], group.mask, group.causal)
            out[group.rows] = mixed.transpose(1, 2).flatten(0, 1)
        return out


def ordered(
    shares: Sequence[AShare], key: Callable[[AShare], tuple[int, int]]
) -> tuple[Tensor, list[AShare]]:
    """`shares` sorted by `key`, and the resulting order (N,) of their packed tokens:
    token i of the sorted shares is token order[i] of `shares`."""
    firsts = list(itertools.accumulate((share[2] for share in shares), initial=0))
    ranking = sorted(range(len(shares)), key=lambda index: key(shares[index]))
    order = [row for index in ranking for row in range(firsts[index], firsts[index + 1])]
    return torch.tensor(order), [shares[index] for index in ranking]
