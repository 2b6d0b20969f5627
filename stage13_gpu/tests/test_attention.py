"""The kernels of attention, run by Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

import torch

from shared.config import Config
from stage09_kernels.backend import NoKernels
from stage13_gpu import cache as module
from stage13_gpu.cache import GpuCache, check
from stage13_gpu.tests.tools import caches, compare, inputs, passes

HEADS = [(3, 3, 16), (4, 1, 32), (6, 2, 40), (7, 1, 8), (2, 2, 64), (4, 2, 128), (3, 3, 17)]


@pytest.fixture
def small(monkeypatch):
    """Tiles and pieces so small that short sequences have several."""
    monkeypatch.setattr(module, "TILE", 32)
    monkeypatch.setattr(module, "PIECE", 32)


def agree(heads, kv_heads, width, block, dtype, lengths):
    """With stage 05, in float64. Slots without a token hold NaN."""
    torch.manual_seed(0)
    oracle, gpu = caches(heads, kv_heads, width, block, dtype)
    for shares in passes(block, lengths):
        total = sum(count for _, _, count in shares)
        tensors = inputs(total, heads, kv_heads, width, dtype)
        output = gpu.extend(shares).attend(1, *tensors)
        compare(output, oracle.extend(shares), 1, *tensors)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_blocks_are_read_in_place(heads, kv_heads, width, small):
    agree(heads, kv_heads, width, 16, torch.float32, [1, 16, 17, 33, 70])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_dtypes(dtype, small):
    """The interpreter's own products of bfloat16 are wrong: see `product`."""
    agree(6, 2, 40, 16, dtype, [1, 17, 50])


@pytest.mark.parametrize("block", [1, 7, 32])
def test_blocks_of_any_size(block, small):
    agree(4, 2, 16, block, torch.float32, [1, 5, 20, 28] if block == 1 else [3, 8, 40, 66])


def test_tiles_and_pieces_of_full_size():
    agree(2, 1, 16, 16, torch.float32, [1, 257, 520])
    agree(2, 1, 16, 16, torch.float32, [40, 90])  # one piece, whose result is final


def by_rows(a, b, **_):
    """np.matmul with the same sums for a row wherever it stands, as a GPU's tiles have. A BLAS for
    AVX2 adds the last rows of a matrix in another order."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2, dtype=np.float64).astype(np.float32)


def test_bits_depend_on_neither_neighbours_nor_chunks(small, monkeypatch):
    """A prompt of 63 tokens and 3 more one by one: alone, and cut into chunks of two or more beside
    new tokens of other sequences, the longest of which has more pieces."""
    monkeypatch.setattr(np, "matmul", by_rows)  # the interpreter's `tl.dot`
    torch.manual_seed(1)
    tensors, table = inputs(66, 6, 2, 24, torch.float32), [3, 50, 4, 11, 2, 0, 9, 8, 30]
    outputs = []
    for chunks, others in (([63], 0), ([2, 31, 30], 2), ([37, 26], 1)):
        _, gpu = caches(6, 2, 24, 8, torch.float32)
        tables = [[20 + 14 * i + j for j in range(14)] for i in range(others)]
        gpu.kv[:, :, :, sum(tables, [])] = 0.5
        start, parts = 0, []
        for count in [*chunks, 1, 1, 1]:
            shares = [(other, 100 + i, 1) for i, other in enumerate(tables)]
            beside = inputs(others, 6, 2, 24, torch.float32)
            rows = slice(start, start + count)
            both = [torch.cat((x, y[rows])) for x, y in zip(beside, tensors, strict=True)]
            attention = gpu.extend([*shares, (table, start, count)])
            parts.append(attention.attend(0, *both)[others:])
            start += count
        outputs.append(torch.cat(parts))
    assert not outputs[0].isnan().any()
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_cache_of_more_than_two_billion_numbers():
    """Block 4 begins at number 2^32, which is 0 in 32 bits. Few pages are touched."""
    _, gpu = caches(1, 1, 16, 16, torch.float16)
    gpu.block_size, plane = 2**26, 5 * 2**30
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    numbers = torch.frombuffer(mmap.mmap(-1, 4 * plane, lazily), dtype=torch.float16)
    gpu.kv = numbers.as_strided((1, 2, 1, 5, 2**26, 16), (0, plane, plane, 2**30, 16, 1))
    q, k, v = inputs(2, 1, 1, 16, torch.float16)
    assert torch.equal(gpu.extend([([0], 0, 1), ([4], 0, 1)]).attend(0, q, k, v), v)


def test_what_has_no_kernel_is_refused_in_a_sentence():
    with pytest.raises(NoKernels, match="float64: choose float32, bfloat16 or float16"):
        GpuCache(Config(11, 64, 48, 1, 2), 4, dtype=torch.float64)


def test_what_a_gpu_lacks_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    for version, dtype in (((7, 0), torch.float16), ((7, 5), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, v=version: v)
        with pytest.raises(NoKernels, match=": Some GPU is too old.$"):
            check(dtype, "cuda")
    check(torch.float16, "cuda")
