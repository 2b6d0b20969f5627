"""The kernels against `layers.multiply`, to the last bit: every shape, format and level."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stage09_kernels import library
from stage09_kernels.cache import FAST, NAIVE, KernelCache
from stage09_kernels.operations import LINEAR, PLAIN, Operation, Pass
from stage10_quantization.kernels import product_of
from stage10_quantization.layers import QuantizedLinear, QuantizedMatrix, multiply

LEVELS = library.levels()
READ_ROW = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
EMULATED = "emulated"  # the loops over tiles, on any processor
F32, BF16 = torch.float32, torch.bfloat16
EACH = [  # source and level; levels but the first are compiled for this test alone
    pytest.param(source, level, marks=() if level == LEVELS[0] else pytest.mark.slow)
    for source in (NAIVE, FAST)
    for level in LEVELS
    if source == FAST or level == LEVELS[0]
]


def a_matrix(rows, groups, group, bits, minimum=False, half=False) -> QuantizedMatrix:
    """Random codes, with both ends in each row, or the last one alone, and scales, some of which
    are 0 or negative."""
    first = 0 if minimum else -(2 ** (bits - 1))
    codes = torch.randint(2**bits, (rows, groups * group)) + first
    last = first + 2**bits - 1
    codes[::2, 0], codes[:, -1], codes[5::6] = first, last, last
    scale = torch.randn(rows, groups) / 50
    scale[0] = 0
    low = torch.randn(rows, groups) / 10
    if half:
        scale, low = scale.half().float(), low.half().float()
    return QuantizedMatrix(codes.to(torch.int8), scale, low if minimum else None, bits=bits)


def inputs_of(rows: int, width: int) -> Tensor:
    """Rows of all sizes, one of zeros, one with NaN, one with infinity, one whose codes are 127."""
    x = torch.randn(rows, width) * 10.0 ** torch.arange(rows)[:, None].sub(rows // 2)
    x[1::6] = 0
    x[2::7, width // 2] = torch.nan
    x[3::8, -1] = -torch.inf
    x[4::9] *= 1e-38
    x[5::9] = 1
    return x


def a_cache(source, level, real) -> Any:
    """What a product needs of a KernelCache."""
    emulated = level == EMULATED
    cache: Any = SimpleNamespace(
        real=real, kv=SimpleNamespace(dtype=real), source=source,
        level="plain" if emulated else level, defines=("EMULATE_TILES=1",) if emulated else (),
    )  # fmt: skip
    cache.library = lambda *arguments: KernelCache.library(cache, *arguments)
    return cache


def run(source, level, x, layer):
    """The product by the kernel, with guards behind each row of it; and the matrix, as a table of
    embeddings reads it."""
    dtype = x.dtype
    cache = a_cache(source, level, F32)
    ours = product_of([layer], PLAIN, cache, dtype)
    assert ours is not None and ours.read_row is not None
    scratch = torch.full((len(x) * ours.scratch + 1,), 7, dtype=torch.uint8)
    operation = Operation(LINEAR, 1)
    operation.of.linear = ours.linear
    fields = operation.of.linear
    fields.scratch = scratch.data_ptr()
    spare = torch.nn.functional.pad(x, (0, 3), value=torch.nan)  # must not be read
    room = torch.full((len(x) + 1, fields.outputs + 3), 7.0)
    fields.x, fields.x_stride, fields.x_is_operand = spare.data_ptr(), spare.stride(0), True
    fields.out, fields.out_stride = room.data_ptr(), room.stride(0)
    this_pass = Pass(n_out_rows=len(x))
    step = cache.library(dtype).step
    library.call(step, ctypes.byref(operation), 1, ctypes.byref(this_pass))
    assert scratch[-1] == 7 and (room[-1] == 7).all() and (room[:, fields.outputs :] == 7).all()
    table = torch.full((fields.outputs + 1, layer.in_features), 7.0)
    read_row = READ_ROW(ours.read_row)
    for number, row in enumerate(table[:-1]):
        read_row(fields.format, number, row.data_ptr())
    assert (table[-1] == 7).all() and torch.equal(table[:-1], layer.matrix.dequantized())
    return room[:-1, : fields.outputs]


def cases():
    """(groups, inputs in each, outputs, rows of x), for each class of shapes."""
    yield from ((1, 4 * n % 131 + 1, 7 * n % 130 + 1, n % 13 + 1) for n in range(26))
    yield from ((n % 5 + 1, group, 61 + n, n % 13 + 1) for n, group in enumerate((16, 32, 64, 128)))
    yield from ((3, group, 70, 7) for group in (1, 7, 12, 24, 33))
    yield from ((24, 32, 200, 33), (1, 768, 130, 40), (1, 189, 70, 9), (2, 2048, 64, 2))


@pytest.mark.parametrize(("source", "level"), [*EACH, (FAST, EMULATED)])
def test_every_shape_has_the_bits_of_the_reference(source, level):
    torch.manual_seed(0)
    for number, (groups, group, outputs, rows) in enumerate(cases()):
        torch.set_num_threads(number % 4 + 1)
        x = inputs_of(rows, groups * group)
        for code_bits, minimum in ((8, False), (4, False), (4, True)):
            matrix = a_matrix(outputs, groups, group, code_bits, minimum, half=number % 2 == 0)
            both = run(source, level, x, QuantizedLinear(matrix)), multiply(matrix, x)
            got, want = (y.view(torch.int32).masked_fill(y.isnan(), -1) for y in both)
            assert torch.equal(got, want), (groups, group, outputs, rows)


@pytest.mark.parametrize("level", [pytest.param(e.values[1], marks=e.marks) for e in EACH[1:]])
def test_inputs_that_are_not_rounded(level):
    """fast/ has the bits of naive.c, and both are near the product with the dequantized matrix."""
    torch.manual_seed(3)
    for number, (groups, group, outputs, rows) in enumerate(cases()):
        x = torch.randn(rows, groups * group).to((F32, BF16)[number % 2])
        for code_bits, minimum in ((8, False), (4, False), (4, True)):
            matrix = a_matrix(outputs, groups, group, code_bits, minimum)
            layer = QuantizedLinear(matrix, None, "float")
            naive, fast = (run(source, level, x, layer) for source in (NAIVE, FAST))
            assert torch.equal(naive, fast), (groups, group, outputs, rows)
            size = x.float().abs() @ matrix.dequantized().abs().t()
            assert ((fast - layer(x.float())).abs() <= 1e-5 * (1 + size)).all()
