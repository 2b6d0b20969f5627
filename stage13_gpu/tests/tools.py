"""Caches of this stage beside stage 05's, and inputs of a pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stage05_paged.engine import cache_type
from stage08_llama.config import LlamaConfig
from stage13_gpu.cache import GpuCache
from stage13_gpu.launch import DEVICE

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BLOCKS = 60


def config_of(heads: int, kv_heads: int, width: int, window: int = 0) -> LlamaConfig:
    windows = (window, window) if window else ()
    return LlamaConfig(11, 4096, heads * width, 2, heads, kv_heads, width, windows=windows)


def caches(
    heads: int,
    kv_heads: int,
    width: int,
    block: int,
    dtype: torch.dtype,
    window: int = 0,
    blocks: int = BLOCKS,
) -> tuple[Any, GpuCache]:
    """Stage 05's cache in float64, and this stage's, in which slots without a token are NaN."""
    config = config_of(heads, kv_heads, width, window)
    gpu = GpuCache(config, blocks, block, dtype=dtype)
    gpu.kv.fill_(torch.nan)
    return cache_type(config)(config, blocks, block, dtype=torch.float64), gpu


def inputs(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of as many tokens."""
    sizes = [(tokens, count, width) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(size).to(DEVICE, dtype) for size in sizes]


def compare(output: Tensor, paged: Any, layer: int, *tensors: Tensor) -> None:
    """`output` with what stage 05 computes in float64 for the same pass."""
    assert output.dtype == tensors[0].dtype
    wanted = torch.empty(output.shape, dtype=torch.float64)
    order = [x.cpu().double()[paged.order] for x in tensors]
    wanted[paged.order] = paged.attend(layer, *order)
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.cpu().double(), wanted, atol=tolerance, rtol=tolerance)
