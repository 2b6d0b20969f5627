"""Stage 05's cache in the layout that the kernel reads: each head of a block is contiguous.

The addresses are stage 05's, but nothing is gathered: `attend` hands the tables to a kernel, which
writes the new keys and values and then reads each block in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.config import ALL, Config
from shared.paths import ROOT
from stage05_paged.blocks import NOWHERE, Move
from stage05_paged.cache import Share, check_places, do_moves

from . import library
from .library import NoKernels

# Includes attention.c and linear.c. Students' copies of this file have no C files beside them.
SOURCE = ROOT / "stage09_kernels" / "step.c"
ROUND, QUERIES = 16, 8  # as in numbers.h and attention.c
WIDEST = 512
SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}


def padded(count: int) -> int:
    """`count`, rounded up to a multiple of ROUND, as rows are padded."""
    return -(-count // ROUND) * ROUND


class Attention(ctypes.Structure):
    """`struct attention` of attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "cache")),
        *((name, ctypes.c_void_p) for name in ("shares", "items", "asked", "tables")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("block_stride", "heads", "group", "width", "block")),
        *((name, ctypes.c_int64) for name in ("window", "asks", "single", "count")),
        ("scale", ctypes.c_double),
    ]


class KernelCache:
    """Keys and values in `blocks` blocks: `kv` is (layers, blocks, H, numbers), with H KV heads.
    The numbers of a block and head are its keys, (D even, B padded), in bfloat16 (D even / 2,
    B padded, 2), and then its values, (B, D padded). `swapped` has the same layout for
    `swap_blocks` blocks.

    level: of instructions, one of `library.levels()`; the best if empty. Raises NoKernels for a
    dtype, head size or device that the kernels do not support, or without a compiler.
    """

    def __init__(
        self,
        config: Config,
        blocks: int,
        block_size: int = 16,
        swap_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        level: str = "",
    ) -> None:
        check(config, dtype, device)
        self.blocks, self.block_size, self.level = blocks, block_size, level
        self.windows = config.windows
        self.heads, self.width = config.n_kv_head, config.head_dim
        keys = (self.width + self.width % 2) * padded(block_size)
        numbers = keys + block_size * padded(self.width)
        zeros = torch.zeros((), dtype=dtype).expand(config.n_layer, blocks, self.heads, numbers)
        self.kv = library.large_pages(zeros)
        self.swapped = torch.zeros(config.n_layer, swap_blocks, self.heads, numbers, dtype=dtype)
        self.group = config.n_head // config.n_kv_head
        self.tables = Tables(blocks)
        self.real = torch.float64 if dtype == torch.float64 else torch.float32
        self.library(dtype)  # compiled now, not during the first request

    def library(self, weights: torch.dtype) -> ctypes.CDLL:
        """The kernels for this cache and for weights of this dtype."""
        sizes = {"REAL": self.real, "WEIGHT": weights, "CACHE": self.kv.dtype}
        defines = tuple(f"{name}={SIZES[dtype]}" for name, dtype in sizes.items())
        return library.load(SOURCE, defines, self.level)

    def attention(self, layer: int) -> Attention:
        """The fields of `Attention` that depend on `layer` and the cache."""
        kv = self.kv[layer]  # (blocks, H, numbers)
        window = self.windows[layer] if self.windows else ALL
        return Attention(
            cache=kv.data_ptr(),
            block_stride=kv.stride(0),
            heads=self.heads,
            group=self.group,
            width=self.width,
            block=self.block_size,
            window=window if window < ALL else 0,
            asks=-1,
            scale=self.width**-0.5,
        )

    @property
    def bytes(self) -> int:
        """Memory taken, used or not, without the swap pool."""
        return self.kv.nbytes

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves` in order. No block needs a wipe, because `attend` reads only what was written
        for a sequence."""
        do_moves(self.kv, self.swapped, 1, [move for move in moves if move.kind != "wipe"])

    def read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of the contents of `blocks`, (blocks, numbers in each), for checks."""
        return self.kv.index_select(1, torch.tensor(blocks)).movedim(1, 0).flatten(1)

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Overwrite `blocks` with one value, for checks."""
        self.kv.index_fill_(1, torch.tensor(blocks), value)

    def extend(self, shares: Sequence[Share]) -> KernelAttention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other.

        Raises ValueError for a share outside its blocks, or a block outside the cache.
        """
        check_places(shares, self.block_size)
        return KernelAttention(self, shares)


def check(config: Config, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Raise NoKernels for a device, dtype or head size that the kernels do not support."""
    if torch.device(device).type != "cpu":
        raise NoKernels(f"The kernels run on the CPU, not on {device}.")
    if dtype not in SIZES:
        raise NoKernels(
            f"The kernels do not support {str(dtype).removeprefix('torch.')}: choose float32 or "
            "bfloat16."
        )
    if config.head_dim > WIDEST:
        raise NoKernels(
            f"The kernels support heads of at most {WIDEST} channels, and {config.name} has "
            f"{config.head_dim}."
        )


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
            if not (min(table) >= NOWHERE and max(table) < self.blocks):
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
        tables, starts, counts = zip(*shares, strict=True)
        self.tables, count = cache.tables.of(tables), len(shares)
        self.shares = np.empty((count, 4), np.int64)  # start in the tables, position, tokens, row
        self.shares[:, 0] = self.tables.shape[1] * np.arange(count)
        self.shares[:, 1], self.shares[:, 2] = starts, counts
        self.shares[:, 3] = self.shares[:, 2].cumsum() - self.shares[:, 2]
        _, first, tokens, row = self.shares.T
        self.order = torch.arange(int(row[-1] + tokens[-1]))
        positions = (first - row).repeat(tokens) + self.order.numpy()
        self.positions = torch.from_numpy(positions)  # (N,)
        self.most = max(1, QUERIES // cache.group)
        if max(counts) <= self.most:  # each share is one item: mostly a decode step
            self.items = np.zeros((count, 4), np.int64)
            self.items[:, 0], self.items[:, 2], self.items[:, 3] = np.arange(count), tokens, row
        else:
            self.items = self._cut(tokens, row)
        pointers = {name: getattr(self, name).ctypes.data for name in ("shares", "items", "tables")}
        self.call = Attention(**pointers, asks=-1)

    def _cut(self, counts: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """Items for runs of `counts` tokens, whose outputs begin at the rows `begin`."""
        items = cut(torch.from_numpy(counts), self.most).numpy()
        return np.column_stack((items, begin[items[:, 0]] + items[:, 1]))

    def ask(self, rows: np.ndarray) -> None:
        """In the last layer, compute only the output of `rows` (R,) of the pass, in this order."""
        count = len(self.order)
        if len(rows) == count and (rows == np.arange(count)).all():
            self.call.asks = -1
            return
        share = self.shares[:, 3].searchsorted(rows, "right") - 1
        apart = (np.diff(rows, prepend=-2) != 1) | (np.diff(share, prepend=-1) != 0)
        begin = apart.nonzero()[0]  # of each run of adjacent tokens in a share
        self.asked = self._cut(np.diff(begin, append=len(rows)), begin)
        first = self.asked[:, 3]
        self.asked[:, 0], self.asked[:, 1] = share[first], (rows - self.shares[share, 3])[first]
        self.call.asked, self.call.asks = self.asked.ctypes.data, len(self.asked)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        cache, dtype = self.cache, q.dtype
        narrow = dtype == torch.bfloat16 and cache.real == torch.float32
        kind = dtype if narrow else cache.real  # of the products around it
        q, k, v = (_rows(x.to(cache.real)) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=kind)
        call = cache.attention(layer)
        for name in ("shares", "items", "tables"):
            setattr(call, name, getattr(self.call, name))
        for name, tensor in zip(("q", "k", "v", "out"), (q, k, v, out), strict=True):
            setattr(call, name, tensor.data_ptr())
            setattr(call, f"{name}_stride", tensor.stride(0))
        kernel = cache.library(kind).attend
        library.call(kernel, ctypes.byref(call), len(self.shares), len(self.items))
        return out.to(dtype)


def _rows(x: Tensor) -> Tensor:
    """x with the numbers of each token contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def cut(counts: Tensor, most: int) -> Tensor:
    """Cut shares of `counts` (S,) tokens into items of at most `most` tokens, for threads to take.

    Returns (I, 3), in order: an item's share, its first token in the share, how many tokens it has.
    """
    pieces = -(-counts // most)  # of each share
    owner = torch.arange(len(counts)).repeat_interleave(pieces)  # (I,)
    first = (torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]) * most
    return torch.stack((owner, first, (counts[owner] - first).clamp(max=most)), 1)
