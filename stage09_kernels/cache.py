"""Stage 05's cache in the layout that the kernel reads: each head of a block is contiguous.

The addresses are stage 05's, but nothing is gathered: `attend` hands the tables to a kernel, which
writes the new keys and values and then reads each block in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.config import Config
from shared.paths import ROOT
from stage05_paged.blocks import Move
from stage05_paged.cache import Share, check_places
from stage05_paged.planes import Planes

from . import library
from .backend import NoKernels
from .operations import (
    ALL_ROWS,
    ATTEND,
    MAX_HEAD_DIM,
    MAX_QUERIES,
    PAD,
    TILE_QUERIES,
    Attention,
    Operation,
    Pass,
)

FOLDER = ROOT / "stage09_kernels"  # students' copies of this file have no C files beside them
NAIVE, FAST = FOLDER / "naive.c", FOLDER / "fast" / "step.c"
DTYPES = torch.float32, torch.bfloat16, torch.float64


def padded(count: int) -> int:
    """`count`, rounded up to a multiple of PAD, as rows are padded."""
    return -(-count // PAD) * PAD


class KernelCache:
    """Keys and values in `blocks` blocks: `kv` is (layers, blocks, H, numbers), with H KV heads.
    The numbers of a block and head are its keys, (D even, B padded), in bfloat16 (D even / 2,
    B padded, 2), and then its values, (B, D padded). `swapped` has the same layout for
    `swap_blocks` blocks.

    level: of instructions, one of `library.levels()`; the best if empty. source: NAIVE, or None for
    `fast`. real: what attention computes in; None: float64 for float64, otherwise float32.
    Raises NoKernels for a dtype, head size or device that the kernels do not support, or
    without a compiler.
    """

    defines: tuple[str, ...] = ()  # constants of the C files to set, for experiments
    fast: Path | None = None  # C file of another format's kernels; None: FAST
    scales = 0  # numbers that a token's scales take, behind the values of a head: a later stage's

    def __init__(
        self,
        config: Config,
        blocks: int,
        block_size: int = 16,
        swap_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        level: str = "",
        source: Path | None = None,
        real: torch.dtype | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise NoKernels(f"The kernels run on the CPU, not on {device}.")
        if (real or dtype) not in DTYPES:
            name = str(real or dtype).removeprefix("torch.")
            raise NoKernels(f"The kernels do not support {name}: choose float32 or bfloat16.")
        if config.head_dim > MAX_HEAD_DIM:
            raise NoKernels(
                f"The kernels support heads of at most {MAX_HEAD_DIM} channels, and {config.name} "
                f"has {config.head_dim}."
            )
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.level, self.source = level, source or self.fast or FAST
        self.heads, self.width = config.n_kv_head, config.head_dim
        keys = (self.width + self.width % 2) * padded(block_size)
        numbers = keys + block_size * padded(self.width) + self.scales * padded(block_size)
        self.kv = library.blank((config.n_layer, blocks, self.heads, numbers), dtype)
        self.swapped = torch.zeros(config.n_layer, swap_blocks, self.heads, numbers, dtype=dtype)
        self.memory = Planes([self.kv.movedim(1, 0)], [self.swapped.movedim(1, 0)])
        self.group = config.n_head // config.n_kv_head
        self.tables = Tables(blocks)
        self.real = real or (torch.float64 if dtype == torch.float64 else torch.float32)
        self.library(real or dtype)  # compiled now, not during the first request
        by_tiles = (level or library.levels()[0]) == "amx" or "EMULATE_TILES=1" in self.defines
        self.queries = TILE_QUERIES if by_tiles and dtype == torch.bfloat16 else MAX_QUERIES

    def library(self, weights: torch.dtype) -> ctypes.CDLL:
        """The kernels for this cache and for weights of this dtype."""
        sizes = {"REAL": self.real, "WEIGHT": weights, "CACHE": self.kv.dtype}
        defines = tuple(f"{name}={dtype.itemsize}" for name, dtype in sizes.items())
        return library.load(self.source, defines + self.defines, self.level)

    def attention(self, layer: int) -> Attention:
        """The fields of `Attention` that depend on `layer` and the cache."""
        kv = self.kv[layer]  # (blocks, H, numbers)
        return Attention(
            cache=kv.data_ptr(),
            block_stride=kv.stride(0),
            heads=self.heads,
            group=self.group,
            head_dim=self.width,
            block=self.block_size,
            scale=self.width**-0.5,
        )

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves` in order. No block needs a wipe, because `attend` reads only what was written
        for a sequence."""
        self.memory.move([move for move in moves if move.kind != "wipe"])

    def extend(self, shares: Sequence[Share]) -> KernelAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other.

        Raises ValueError for a share outside its blocks, or a block outside the cache.
        """
        check_places(shares, self.block_size)
        return KernelAttention(self, shares)


class Tables:
    """The block tables of a pass as one array. It is kept from pass to pass, because most rows of a
    decode step equal those of the step before."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.kept: list[list[int]] = []  # what each row of the array holds
        self.array = np.empty((0, 0), np.int32)

    def of(self, tables: Sequence[Sequence[int]]) -> np.ndarray:
        """An array (rows, blocks) whose first rows begin with `tables`.

        Raises ValueError for a block outside the cache.
        """
        rows, wide = len(tables), max(map(len, tables))
        room = self.array.shape
        if rows > room[0] or wide > room[1]:
            room = max(2 * rows, room[0]), max(2 * wide, room[1])
            self.array, self.kept = np.zeros(room, np.int32), []
        for row, table in enumerate(tables):
            if row < len(self.kept) and self.kept[row] == table:
                continue
            if not (min(table) >= 0 and max(table) < self.blocks):
                raise ValueError(f"a block outside the {self.blocks} of the cache")
            self.array[row, : len(table)] = table
            self.kept[row : row + 1] = [list(table)]
        return self.array


