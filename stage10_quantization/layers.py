"""The layers that multiply by a matrix of whole numbers with scales, and embeddings from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import PanelProduct, product_of
from .matrix import QuantizedMatrix

SMALLEST = 2.0**-119  # of a group of activations: then its scale is a normal number, 127 / x finite
EXACT = 2**24  # whole numbers up to here, and so their sums in any order, are exact in float32


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x (R, K) -> codes (R, K) int8 and scales (R, K / group) float32: the arithmetic that every
    kernel repeats bit for bit, all in float32.

    The scale is max|x| / 127, and a code x * (127 / max|x|), rounded half to even. A group below
    SMALLEST has scale and codes 0. A group with NaN or infinity has scale NaN and codes 0, so that
    all outputs of its row are NaN.
    """
    groups = x.float().unflatten(1, (-1, group))  # (R, G, group)
    largest = groups.abs().amax(-1)  # (R, G); NaN if one is
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    # One division: PyTorch computes `127 / largest` as 127 * (1 / largest), rounded twice.
    factor = torch.where(usable, torch.full_like(largest, 127) / largest, 0)
    codes = torch.where(usable[:, :, None], groups * factor[:, :, None], 0).round()
    scale = torch.where(usable, largest / 127, torch.where(finite, 0, torch.nan))
    return codes.to(torch.int8).flatten(1), scale


def multiply(matrix: QuantizedMatrix, x: Tensor) -> Tensor:
    """x (R, K) -> (R, N) float32 with x rounded to int8: by the token if a row has one scale, else
    by the group. This is the slow reference; kernels give the same bits.

    The sum of each group is exact (whole numbers), and then rounded to float32. Groups are added in
    order, in float32, each product and each sum rounded: y += sum * (scale * scale of x), then
    y += minimum * (sum of the codes of x * scale of x).
    """
    codes, x_scale = quantize_activations(x, matrix.group)
    exact = torch.float32 if (matrix.group << matrix.bits + 6) <= EXACT else torch.float64
    y = torch.zeros(len(x), len(matrix.codes), device=x.device)
    for g in range(matrix.scale.shape[1]):
        columns = slice(g * matrix.group, (g + 1) * matrix.group)
        left, right = codes[:, columns].to(exact), matrix.codes[:, columns].to(exact)
        y = y + (left @ right.t()).float() * (matrix.scale[:, g] * x_scale[:, g, None])
        if matrix.minimum is not None:
            total = left.sum(1).float() * x_scale[:, g]  # (R,)
            y = y + matrix.minimum[:, g] * total[:, None]
    return y


class QuantizedLinear(nn.Module):
    """A linear layer over a QuantizedMatrix: the slow one, which the kernels are compared with.

    activations: "int8" multiplies whole numbers (`multiply`) and adds the bias in float32; "float"
        multiplies by the dequantized weight, in float32 or float64. The output has the dtype of
        the input.
    """

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None = None, activations: str = "int8"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        # No parameters and no buffers: .to(dtype) would round the scales.
        self.matrix, self.activations = matrix, activations
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, self.in_features)
        if self.activations == "int8":
            y = multiply(self.matrix, flat)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(wide)
            y = F.linear(flat.to(wide), self.matrix.dequantized(wide), bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def product(
        self, layers: Sequence[Any], epilogue: int, cache: Any, dtype: torch.dtype
    ) -> PanelProduct | None:
        """The product of `layers`, this one first, by the kernels (`Product` of stage 09); None if
        they do not take these layers together."""
        if not all(isinstance(layer, QuantizedLinear) for layer in layers):
            return None
        return product_of(layers, epilogue, cache, dtype)

    def shard(self, rows: Tensor | None, columns: Tensor | None) -> QuantizedLinear:
        if columns is not None:
            return QuantizedLinear(self.matrix.columns(columns), None, self.activations)
        assert rows is not None
        bias = None if self.bias is None else self.bias[rows]
        return QuantizedLinear(self.matrix.rows(rows), bias, self.activations)


class QuantizedEmbedding(nn.Module):
    """A table of embeddings (V, C) as a QuantizedMatrix; a tied head multiplies by the same one."""

    def __init__(
        self, matrix: QuantizedMatrix, dtype: torch.dtype, activations: str = "int8"
    ) -> None:
        super().__init__()
        self.matrix, self.dtype, self.activations = matrix, dtype, activations

    def forward(self, ids: Tensor) -> Tensor:
        """(...,) int64 -> (..., C): the rows, dequantized."""
        rows = self.matrix.rows(ids.flatten()).dequantized(self.dtype)
        return rows.view(*ids.shape, -1)

    def head(self) -> QuantizedLinear:
        """The output layer of a tied model. It shares the table's memory."""
        return QuantizedLinear(self.matrix, None, self.activations)
