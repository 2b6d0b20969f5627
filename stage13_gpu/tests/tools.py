"""Caches of this stage beside stage 05's, and inputs of a pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from stage09_kernels.tests import test_kernels as kernels
from stage09_kernels.tests import test_naive
from stage13_gpu.cache import GpuCache
from stage13_gpu.launch import DEVICE

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BLOCKS = 60
caches = partial(kernels.caches, blocks=BLOCKS, kind=GpuCache)
passes = partial(test_naive.passes, blocks=BLOCKS)
compare = partial(kernels.compare, tolerances=TOLERANCE)


def inputs(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of as many tokens."""
    sizes = [(tokens, count, width) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(size).to(DEVICE, dtype) for size in sizes]
