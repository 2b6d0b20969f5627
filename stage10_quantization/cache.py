"""Keys and values in int8: a code for each number, and a scale for each token and head, one for the
key and one for the value.

A token is rounded once, when it is written, and all readers see the same codes: the rest of its
prompt, later chunks, decode steps and requests that share the block. So answers depend on neither
chunks nor neighbours, as before. `Int8Cache` is readable and slow; `Int8KernelCache` has the codes
in the layout of stage 09's kernels, which read them in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.attention import attention
from shared.config import Config
from shared.paths import ROOT
from stage05_paged.blocks import Move
from stage05_paged.cache import Share, check_places
from stage05_paged.planes import Planes
from stage09_kernels.cache import KernelCache

FOLDER = ROOT / "stage10_quantization"  # students' copies of this file have no C files beside them
NAIVE, FAST = FOLDER / "naive_cache.c", FOLDER / "fast" / "cache.c"
LARGEST = 127  # code
SCALE = torch.bfloat16


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> codes (..., D) int8 and scales (...) of SCALE, so that codes * scales is x to
    half a scale.

    A scale is the largest size over 127, rounded to SCALE before the codes are computed: a reader
    multiplies by the rounded one. bfloat16 reaches as far as float32 does, and its 8 bits cost
    nothing: the largest code becomes 127.25 at most, which still rounds to 127. A vector that is 0,
    or whose scale is too small for SCALE, has scale 0 and codes 0. One with NaN or infinity has
    scale NaN and codes 0, so that it shows.
    """
    largest = x.abs().amax(-1)  # NaN if one is
    scales = (largest / LARGEST).to(SCALE)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divisors = scales.to(x.dtype)[..., None]
    codes = torch.where(divisors > 0, x / divisors, 0).round()  # half to even
    return codes.clamp(-LARGEST, LARGEST).to(torch.int8), scales


class Int8Cache:
    """Stage 05's cache in two planes: codes (blocks, layers, 2, H, block_size, D) and scales
    (blocks, layers, 2, H, block_size), keys first. Attention computes in float32, or in float64
    for queries in it."""

    def __init__(
        self,
        config: Config,
        blocks: int,
        block_size: int = 16,
        swap_blocks: int = 0,
        dtype: torch.dtype = torch.int8,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype

        def planes(count: int, device: torch.device | str) -> list[Tensor]:
            shape = (count, config.n_layer, 2, config.n_kv_head, block_size)
            codes = torch.zeros((*shape, config.head_dim), dtype=torch.int8, device=device)
            return [codes, torch.zeros(shape, dtype=SCALE, device=device)]

        self.memory = Planes(planes(blocks, device), planes(swap_blocks, "cpu"))

    def move(self, moves: Sequence[Move]) -> None:
        """Do `moves`, one after the other."""
        self.memory.move(moves)

    def extend(self, shares: Sequence[Share]) -> Int8Attention:
        """The attention of a pass whose tokens are those of `shares`, one share after the other.

        Raises ValueError for a share outside its blocks.
        """
        check_places(shares, self.block_size)
        return Int8Attention(self, shares)


class Int8Attention:
    """Attention of one pass over N packed tokens, in the caller's order, one share at a time."""

    def __init__(self, cache: Int8Cache, shares: Sequence[Share]) -> None:
        self.cache, self.shares = cache, shares
        starts = [torch.arange(start, start + count) for _, start, count in shares]
        device = cache.memory.planes[0].device
        self.positions = torch.cat(starts).to(device)
        self.order = torch.arange(len(self.positions), device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q of the packed tokens (N, heads, D); k and v (N, H, D) -> (N, heads, D)."""
        real = torch.promote_types(q.dtype, torch.float32)
        codes, scales = quantize(torch.stack((k, v), 1).to(real))  # (N, 2, H, D), (N, 2, H)
        code_plane, scale_plane = (plane[:, layer] for plane in self.cache.memory.planes)
        size, row = self.cache.block_size, 0
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for table, start, count in self.shares:
            rows, end = slice(row, row + count), start + count
            row += count
            positions = self.positions[rows]
            blocks = torch.tensor(table, device=q.device)
            places = blocks[positions // size], slice(None), slice(None), positions % size
            code_plane[places], scale_plane[places] = codes[rows], scales[rows]
            held = blocks[: -(-end // size)]
            whole = code_plane[held].to(real) * scale_plane[held].to(real)[..., None]
            # (W, 2, H, size, D) -> two of (H, W * size, D), up to the newest token
            keys, values = whole.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]
            mask = torch.arange(end, device=q.device) <= positions[:, None]  # (T, S)
            queries = q[rows].to(real).transpose(0, 1)[None]  # (1, heads, T, D)
            mixed = attention(queries, keys[None], values[None], mask[None, None])
            output[rows] = mixed[0].transpose(0, 1).to(q.dtype)
        return output


class Int8KernelCache(KernelCache):
    """Stage 09's cache with codes: `kv` is (layers, blocks, H, bytes) int8. The bytes of a block
    and head are its keys and its values, as stage 09 has them, and then the scales of the keys and
    of the values, (2, B padded) of SCALE: part of the block, so whatever moves it moves them.

    Takes the arguments of stage 09's; `real`, what attention computes in, must be given.
    """

    fast = FAST
    scales = 2 * SCALE.itemsize
