"""Stage 05's cache as it is: the same memory and addresses. Only attention differs, which reads the
blocks in place with the kernels of flash.py.

What a pass needs besides its queries is a few whole numbers: ids, positions, slots, tables, and
which program takes which tokens. They are worked out in NumPy, and one copy takes them to the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.config import Config
from stage05_paged.blocks import Move
from stage05_paged.cache import PagedCache, Share, check_places
from stage09_kernels.backend import NoKernels
from stage09_kernels.cache import Tables, cut, rows_of

from .flash import attend, merge
from .fused import store
from .launch import DEVICE, launch
from .naive import PIECE, TILE

from triton import next_power_of_2  # isort: skip

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST = 16  # rows and columns that a tensor core multiplies at least


def power(number: int) -> int:
    """The next power of 2, at least LEAST: tiles have such sizes."""
    return max(LEAST, next_power_of_2(number))


def aligned(sizes: Sequence[int]) -> int:
    """Numbers that a field of `sizes` takes: each begins at 16 bytes, or Triton would compile a
    kernel again for other alignments."""
    return -(-math.prod(sizes) // 4) * 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a pass. A captured graph serves all passes that fit into its shape."""

    tokens: int
    wanted: int  # tokens whose logits are wanted
    singles: int  # items of one token, whose keys are cut into pieces
    tiles: int  # items of more
    tables: int
    width: int  # blocks of a table
    pieces: int  # of PIECE keys, for the longest single

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The numbers of a pass by name, in the order in which they are stored."""
        return {
            **dict.fromkeys(("ids", "positions", "slots"), (self.tokens,)),
            "wanted": (self.wanted,),
            "singles": (self.singles, 4),  # table, first token, its position, count of tokens
            "tiles": (self.tiles, 4),
            "tables": (self.tables, self.width),
        }

    @property
    def numbers(self) -> int:
        return sum(map(aligned, self.fields.values()))

    def split(self, numbers: Tensor) -> dict[str, Tensor]:
        """The fields as views of `numbers`."""
        parts = numbers.split([*map(aligned, self.fields.values())])
        pairs = zip(parts, self.fields.items(), strict=True)
        return {name: part[: math.prod(sizes)].view(sizes) for part, (name, sizes) in pairs}


class GpuCache:
    """Keys and values in blocks, in stage 05's own layout, for kernels that read them in place.

    Takes PagedCache's arguments. Raises NoKernels for a dtype or a GPU without kernels.
    """

    def __init__(
        self,
        config: Config,
        blocks: int,
        block_size: int = 16,
        swap_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = DEVICE,
    ) -> None:
        check(dtype, device)
        paged = PagedCache(config, blocks, block_size, swap_blocks, dtype, device)
        self.kv, self.memory = paged.kv, paged.memory
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.device = self.kv.device
        self.group, self.width = config.n_head // config.n_kv_head, config.head_dim
        self.heads = config.n_kv_head
        self.tables = Tables(blocks)
        # Rows of a tile of many tokens. Those of float32 are smaller, or they spill (registers.py).
        few = 16 if self.width > 64 else 32
        self.rows = max(few if dtype == torch.float32 else 64, power(self.group))
        self.most = self.rows // self.group  # tokens in it

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves` in order. No block needs a wipe, because only what was written is read."""
        self.memory.move([move for move in moves if move.kind != "wipe"])

    def extend(
        self, shares: Sequence[Share], ids: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> GpuAttention:
        """The attention of a pass over the tokens `ids` of `shares`, one share after the other; the
        logits of `rows` are wanted. Raises ValueError for a block outside the cache."""
        shape = self.shape(shares, len(rows))
        numbers = self.numbers(shape, shares, ids, rows).to(self.device, non_blocking=True)
        return GpuAttention(self, shape, numbers)

    def shape(self, shares: Sequence[Share], wanted: int = 0) -> Shape:
        """The sizes of a pass, of which `wanted` tokens get logits. Raises ValueError for a share
        outside its blocks."""
        check_places(shares, self.block_size)
        counts = [count for _, _, count in shares]
        longest = max((start + 1 for _, start, count in shares if count == 1), default=0)
        return Shape(
            tokens=sum(counts),
            wanted=wanted,
            singles=counts.count(1),
            tiles=sum(-(-count // self.most) for count in counts if count > 1),
            tables=len(shares),
            width=max(len(blocks) for blocks, _, _ in shares),
            pieces=-(-longest // PIECE),
        )

    def numbers(
        self, shape: Shape, shares: Sequence[Share], ids: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """The numbers of a pass, int32 on the CPU, pinned if there is a GPU. What `shape` has
        beyond the pass are tokens with no slot and no keys."""
        # From pinned memory, a copy to the GPU does not wait for what the GPU does.
        pinned = self.device.type == "cuda"
        whole = torch.zeros(shape.numbers, dtype=torch.int32, pin_memory=pinned)
        field = {name: view.numpy() for name, view in shape.split(whole).items()}
        tables, first, count = zip(*shares, strict=True)
        starts, counts = np.array(first), np.array(count)
        begins = counts.cumsum() - counts  # each share's first token
        width = min(shape.width, max(map(len, tables)))
        table = self.tables.of(tables)[: len(tables), :width]
        field["tables"][: len(tables), :width] = table
        owners = np.arange(len(tables)).repeat(counts)  # (N,)
        positions = np.arange(len(owners)) + (starts - begins)[owners]
        block = table[owners, positions // self.block_size]
        field["ids"][: len(ids)], field["wanted"][: len(rows)] = ids, rows
        field["positions"][: len(owners)] = positions
        field["slots"].fill(-1)
        field["slots"][: len(owners)] = block * self.block_size + positions % self.block_size
        (single,), (many,) = (counts == 1).nonzero(), (counts > 1).nonzero()
        items = np.column_stack((single, begins[single], starts[single], counts[single]))
        field["singles"][: len(single)] = items
        field["singles"][len(single) :, 1] = np.arange(len(single), shape.singles)
        if len(many):
            pieces = cut(torch.from_numpy(counts[many]), self.most).numpy()  # share, first, count
            share, offset = many[pieces[:, 0]], pieces[:, 1]
            columns = (share, begins[share] + offset, starts[share] + offset, pieces[:, 2])
            field["tiles"][:] = np.column_stack(columns)
        return whole


def check(dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise NoKernels for a dtype or a GPU that the kernels do not support."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        known = "choose float32, bfloat16 or float16."
        raise NoKernels(f"The kernels of stage 13 do not support {name}: {known}")
    least = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) < least:
        why = f"For {name}, stage 13 needs compute capability {least[0]}.{least[1]}"
        raise NoKernels(f"{why}: {torch.cuda.get_device_name(device)} is too old.")


class GpuAttention:
    """Attention of one pass over N packed tokens, in the caller's order.

    shape, numbers: of the pass, the latter on the device. Kernels read them there, so the same
    object serves every pass whose numbers are copied to the same place.
    """

    def __init__(self, cache: GpuCache, shape: Shape, numbers: Tensor) -> None:
        self.cache, self.shape, self.input = cache, shape, shape.split(numbers)
        count = cache.heads * cache.group  # query heads
        parts = (shape.pieces, shape.singles, count) if shape.pieces > 1 else (0, 0, 0)
        self.parts = numbers.new_empty((*parts, cache.width), dtype=torch.float32)
        self.states = numbers.new_empty((*parts, 2), dtype=torch.float32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        self.store(layer, q, rows_of(k), rows_of(v))
        return self.read(layer, rows_of(q))

    def store(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turns: Any = None, norms: Any = None
    ) -> None:
        """Write k and v (N, H, D) to their slots; before that apply `norms`, the RMSNorms of q and
        k, and rotate by `turns` (cosines, sines), q (N, heads, D) in place."""
        cache = self.cache
        keys, values = cache.kv[layer]  # each (H, blocks, block_size, D)
        queries = q.shape[1] if turns else 0
        cosines, sines = turns or (self.states, self.states)  # any memory, unread
        q_gain, k_gain = (norm.weight for norm in norms) if norms else (k, k)
        epsilon = norms[0].epsilon if norms else 0.0
        launch(
            store, (self.shape.tokens, queries + cache.heads),
            q, k, v, keys, values, self.input["slots"], cosines, sines, q_gain, k_gain,
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), epsilon,
            QUERIES=queries, D=cache.width, HALF=power(cache.width) // 2,
            NORM=norms is not None, ROTATE=turns is not None, num_warps=1,
        )  # fmt: skip

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attention (N, heads, D) of q (N, heads, D) to the keys and values in their slots."""
        cache, pieces = self.cache, self.shape.pieces
        keys, values = cache.kv[layer]
        tables, singles, tiles = (self.input[name] for name in ("tables", "singles", "tiles"))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = cache.width**-0.5 * math.log2(math.e)
        layout = {"D": cache.width, "W": power(cache.width), "PIECE": PIECE}

        def attend_to(items: Tensor, rows: int, pieces: int, out: Tensor, long: int) -> None:
            # Long keys get smaller tiles and more threads, or their registers spill (registers.py).
            is_long = power(cache.width) * q.itemsize >= long  # bytes of a key
            launch(
                attend, (len(items), cache.heads, pieces),
                q, keys, values, tables, items, out, self.states,
                q.stride(0), keys.stride(0), tables.stride(0), scale,
                **layout, GROUP=cache.group, BLOCK=cache.block_size, ROWS=rows, WHOLE=pieces == 1,
                MANY=items is tiles, TILE=TILE // 2 if is_long else TILE,
                num_warps=8 if is_long else 4,
            )  # fmt: skip

        attend_to(singles, power(cache.group), pieces, self.parts if pieces > 1 else out, 512)
        if pieces > 1:
            grid = len(singles), q.shape[1]
            launch(merge, grid, self.parts, self.states, singles, out, **layout, num_warps=1)
        attend_to(tiles, cache.rows, 1, out, 256)
        return out
