"""Products with the matrices of whole numbers of stage 10, read as they lie in memory.

A weight takes a byte, or half a one, and becomes a number in a register: the memory is read once,
and nothing is written back. The arithmetic is that of stage 10's `layers.multiply`, group by group,
with the scales outside of the sums, so that the sums are exact wherever the input is rounded.

    quantize  round a row of the input to int8, group by group
    multiply  rows of the input by some of the outputs: few rows (decode), or tiles (prefill)

Shapes: R rows, K inputs, N outputs, G = K / GROUP groups of inputs with a scale each.
"""

from __future__ import annotations

from .flash import product  # which decides how kernels run

import triton  # isort: skip
import triton.language as tl  # isort: skip

SMALLEST = tl.constexpr(2.0**-119)  # of a group that is not 0: as in stage 10
ROUND = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it rounds half to even


@triton.jit
def quantize(x, codes, scales, x_stride, GROUP: tl.constexpr, W: tl.constexpr):
    """One program: one row and one group of x (R, K) -> codes (R, K) int8, scales (R, G)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = tl.arange(0, W) < GROUP
    place = group * GROUP + tl.arange(0, W)  # (W,)
    wide = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(wide)
    finite = tl.max((size < float("inf")).to(tl.int32) ^ 1) == 0  # and no NaN
    largest = tl.max(tl.where(size < float("inf"), size, 0.0))
    usable = finite & (largest >= SMALLEST)
    factor = tl.where(usable, tl.div_rn(127.0, tl.where(usable, largest, 1.0)), 0.0)
    rounded = tl.where(usable, wide, 0.0) * factor
    rounded = (rounded + ROUND) - ROUND
    scale = tl.where(usable, tl.div_rn(largest, 127.0), tl.where(finite, 0.0, float("nan")))
    count = tl.num_programs(1)
    tl.store(codes + row * count * GROUP + place, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row * count + group, scale)


@triton.jit
def multiply(
    x, x_scales, codes, scales, minima, bias, out,
    R, N, G, x_stride, side_stride,
    GROUP: tl.constexpr, PACKED: tl.constexpr, MINIMUM: tl.constexpr, ROUNDED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows by COLUMNS outputs, TILE inputs at a time.

    x (R, K): floats, or codes with x_scales (R, G) if ROUNDED. codes (N, K) int8, or (N, K / 2) if
    PACKED: two in a byte, the first one low. scales, minima (G, N). bias (N,). out (R, N).
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    places = tl.arange(0, TILE)
    here = x + rows.to(tl.int64)[:, None] * x_stride + places  # (ROWS, TILE)
    line = columns.to(tl.int64)[:, None] * (G * GROUP)  # of codes: (COLUMNS, 1)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(G):
        sums = tl.zeros((ROWS, COLUMNS), tl.int32 if ROUNDED else tl.float32)
        total = tl.zeros((ROWS,), tl.int32 if ROUNDED else tl.float32)
        for begin in range(0, GROUP, TILE):
            k = group * GROUP + begin
            inside = places < GROUP - begin  # (TILE,)
            left = tl.load(here + k, mask=(rows < R)[:, None] & inside, other=0)
            if PACKED:
                halves = tl.arange(0, TILE // 2)
                stored = (columns < N)[:, None] & (2 * halves < GROUP - begin)
                byte = tl.load(codes + (line + k) // 2 + halves, mask=stored, other=0)
                right = tl.interleave(byte & 15, byte >> 4).to(tl.int8)  # (COLUMNS, TILE)
                right = right if MINIMUM else right - 8
            else:
                stored = (columns < N)[:, None] & inside
                right = tl.load(codes + line + k + places, mask=stored, other=0)
            if ROUNDED:
                sums += tl.dot(left, tl.trans(right), out_dtype=tl.int32)
            else:  # a code is exact in each dtype; int8 to bfloat16 is wrong in the interpreter
                right = right.to(tl.float32).to(left.dtype)
                sums += product(left, tl.trans(right))
            if MINIMUM:
                total += tl.sum(left.to(total.dtype), 1)
        side = group * side_stride + columns
        scale = tl.load(scales + side, mask=columns < N, other=0.0).to(tl.float32)
        x_scale = tl.full((ROWS,), 1.0, tl.float32)
        if ROUNDED:
            x_scale = tl.load(x_scales + rows * G + group, mask=rows < R, other=0.0)
        y += sums.to(tl.float32) * (scale * x_scale[:, None])
        if MINIMUM:
            least = tl.load(minima + side, mask=columns < N, other=0.0)
            y += least.to(tl.float32) * (total.to(tl.float32) * x_scale)[:, None]
    if BIAS:
        y += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    place = rows.to(tl.int64)[:, None] * N + columns
    written = (rows < R)[:, None] & (columns < N)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=written)
