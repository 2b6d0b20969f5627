"""A matrix of whole numbers with scales, and the layers that multiply by it.

`QuantizedMatrix` is what all of this stage exchanges: `numpy_quant`, `gptq` and the readers of
files make it, `QuantizedLinear` and the kernels multiply by it, the writers store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATIONS = ("int8", "float")  # how a layer reads its input: rounded to int8, or as it is


@dataclass(frozen=True)
class QuantizedMatrix:
    """The matrix (N, K) that is scale * codes + minimum, with one scale and one minimum for each
    row and each group of K / G columns.

    codes: (N, K) int8, one a byte. bits: that a code needs, 4 to 8. Without a minimum codes are
        signed, -2^(bits - 1) to 2^(bits - 1) - 1: files hold both ends. With a minimum they are 0
        to 2^bits - 1, and bits is at most 7.
    scale: (N, G) float32. minimum: (N, G) float32, or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    bits: int = 8

    @property
    def group(self) -> int:
        """Columns that share a scale: K if each row has one scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K): scale * codes, then + minimum, each rounded to float32."""
        grouped = self.codes.unflatten(1, (-1, self.group)) * self.scale[:, :, None]
        if self.minimum is not None:
            grouped = grouped + self.minimum[:, :, None]
        return grouped.flatten(1).to(dtype)


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x (R, K) -> codes (R, K) int8 and scales (R, K / group) float32: the arithmetic that every
    kernel repeats bit for bit, all in float32.

    The scale is max|x| / 127, and a code x * (127 / max|x|), rounded half to even. A group of zeros
    has scale and codes 0. A group with NaN or infinity has scale NaN and codes 0, so that it shows.
    """
    groups = x.float().unflatten(1, (-1, group))  # (R, G, group)
    largest = groups.abs().amax(-1)  # (R, G); NaN if one is
    usable = largest.isfinite() & (largest > 0)
    factor = torch.where(usable, 127 / largest, 0)
    codes = torch.where(usable[:, :, None], groups * factor[:, :, None], 0).round()
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return codes.clamp(-127, 127).to(torch.int8).flatten(1), scale


def multiply(matrix: QuantizedMatrix, x: Tensor) -> Tensor:
    """x (R, K) -> (R, N) float32 with x rounded to int8: by the token if a row has one scale, else
    by the group. This is the slow reference; kernels give the same bits.

    The sum of each group is exact (whole numbers). Groups are added in order, in float32, each
    product and each sum rounded: y += sum * (scale * scale of x), then y += minimum * (sum of the
    codes of x * scale of x).
    """
    codes, x_scale = quantize_activations(x, matrix.group)
    rows, outputs = len(x), len(matrix.codes)
    y = torch.zeros(rows, outputs)
    for g in range(matrix.scale.shape[1]):
        columns = slice(g * matrix.group, (g + 1) * matrix.group)
        left, right = codes[:, columns], matrix.codes[:, columns]
        sums = (left.double() @ right.double().t()).float()  # exact below 2^53
        y = y + sums * (matrix.scale[:, g] * x_scale[:, g, None])
        if matrix.minimum is not None:
            total = left.sum(1, dtype=torch.int32).float() * x_scale[:, g]  # (R,)
            y = y + matrix.minimum[:, g] * total[:, None]
    return y