class KernelAttention:
    """Attention of one pass over N packed tokens, in the caller's order.

    What all layers share (tables, and the items that threads take) is computed once. Valid until
    the cache's next `extend`, which overwrites the tables.
    """

    def __init__(self, cache: KernelCache, shares: Sequence[Share]) -> None:
        self.cache = cache
        self.tables, count = cache.tables.of([table for table, _, _ in shares]), len(shares)
        places, items, row = [], [], 0
        for number, (_, start, tokens) in enumerate(shares):
            places.append((number * self.tables.shape[1], start, tokens, row))
            items.append((number, 0, tokens, row))
            row += tokens
        self.count = row  # tokens
        self.end = max(start + tokens for _, start, tokens in shares)  # the highest position + 1
        self.shares = np.array(places, np.int64)  # start in the tables, position, tokens, row
        self.item_tokens = max(1, cache.queries // cache.group)
        if row == count or self.shares[:, 2].max() <= self.item_tokens:  # mostly a decode step
            self.items = np.array(items, np.int64)
        else:
            self.items = self._items(self.shares[:, 2], self.shares[:, 3])
        pointers = {name: getattr(self, name).ctypes.data for name in ("shares", "items", "tables")}
        sizes = {"n_shares": count, "n_items": len(self.items), "n_rows": row}
        self.call = Pass(**pointers, **sizes)

    @cached_property
    def order(self) -> Tensor:
        """(N,): that of the caller."""
        return torch.arange(self.count)

    @cached_property
    def positions(self) -> Tensor:
        """(N,)"""
        _, first, tokens, rows = self.shares.T
        return torch.from_numpy((first - rows).repeat(tokens)) + self.order

    def _items(self, counts: np.ndarray, first_rows: np.ndarray) -> np.ndarray:
        """Items for runs of `counts` tokens, whose outputs begin at `first_rows`."""
        items = cut(torch.from_numpy(counts), self.item_tokens).numpy()
        return np.column_stack((items, first_rows[items[:, 0]] + items[:, 1]))

    def wanting(self, wanted: Sequence[int]) -> Pass:
        """The pass, with the output of the rows `wanted` (R,) alone in its last layer, in this
        order."""
        self.out_rows = rows = np.array(wanted, np.int64)
        if len(rows) == self.count and list(wanted) == list(range(self.count)):
            self.out_items = self.items
        else:
            share = self.shares[:, 3].searchsorted(rows, "right") - 1
            apart = (np.diff(rows, prepend=-2) != 1) | (np.diff(share, prepend=-1) != 0)
            begin = apart.nonzero()[0]  # of each run of adjacent tokens in a share
            self.out_items = self._items(np.diff(begin, append=len(rows)), begin)
            first = self.out_items[:, 3]
            self.out_items[:, 0] = share[first]
            self.out_items[:, 1] = (rows - self.shares[share, 3])[first]
        self.call.out_items, self.call.n_out_items = self.out_items.ctypes.data, len(self.out_items)
        self.call.out_rows, self.call.n_out_rows = rows.ctypes.data, len(rows)
        return self.call

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        cache, dtype = self.cache, q.dtype
        narrow = dtype == torch.bfloat16 and cache.real == torch.float32
        out_dtype = dtype if narrow else cache.real  # as the products around it read it
        q, k, v = (rows_of(x.to(cache.real)) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=out_dtype)
        operation = Operation(ATTEND, ALL_ROWS)
        operation.of.attention = cache.attention(layer)
        for name, tensor in zip(("q", "k", "v", "out"), (q, k, v, out), strict=True):
            setattr(operation.of.attention, name, tensor.data_ptr())
            setattr(operation.of.attention, f"{name}_stride", tensor.stride(0))
        kernel = cache.library(out_dtype).step
        library.call(kernel, ctypes.byref(operation), 1, ctypes.byref(self.call))
        return out.to(dtype)


def rows_of(x: Tensor) -> Tensor:
    """x (N, heads, D) with the numbers of each token contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def cut(counts: Tensor, most: int) -> Tensor:
    """Cut shares of `counts` (S,) tokens into items of at most `most` tokens, for threads to take.

    Returns (I, 3), in order: an item's share, its first token in the share, how many tokens it has.
    """
    pieces = -(-counts // most)  # of each share
    owner = torch.arange(len(counts)).repeat_interleave(pieces)  # (I,)
    first = (torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]) * most
    return torch.stack((owner, first, (counts[owner] - first).clamp(max=most)), 1)
