"""Keys and values in int8: a code for each number, and a scale for each token and head, one for the
key and one for the value.

A token is rounded once, when it is written, and all readers see the same codes: the rest of its
prompt, later chunks, decode steps and requests that share the block. So answers depend on neither
chunks nor neighbours, as before. The codes lie in the layout of stage 09's kernels, which read them
in place: `naive_cache.c` first, then `fast/cache.c`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.paths import ROOT
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


class Int8KernelCache(KernelCache):
    """Stage 09's cache with codes: `kv` is (layers, blocks, H, bytes) int8. The bytes of a block
    and head are its keys and its values, as stage 09 has them, and then the scales of the keys and
    of the values, (2, B padded) of SCALE: part of the block, so whatever moves it moves them.

    Takes the arguments of stage 09's; `real`, what attention computes in, must be given.
    """

    fast = FAST
    scales = 2 * SCALE.itemsize
