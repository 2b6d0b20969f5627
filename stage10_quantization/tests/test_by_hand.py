"""Definitions, written out number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stage10_quantization.formats import blocks
from stage10_quantization.layers import QuantizedMatrix, multiply


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("group", [1, 5, 20])
def test_a_product_is_that_of_its_definition(group, minimum):
    rng = np.random.default_rng(group)
    f32 = np.float32
    codes = rng.integers(0 if minimum else -128, 128, (3, 20))
    scale = rng.random((3, 20 // group)).astype(f32)
    low = rng.standard_normal(scale.shape).astype(f32) if minimum else None
    x = rng.standard_normal((4, 20)).astype(f32)
    matrix = QuantizedMatrix(
        torch.tensor(codes, dtype=torch.int8),
        torch.from_numpy(scale),
        None if low is None else torch.from_numpy(low),
        bits=7 if minimum else 8,
    )
    got = multiply(matrix, torch.from_numpy(x)).numpy()
    assert got.dtype == f32
    for r in range(4):
        for n in range(3):
            y = f32(0)
            for g in range(20 // group):
                columns = range(g * group, (g + 1) * group)
                largest = max(abs(x[r, k]) for k in columns)
                rounded = [int(np.rint(x[r, k] * (f32(127) / largest))) for k in columns]
                x_scale = f32(largest / f32(127))
                products = zip(rounded, columns, strict=True)
                total = sum(code * int(codes[n, k]) for code, k in products)
                y = f32(y + f32(f32(total) * f32(scale[n, g] * x_scale)))
                if low is not None:
                    y = f32(y + f32(low[n, g] * f32(f32(sum(rounded)) * x_scale)))
            assert got[r, n] == y


def test_blocks_of_q4_k_by_their_definition():
    block = np.random.default_rng(0).integers(0, 256, (50, 144), dtype=np.uint8)
    block[:, [1, 3]] &= 0x3B  # finite, and not below 0
    codes, scale, minimum = blocks.q4_k(block)
    assert minimum is not None
    assert codes.shape == (50, 256) and codes.dtype == np.int8
    assert scale.shape == minimum.shape == (50, 8) and scale.dtype == minimum.dtype == np.float32
    for b, row in enumerate(block):
        d, dmin = (np.frombuffer(row[i : i + 2].tobytes(), "<f2")[0] for i in (0, 2))
        packed, nibbles = [int(byte) for byte in row[4:16]], row[16:]
        for j in range(8):
            if j < 4:
                s, m = packed[j] % 64, packed[j + 4] % 64
            else:
                s = packed[j + 4] % 16 + 16 * (packed[j - 4] // 64)
                m = packed[j + 4] // 16 + 16 * (packed[j] // 64)
            assert scale[b, j] == np.float32(d) * np.float32(s)
            assert minimum[b, j] == -(np.float32(dmin) * np.float32(m))
            for i in range(32):
                byte = int(nibbles[32 * (j // 2) + i])
                assert codes[b, 32 * j + i] == (byte // 16 if j % 2 else byte % 16)
