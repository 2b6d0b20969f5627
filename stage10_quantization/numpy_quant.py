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

Why it is fast (`layers.multiply`): a product of codes is a sum of small whole numbers, exact in any
order, and scales leave the sum: sum(scale * q * x_scale * p) = scale * x_scale * sum(q * p).

Rows that are not usual: a group of zeros has scale 0 and codes 0, without a division. A group that
holds NaN or infinity, or whose scale has no finite value in its dtype, has scale NaN and codes 0;
so has, with a minimum, one whose largest weight less its smallest is infinite in float32.

Shapes: N outputs, K inputs, G = K / group groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike
from numpy.typing import NDArray as Array


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
    return codes_of(groups, bits, scale), scale


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
    return codes_of(groups, bits, scale, minimum), scale, minimum


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
    return codes_of(groups, bits, scale, minimum), scale, minimum


def codes_of(groups: Array, bits: int, scale: Array, minimum: Array | None = None) -> Array:
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
