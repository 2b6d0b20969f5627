"""Quantization on one page: a matrix of floats becomes whole numbers with scales, in NumPy.

    w            0.31  -1.27   0.05   0.64        eight bits: scale = 1.27 / 127 = 0.01
    codes          31   -127      5     64        a byte each, and the scale once for all
    codes * scale                                 differs from w by at most scale / 2

A scale may serve a whole row, or a group of `group` columns: 32 or 64. Smaller groups follow the
weights more closely, and cost more scales. `symmetric` puts 0 in the middle of the codes. With few
bits `asymmetric` is better: codes from 0, and the smallest weight of the group beside the scale.

Scales are rounded before they are used, to the dtype in which they are stored, and outwards: so no
weight lies outside the codes, and the error is at most scale / 2 for every weight. Code that rounds
them afterwards adds an error of codes * (error of the scale).

Why it is fast: a product of codes is a sum of small whole numbers, exact in 32 bits, in any order.
The scales leave the sum: sum(scale * q * x_scale * p) = scale * x_scale * sum(q * p).

Rows that are not usual: a group of zeros has scale 0 and codes 0, without a division. A group that
holds NaN or infinity, or whose scale has no finite value in its dtype, has scale NaN and codes 0;
so has, with a minimum, one whose largest weight less its smallest is infinite in float32.

Shapes: N outputs, K inputs, G = K / group groups, R rows (tokens).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray
SMALLEST = 2.0**-119  # of activations: below it 127 / x is infinite, or x / 127 no normal number
ROUNDING = 1 + 2.0**-14  # of the divisions in float32, which move a code's edge a little


def up(x: Array, dtype: DTypeLike) -> Array:
    """The smallest numbers of `dtype` that are at least x."""
    with np.errstate(over="ignore"):
        y = x.astype(dtype)
        return np.where(y < x, np.nextafter(y, y.dtype.type(np.inf)), y)


def symmetric(w: Array, bits: int, group: int, dtype: DTypeLike = np.float32) -> tuple:
    """w (N, K) -> codes (N, K) int8 from -Q to Q = 2^(bits - 1) - 1, and scales (N, G) float32 with
    values of `dtype`."""
    groups = w.astype(np.float32).reshape(len(w), -1, group)  # (N, G, group)
    largest = np.abs(groups).max(-1).astype(np.float64)
    scale = up(largest / (2 ** (bits - 1) - 1), dtype).astype(np.float32)
    scale[~np.isfinite(scale)] = np.nan
    return codes_of(groups, scale, None, bits), scale


def asymmetric(w: Array, bits: int, group: int, dtype: DTypeLike = np.float16) -> tuple:
    """w (N, K) -> codes (N, K) from 0 to 2^bits - 1, and scales and minima, both (N, G) float32
    with values of `dtype`. bits: at most 7, so that codes are int8."""
    groups = w.astype(np.float32).reshape(len(w), -1, group)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        minimum = -up(-groups.min(-1).astype(np.float64), dtype)
        width = groups.max(-1).astype(np.float64) - minimum
        scale = up(width / (2**bits - 1), dtype).astype(np.float32)
    with np.errstate(over="ignore"):  # w - minimum is computed in float32
        finite = np.isfinite(width.astype(np.float32))
    unusable = ~np.isfinite(scale) | ~np.isfinite(minimum) | ~finite
    scale[unusable], minimum[unusable] = np.nan, 0
    minimum = minimum.astype(np.float32)
    return codes_of(groups, scale, minimum, bits), scale, minimum


def with_zero(w: Array, bits: int, group: int, dtype: DTypeLike = np.float16) -> tuple:
    """As `asymmetric`, with minima that are whole multiples of the scales, as compressed-tensors
    stores them: 0 is exact."""
    groups = w.astype(np.float32).reshape(len(w), -1, group)
    low = np.minimum(groups.min(-1), 0).astype(np.float64)
    high = np.maximum(groups.max(-1), 0).astype(np.float64)
    scale = up((high - low) / (2**bits - 1), dtype).astype(np.float32)
    zero = np.rint(-low / np.where(scale > 0, scale, 1)).astype(np.float32)
    scale[~np.isfinite(scale)] = np.nan
    minimum = np.where(np.isfinite(scale), -(scale * zero), np.float32(0))
    return codes_of(groups, scale, minimum, bits), scale, minimum


def codes_of(groups: Array, scale: Array, minimum: Array | None, bits: int) -> Array:
    """groups (N, G, group), less the minimum (N, G), over the scale (N, G), rounded half to even,
    within the range of the codes -> (N, K)."""
    highest = 2 ** (bits - 1) - 1 if minimum is None else 2**bits - 1
    divisor = np.where(scale > 0, scale, 1)[:, :, None]
    if minimum is not None:
        groups = groups - minimum[:, :, None]
    codes = np.rint(np.where(np.isfinite(scale)[:, :, None], groups, 0) / divisor)
    lowest = -highest if minimum is None else 0
    return codes.clip(lowest, highest).astype(np.int8).reshape(len(groups), -1)


def dequantize(codes: Array, scale: Array, minimum: Array | None = None) -> Array:
    """(N, K) float32: scale * codes, then + minimum, each rounded to float32."""
    w = codes.reshape(*scale.shape, -1).astype(np.float32) * scale[:, :, None]
    if minimum is not None:
        w = w + minimum[:, :, None]
    return w.reshape(codes.shape)


def quantize_activations(x: Array, group: int) -> tuple[Array, Array]:
    """x (R, K) -> codes (R, K) int8 and scales (R, G): per token if group is K. A group below
    SMALLEST is one of zeros."""
    groups = x.astype(np.float32).reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1)
    finite = np.isfinite(largest)
    usable = finite & (largest >= SMALLEST)
    factor = np.float32(127) / np.where(usable, largest, np.inf).astype(np.float32)
    codes = np.rint(np.where(usable[:, :, None], groups, 0) * factor[:, :, None])
    scale = np.where(usable, largest / np.float32(127), np.where(finite, 0, np.nan))
    return codes.astype(np.int8).reshape(x.shape), scale.astype(np.float32)


def multiply(x: Array, codes: Array, scale: Array, minimum: Array | None = None) -> Array:
    """x (R, K) -> (R, N) float32: whole numbers within a group, floats from group to group."""
    group = codes.shape[1] // scale.shape[1]
    x_codes, x_scale = quantize_activations(x, group)
    y = np.zeros((len(x), len(codes)), np.float32)
    for g in range(scale.shape[1]):
        p = x_codes[:, g * group : (g + 1) * group].astype(np.int32)
        q = codes[:, g * group : (g + 1) * group].astype(np.int32)
        y += (p @ q.T).astype(np.float32) * (scale[:, g] * x_scale[:, g, None])
        if minimum is not None:
            total = p.sum(1).astype(np.float32) * x_scale[:, g]
            y += minimum[:, g] * total[:, None]
    return y


def bound(x: Array, codes: Array, scale: Array, minimum: Array | None = None) -> Array:
    """How much a layer's output (R, N) can differ from that of the float weights and inputs:

    |y - y'| <= the sum over the groups of scale / 2 * |x|_1 + x_scale / 2 * |w'|_1

    where w' are the dequantized weights. The rounding of the sums in float32 comes to this.
    """
    groups = (len(x), scale.shape[1], -1)
    x_scale = quantize_activations(x, codes.shape[1] // scale.shape[1])[1].astype(np.float64)
    x_sums = np.abs(x.astype(np.float64)).reshape(groups).sum(-1)  # (R, G)
    w_sums = np.abs(dequantize(codes, scale, minimum).astype(np.float64))
    w_sums = w_sums.reshape(len(codes), *groups[1:]).sum(-1)  # (N, G)
    return ROUNDING / 2 * (x_sums @ scale.astype(np.float64).T + x_scale @ w_sums.T)
