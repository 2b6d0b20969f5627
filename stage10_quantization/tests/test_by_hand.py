"""The product by its definition, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
