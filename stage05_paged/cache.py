"""The KV cache in blocks. A token's address is (table[position // block_size], position % block_size).

Stage 04's addresses through one table more. Writing is as before: N keys and values go to N addresses at once. Reading is what
pays: the keys of a sequence no longer lie side by side, so they are gathered, that is copied together, before attention can
read them. Only `PagedAttention.attend` knows that. A kernel that reads blocks in place takes its place, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.checkpoint import Config
from stage03_batching.attention import masked_attention

Share = tuple[
    list[int], int, int
]  # blocks, first position, and number of the tokens that a sequence computes in a pass

# Sequences of different lengths attend in one call, with a mask over the difference, while that costs less than one more
# call would: about as much as reading so many keys.
CALL = 64
# Bytes that are gathered at a time: few enough to be read back from the processor's cache and not from memory, and many enough
# that starting the operators costs little beside them.
TILE = 2**23


@dataclass(frozen=True)
class Move:
    """Memory work before a pass.

    kind: "wipe" fills block `target` with zeros, and "copy" copies block `source` to it. "out" copies block `source` to block
        `target` of the swap pool, and "in" copies a block back from there.
    """

    kind: str
    source: int
    target: int


class PagedCache:
    """Keys and values in `blocks` blocks: `kv` is (layers, 2, H, blocks, block_size, D), and `swapped` the same for swapped ones.

    It knows neither requests nor who owns a block: whoever uses it says in which blocks a sequence lies.
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
        self.blocks, self.block_size = blocks, block_size
        # Heads first: then all blocks of one head are a table of rows, which one operator gathers in the order it needs.
        shape = (config.n_layer, 2, config.n_head, blocks, block_size, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.swapped = torch.zeros(
            (*shape[:3], swap_blocks, *shape[4:]), dtype=dtype
        )  # always in the CPU's memory

    @property
    def bytes(self) -> int:
        """Memory taken, used or not, without the swap pool."""
        return self.kv.nbytes

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves`, as if one after the other."""
        for kind, batch in batches(moves):
            sources = torch.tensor([each.source for each in batch])
            targets = torch.tensor([each.target for each in batch])
            here, there = targets.to(self.kv.device), sources.to(self.kv.device)
            if kind == "wipe":
                self.kv.index_fill_(3, here, 0)
            elif kind == "copy":
                self.kv.index_copy_(3, here, self.kv.index_select(3, there))
            elif kind == "out":
                self.swapped.index_copy_(3, targets, self.kv.index_select(3, there).to("cpu"))
            else:
                self.kv.index_copy_(
                    3, here, self.swapped.index_select(3, sources).to(self.kv.device)
                )

    def extend(self, shares: Sequence[Share]) -> PagedAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other."""
        for blocks, start, count in shares:
            if not (start >= 0 and count >= 1 and start + count <= len(blocks) * self.block_size):
                raise ValueError(
                    f"no place for {count} tokens at {start} in {len(blocks)} blocks of {self.block_size}"
                )
        return PagedAttention(self.kv, shares)


def batches(moves: Sequence[Move]) -> list[tuple[str, list[Move]]]:
    """Cut `moves` into runs that one operator can do: of one kind, and none needs what an earlier one of its run has written."""
    runs: list[tuple[str, list[Move]]] = []
    written: set[int] = set()
    for move in moves:
        clash = move.target in written or (move.kind == "copy" and move.source in written)
        if not runs or runs[-1][0] != move.kind or clash:
            runs.append((move.kind, []))
            written = set()
        runs[-1][1].append(move)
        written.add(move.target)
    return runs


@dataclass(frozen=True)
class Tile:
    """Sequences that attend in one call: B of them with T new tokens each, for h of the heads."""

    rows: slice  # of the N packed tokens: B * T of them
    heads: slice
    new: int  # T
    lines: Tensor  # (2 * B * h * W,): what to gather, W blocks of each sequence and head: all keys, and then all values
    target: Tensor  # (2 * B * h * W, block_size * D): where to, and
    keys: Tensor  # (B, h, S, D), S = W * block_size: the same memory as it will be read
    values: Tensor
    mask: Tensor | None  # (B, 1, T, S); None where all is seen


def runs(shares: Sequence[Share]) -> list[list[Share]]:
    """Cut a pass into runs that can attend together: as many new tokens, not too unlike in length. Whole prompts, of which
    nothing has to be gathered, go with their like."""
    found: list[list[Share]] = []
    for share in shares:
        _, start, count = share
        if found:
            run = found[-1]
            _, first, last_count = run[-1]
            longest = max(before for _, before, _ in run)
            padding = len(run) * max(0, start - longest) + max(
                0, longest - start
            )  # keys read for nothing, if they join
            if count == last_count and (start == 0) == (first == 0) and padding * count <= CALL:
                run.append(share)
                continue
        found.append([share])
    return found


class PagedAttention:
    """Attention of one forward pass over N packed tokens, each of which sees the tokens before it in its own blocks.

    What is the same in every layer (where to write, what to gather, what is visible) is worked out here, once a pass.
    """

    def __init__(self, kv: Tensor, shares: Sequence[Share]) -> None:
        self.kv = kv
        size, width = kv.shape[4], max(len(blocks) for blocks, _, _ in shares)
        # A table shorter than the widest goes on with its own first block. What is read there is hidden by a mask; but a hidden
        # NaN would come through, and a neighbour's NaN must not.
        tables = torch.tensor(
            [blocks + blocks[:1] * (width - len(blocks)) for blocks, _, _ in shares]
        )  # (sequences, width)
        starts = torch.tensor([start for _, start, _ in shares])
        counts = torch.tensor([count for _, _, count in shares])
        owners = torch.arange(len(shares)).repeat_interleave(counts)  # (N,), and so are these:
        positions = torch.arange(len(owners)) - (counts.cumsum(0) - counts - starts)[owners]
        slots = tables[owners, positions // size] * size + positions % size
        self.prompts: list[tuple[slice, int]] = []  # whole ones, by their rows and length
        self.tiles: list[Tile] = []
        self.buffer = kv.new_empty(max(TILE // kv.itemsize, 2 * width * kv[0, 0, 0, 0].numel()))
        row = sequence = 0
        for run in runs(shares):
            count = run[0][2]
            rows = slice(row, row + len(run) * count)
            if run[0][1] == 0:
                self.prompts.append((rows, count))
            else:
                used = -(-(max(start for _, start, _ in run) + count) // size)
                self._add_tiles(
                    rows, count, tables[sequence : sequence + len(run), :used], positions[rows]
                )
            row, sequence = rows.stop, sequence + len(run)
        self.slots, self.positions = slots.to(kv.device), positions.to(kv.device)

    def _add_tiles(self, rows: slice, new: int, tables: Tensor, positions: Tensor) -> None:
        """Cut a run of B sequences with `tables` (B, W) into tiles of about TILE bytes: as many sequences with all their heads
        as that allows, or one with as many heads."""
        _, _, heads, blocks, size, width = self.kv.shape
        seen = torch.arange(tables.shape[1] * size) <= positions.view(
            -1, 1, new, 1
        )  # (B, 1, T, W * block_size)
        lines = (
            torch.arange(2 * heads).view(2, 1, heads, 1) * blocks + tables[:, None]
        )  # (2, B, H, W)
        each = (
            2 * tables.shape[1] * size * width * self.kv.itemsize
        )  # bytes of one head of one sequence
        some, part = max(1, TILE // (each * heads)), min(heads, max(1, TILE // each))
        for first in range(0, len(tables), some):
            here = slice(first, min(first + some, len(tables)))
            mask = None if bool(seen[here].all()) else seen[here].to(self.kv.device)
            for head in range(0, heads, part):
                chosen = lines[:, here, head : head + part]  # (2, B, h, W)
                target = self.buffer[: chosen.numel() * size * width]
                keys, values = target.view(
                    *chosen.shape[:3], -1, width
                )  # each (B, h, W * block_size, D)
                packed = slice(rows.start + here.start * new, rows.start + here.stop * new)
                gathers = chosen.flatten().to(self.kv.device), target.view(-1, size * width)
                self.tiles.append(
                    Tile(packed, slice(head, head + part), new, *gathers, keys, values, mask)
                )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v of the packed tokens (N, H, D) -> (N, H, D)."""
        kv = self.kv[layer]  # (2, H, blocks, block_size, D)
        keys, values = kv.flatten(2, 3)  # each (H, slots, D)
        keys[:, self.slots] = k.transpose(0, 1)
        values[:, self.slots] = v.transpose(0, 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, length in self.prompts:
            mine = [
                x[rows].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)
            ]  # each (B, H, T, D)
            mixed = masked_attention(mine[0], mine[1], mine[2], None, causal=True)
            out[rows] = mixed.transpose(1, 2).flatten(0, 1)
        pieces = kv.view(-1, kv[0, 0, 0].numel())  # (2 * H * blocks, block_size * D)
        for tile in self.tiles:
            # Always into the same memory: it is in the processor's cache when attention reads it.
            torch.index_select(pieces, 0, tile.lines, out=tile.target)
            queries = (
                q[tile.rows, tile.heads].unflatten(0, (-1, tile.new)).transpose(1, 2)
            )  # (B, h, T, D)
            mixed = masked_attention(queries, tile.keys, tile.values, tile.mask)
            out[tile.rows, tile.heads] = mixed.transpose(1, 2).flatten(0, 1)
        return out
