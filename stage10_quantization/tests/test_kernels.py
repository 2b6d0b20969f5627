"""The kernels against `layers.multiply`, to the last bit: every shape, format and level."""

from __future__ import annotations

import ctypes
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stage09_kernels import library
from stage09_kernels.cache import FAST, NAIVE, KernelCache
from stage09_kernels.operations import GELU, LINEAR, PLAIN, SILU_MUL, Operation, Pass
from stage10_quantization.kernels import PanelProduct
from stage10_quantization.layers import QuantizedMatrix, multiply

LEVELS = library.levels()
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
EACH = [  # source and level; levels but the first are compiled for this test alone
    pytest.param(source, level, marks=() if level == LEVELS[0] else pytest.mark.slow)
    for source in (NAIVE, FAST)
    for level in LEVELS
    if source == FAST or level == LEVELS[0]
]


def a_matrix(rows, groups, group, bits, minimum=False, half=False) -> QuantizedMatrix:
    """Random codes, with both ends in each row, and scales, some of which are 0 or negative."""
    low, high = (0, 2**bits) if minimum else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = torch.randint(low, high, (rows, groups * group))
    codes[::2, 0], codes[:, -1] = low, high - 1
    scale = torch.randn(rows, groups) / 50
    scale[0] = 0
    several = [scale] + [torch.randn(rows, groups) / 10] * minimum
    several = [x.half().float() if half else x for x in several]
    return QuantizedMatrix(codes.to(torch.int8), *several, bits=bits)


def a_layer(matrix: QuantizedMatrix, bias: bool = False, activations: str = "int8") -> Any:
    rows = len(matrix.codes)
    return SimpleNamespace(
        matrix=matrix,
        bias=torch.randn(rows) if bias else None,
        out_features=rows,
        activations=activations,
    )


def inputs_of(rows: int, width: int) -> Tensor:
    """Rows of all sizes, one of zeros, one with NaN, one with infinity."""
    x = torch.randn(rows, width) * 10.0 ** torch.arange(rows)[:, None].sub(rows // 2)
    x[1::6] = 0
    x[2::7, width // 2] = torch.nan
    x[3::8, -1] = -torch.inf
    x[4::9] *= 1e-38
    return x


def run(source, level, x, layers, epilogue=PLAIN, residual=None, chosen=None, real=F32, out=None):
    """The product by the kernel, with guards behind each row of it."""
    dtype = BF16 if BF16 in (x.dtype, out) else real
    cache: Any = SimpleNamespace(
        real=real, kv=SimpleNamespace(dtype=real), level=level, source=source, defines=()
    )
    cache.library = lambda *arguments: KernelCache.library(cache, *arguments)
    product = PanelProduct(layers, epilogue, cache, dtype)
    product.make_room(len(x))
    operation = Operation(LINEAR, 1)
    operation.of.linear = product.linear
    l = operation.of.linear
    spare = torch.nn.functional.pad(x, (0, 3), value=torch.nan)  # must not be read
    room = torch.full((len(x) + 1, l.outputs + 3), 7.0, dtype=out or real)
    bias = None if product.bias is None else product.bias.to(real)
    l.bias = None if bias is None else bias.data_ptr()
    l.x, l.x_stride, l.x_is_operand = spare.data_ptr(), spare.stride(0), x.dtype == dtype
    l.out, l.out_stride, l.out_is_operand = room.data_ptr(), room.stride(0), out == BF16
    if residual is not None:
        l.residual, l.residual_stride = residual.data_ptr(), residual.stride(0)
    l.residual_of_all = chosen is not None
    rows = None if chosen is None else chosen.data_ptr()
    this_pass = Pass(n_out_rows=len(x), out_rows=rows)
    step = cache.library(dtype).step
    library.call(step, ctypes.byref(operation), 1, ctypes.byref(this_pass))
    assert (room[-1] == 7).all() and (room[:, l.outputs :] == 7).all()
    return room[:-1, : l.outputs]


def bits(x: Tensor) -> Tensor:
    """Whole numbers that are equal where x is; all NaN are."""
    whole = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
    return whole.masked_fill(x.isnan(), -1)


def cases():
    """(groups, inputs in each, outputs, rows of x), for each class of shapes."""
    yield from ((1, 4 * n % 131 + 1, 7 * n % 130 + 1, n % 13 + 1) for n in range(26))
    yield from ((n % 5 + 1, group, 61 + n, n % 13 + 1) for n, group in enumerate((16, 32, 64, 128)))
    yield from ((3, group, 70, 7) for group in (1, 7, 12, 24, 33))
    yield from ((24, 32, 200, 33), (1, 768, 130, 40), (2, 2048, 64, 2))


@pytest.mark.parametrize(("source", "level"), EACH)
def test_every_shape_has_the_bits_of_the_reference(source, level):
    torch.manual_seed(0)
    for number, (groups, group, outputs, rows) in enumerate(cases()):
        torch.set_num_threads(number % 4 + 1)
        x = inputs_of(rows, groups * group)
        for code_bits, minimum in ((8, False), (4, False), (4, True), (6, False), (5, True)):
            matrix = a_matrix(outputs, groups, group, code_bits, minimum, half=number % 2 == 0)
            got = run(source, level, x, [a_layer(matrix)])
            assert torch.equal(bits(got), bits(multiply(matrix, x))), (groups, group, outputs, rows)
