"""The KV cache in blocks. A token's address is
(table[position // block_size], position % block_size).

These are stage 04's addresses through one more table. Writing is as before: N keys and values go to
N addresses at once. Reading costs more: a sequence's keys are no longer contiguous, so they are
gathered (copied together) before attention can read them. Only `PagedAttention.attend` knows
that. A kernel that reads blocks in place can replace it without any other change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.attention import attention
from shared.config import Config
from shared.errors import UserError
from stage04_continuous.cache import CALL, ordered
from stage04_continuous.runner import Cache

from .blocks import Move
from .planes import Planes

Share = tuple[list[int], int, int]  # blocks, first position, number of tokens that a pass computes

# Bytes gathered at a time: few enough that attention reads them from the processor's cache and not
# from memory, and enough that launching the operators costs little in comparison.
TILE = 2**23


class BlockCache(Cache, Protocol):
    """What this stage's engine, sanitizer and later stages need of a cache in blocks."""

    blocks: int
    block_size: int
    dtype: torch.dtype  # that it was asked to keep
    memory: Planes


class PagedCache:
    """Keys and values in `blocks` blocks: `kv` is (layers, 2, H, blocks, block_size, D), with the H
    heads of keys and values; `swapped` is the same for `swap_blocks` blocks in the CPU's memory.
    `memory` is both, for those who move blocks and need not know what is in them.

    It knows neither requests nor owners of blocks: each pass names the blocks of its sequences.
    """

    def __init__(
        self,
        config: Config,
        blocks: int,
        block_size: int = 16,
        swap_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not dtype.is_floating_point:
            name = str(dtype).removeprefix("torch.")
            raise UserError(
                f"Keys and values in {name} need the kernels of stage 09, a CPU and a C compiler: "
                "leave --kv-dtype out."
            )
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        # Heads first: all blocks of one head are then a table of rows, which one operator gathers
        # in any order.
        heads, width = config.n_kv_head, config.head_dim
        shape = (config.n_layer, 2, heads, blocks, block_size, width)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.swapped = torch.zeros((*shape[:3], swap_blocks, *shape[4:]), dtype=dtype)
        self.memory = Planes([self.kv.movedim(3, 0)], [self.swapped.movedim(3, 0)])

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves`, one after the other."""
        self.memory.move(moves)

    def extend(self, shares: Sequence[Share]) -> PagedAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other.

        Raises ValueError for a share outside its blocks.
        """
        check_places(shares, self.block_size)
        return PagedAttention(self.kv, shares)


def check_places(shares: Sequence[Share], block_size: int) -> None:
    """Raise ValueError for a share outside its blocks."""
    for blocks, start, count in shares:
        if not (start >= 0 and count >= 1 and start + count <= len(blocks) * block_size):
            raise ValueError(
                f"no place for {count} tokens at {start} in {len(blocks)} blocks of {block_size}"
            )


@dataclass(frozen=True)
class Tile:
    """Sequences that attend in one call: B of them with T new tokens each, for h of the H heads."""

    rows: slice  # of the N packed tokens: B * T of them
    heads: slice  # h
    new: int  # T
    lines: Tensor  # (2 * B * h * W,): W blocks of each sequence and head, all keys, then all values
    target: Tensor  # (2 * B * h * W, block_size * D): the memory that they are gathered into
    keys: Tensor  # (B, h, S, D), S = W * block_size: the same memory as attention reads it
    values: Tensor
    mask: Tensor | None  # (B, 1, T, S); None: all is visible


def runs(shares: Sequence[Share]) -> list[list[Share]]:
    """Cut a pass into runs that can attend together: equal counts of new tokens, similar lengths.
    Whole prompts, which gather nothing, form runs of their own."""
    result: list[list[Share]] = []
    for share in shares:
        _, start, count = share
        if result:
            run = result[-1]
            _, first, last_count = run[-1]
            longest = max(before for _, before, _ in run)
            # Keys read for nothing if the share joins the run.
            padding = len(run) * max(0, start - longest) + max(0, longest - start)
            if count == last_count and (start == 0) == (first == 0) and padding * count <= CALL:
                run.append(share)
                continue
        result.append([share])
    return result


def padded(shares: Sequence[Share]) -> Tensor:
    """The tables of `shares`, (sequences, width).

    A table shorter than the widest is padded with its own last block. A mask hides what is read
    there, but a NaN would come through, so the block must not be a neighbour's.
    """
    width = max(len(blocks) for blocks, _, _ in shares)
    return torch.tensor([blocks + blocks[-1:] * (width - len(blocks)) for blocks, _, _ in shares])


def addresses(tables: Tensor, shares: Sequence[Share], size: int) -> tuple[Tensor, Tensor]:
    """Slots and positions, (N,) each, of the N packed tokens of `shares`, whose `tables` are
    (sequences, width). The `size` slots of block b begin at b * size."""
    starts = torch.tensor([start for _, start, _ in shares])
    counts = torch.tensor([count for _, _, count in shares])
    owners = torch.arange(len(shares)).repeat_interleave(counts)  # (N,)
    positions = torch.arange(len(owners)) - (counts.cumsum(0) - counts - starts)[owners]
    return tables[owners, positions // size] * size + positions % size, positions


class PagedAttention:
    """Attention of one pass over N packed tokens, each of which sees the tokens before it in its
    own blocks.

    As in stage 04, `order` (N,) lists the caller's tokens in the model's order, and what all layers
    share (where to write, what to gather, what is visible) is worked out once per pass.
    """

    def __init__(self, kv: Tensor, shares: Sequence[Share]) -> None:
        self.kv = kv
        self.order, ranked = ordered(shares, key=lambda share: (share[2], share[1]))
        size = kv.shape[4]
        tables = padded(ranked)  # (sequences, width)
        slots, positions = addresses(tables, ranked, size)
        self.prompts: list[tuple[slice, int]] = []  # whole prompts: their rows and length
        self.tiles: list[Tile] = []
        self.buffer = kv.new_empty(
            max(TILE // kv.itemsize, 2 * tables.shape[1] * kv[0, 0, 0, 0].numel())
        )
        row = sequence = 0
        for run in runs(ranked):
            count = run[0][2]
            rows = slice(row, row + len(run) * count)
            if run[0][1] == 0:
                self.prompts.append((rows, count))
            else:
                used = -(-(max(start for _, start, _ in run) + count) // size)
                blocks = tables[sequence : sequence + len(run), :used]
                self._add_tiles(rows, count, blocks, positions[rows])
            row, sequence = rows.stop, sequence + len(run)
        self.slots, self.positions = slots.to(kv.device), positions.to(kv.device)

    def _add_tiles(self, rows: slice, new: int, tables: Tensor, positions: Tensor) -> None:
        """Cut a run of B sequences with `tables` (B, W) into tiles of about TILE bytes: as many
        sequences with all their heads as fit, or one sequence with as many heads as fit. Positions
        count from the beginning of the tables."""
        _, _, heads, blocks, size, width = self.kv.shape
        columns = torch.arange(tables.shape[1] * size)
        seen = columns <= positions.view(-1, 1, new, 1)  # (B, 1, T, W * block_size)
        lines = torch.arange(2 * heads).view(2, 1, heads, 1) * blocks + tables[:, None]
        # lines: (2, B, H, W)
        head_bytes = 2 * len(columns) * width * self.kv.itemsize  # of one sequence
        sequences = max(1, TILE // (head_bytes * heads))  # of a tile
        height = min(heads, max(1, TILE // head_bytes))  # its heads
        for first in range(0, len(tables), sequences):
            batch = slice(first, min(first + sequences, len(tables)))
            mask = None if bool(seen[batch].all()) else seen[batch].to(self.kv.device)
            packed = slice(rows.start + batch.start * new, rows.start + batch.stop * new)
            for head in range(0, heads, height):
                part = slice(head, min(head + height, heads))
                chosen = lines[:, batch, part]  # (2, B, h, W)
                target = self.buffer[: chosen.numel() * size * width]
                keys, values = target.view(*chosen.shape[:3], -1, width)  # (B, h, W * size, D)
                gathers = chosen.flatten().to(self.kv.device), target.view(-1, size * width)
                self.tiles.append(Tile(packed, part, new, *gathers, keys, values, mask))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        kv = self.kv[layer]  # (2, H, blocks, block_size, D)
        keys, values = kv.flatten(2, 3)  # each (H, slots, D)
        keys[:, self.slots] = k.transpose(0, 1).to(kv.dtype)
        values[:, self.slots] = v.transpose(0, 1).to(kv.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, length in self.prompts:
            whole = [x[rows].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]
            mixed = attention(whole[0], whole[1], whole[2], None, causal=True)
            out[rows] = mixed.transpose(1, 2).flatten(0, 1)
        pieces = kv.view(-1, kv[0, 0, 0].numel())  # (2 * H * blocks, block_size * D)
        group = q.shape[1] // k.shape[1]  # query heads that share one head of keys and values
        for tile in self.tiles:
            # Always the same memory: it is in the processor's cache when attention reads it.
            torch.index_select(pieces, 0, tile.lines, out=tile.target)
            heads = slice(tile.heads.start * group, tile.heads.stop * group)
            queries = q[tile.rows, heads].unflatten(0, (-1, tile.new)).transpose(1, 2)
            mixed = attention(queries, tile.keys, tile.values, tile.mask)  # (B, ., T, D)
            out[tile.rows, heads] = mixed.transpose(1, 2).flatten(0, 1)
        return out
