"""The parts of a model that a runner calls: products side by side, and what lies between two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage09_kernels.program import side_by_side
from stage10_quantization.layers import QuantizedLinear
from stage10_quantization.matrix import QuantizedMatrix

from . import fused, quantized
from .cache import LEAST, power
from .launch import launch

GATES = 1024  # columns that one program of `fused.silu_mul` takes
OUTPUTS = 32, 64  # that one program of `quantized.multiply` takes, of few rows and of many


def joined_product(*layers: Any) -> Callable[[Tensor], Tensor]:
    """A function of x (N, in) -> (N, the outputs of all layers, side by side). Linear layers are
    one product: their weights become views of one tensor, so the model keeps its layers and no
    second copy. Layers in a format of their own compute each for itself."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return lambda x: torch.cat([layer(x) for layer in layers], -1)
    whole, bias = torch.cat([layer.weight for layer in layers]), side_by_side(layers)
    parts = whole.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return lambda x: F.linear(x, whole, bias)


def add_norm(x: Tensor, y: Tensor | None, norm: Any) -> Tensor:
    """Add y (N, C) to the stream x (N, C), in place; returns the norm of the sum. `norm`:
    LayerNorm, or stage 08's RMSNorm."""
    centred = isinstance(norm, nn.LayerNorm)
    epsilon = norm.eps if isinstance(norm, nn.LayerNorm) else norm.epsilon
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, added = x.shape[1], x if y is None else y
    launch(
        fused.add_norm, (len(x),),
        x, added, out, norm.weight, norm.bias if centred else norm.weight,
        x.stride(0), added.stride(0), epsilon,
        C=width, W=power(width), ADD=y is not None, CENTRED=centred,
    )  # fmt: skip
    return out


def silu_mul(x: Tensor) -> Tensor:
    """x (N, 2F), gates and what they scale -> (N, F)."""
    width = x.shape[1] // 2
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    grid = len(x), -(-width // GATES)
    launch(fused.silu_mul, grid, x, out, width, x.stride(0), TILE=GATES)
    return out


# ---- matrices of whole numbers ----


class GpuMatrix:
    """Stage 10's QuantizedMatrix (N, K) as kernels read it. What else reads it asks for `rows`.

    stored: codes (N, K) int8; those of 4 bits (N, K / 2) uint8, two in a byte. sides: scales, and
    minima if there are any, (1 or 2, G, N), in float16 where that holds all of them.
    """

    def __init__(self, matrix: QuantizedMatrix, device: torch.device) -> None:
        self.shape, self.group, self.bits = matrix.shape, matrix.group, matrix.bits
        self.packed = matrix.bits == 4 and matrix.group % 2 == 0
        self.minimal, self.stored = matrix.minimum is not None, matrix.codes.to(device)
        if self.packed:
            codes = (self.stored + 8 * (not self.minimal)).view(torch.uint8)
            low, high = codes.unflatten(1, (-1, 2)).unbind(2)
            self.stored = low | high << 4
        sides = [side.t() for side in (matrix.scale, matrix.minimum) if side is not None]
        whole = torch.stack(sides).to(device)
        half = whole.half()
        self.sides = half if torch.equal(half.float(), whole) else whole

    def rows(self, index: Tensor) -> QuantizedMatrix:
        codes = self.stored[index]
        if self.packed:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1).view(torch.int8)
            codes = codes if self.minimal else codes - 8
        return QuantizedMatrix(codes, *self.sides[:, :, index].float().mT, bits=self.bits)


class KernelLinear(QuantizedLinear):
    """A layer of stage 10 over a GpuMatrix, computed by kernels, for inputs in float32, bfloat16 or
    float16."""

    def __init__(self, matrix: Any, bias: Tensor | None = None, activations: str = "int8") -> None:
        super().__init__(matrix, bias, activations)
        self.matrix: Any

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        matrix, bias, flat = self.matrix, self.bias, x.reshape(-1, self.in_features)
        out = x.new_empty(len(flat), self.out_features)
        sides, count, rounded = matrix.sides, matrix.sides.shape[1], self.activations == "int8"
        x_scales = sides  # any memory, unread
        if rounded:
            codes = torch.empty(flat.shape, dtype=torch.int8, device=x.device)
            x_scales = torch.empty(len(flat), count, device=x.device)
            launch(
                quantized.quantize, (len(flat), count), flat, codes, x_scales, flat.stride(0),
                GROUP=matrix.group, W=power(matrix.group), num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            flat = codes
        few = len(flat) <= LEAST or flat.dtype == torch.float32  # which has no tensor cores
        rows, columns = (LEAST, OUTPUTS[0]) if few else (64, OUTPUTS[1])
        launch(
            quantized.multiply, (-(-self.out_features // columns), -(-len(flat) // rows)),
            flat, x_scales, matrix.stored, sides[0], sides[-1], sides if bias is None else bias,
            out, len(flat), self.out_features, count, flat.stride(0), sides.stride(1),
            GROUP=matrix.group, PACKED=matrix.packed, MINIMUM=matrix.minimal,
            ROUNDED=rounded, BIAS=bias is not None, ROWS=rows, COLUMNS=columns,
            TILE=max(32, min(64, power(matrix.group))), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


def to_kernels(model: Any) -> None:
    """Put kernels in place of the quantized layers of `model`, and its quantized table on the GPU,
    from files, too. A head that shares its table's matrix still does."""
    tables: list[tuple[Any, GpuMatrix]] = []
    for name, layer in list(model.named_modules()):
        matrix = getattr(layer, "matrix", None)
        if matrix is None or isinstance(matrix, GpuMatrix):
            continue
        shared = [ours for theirs, ours in tables if theirs is matrix]
        layer.matrix = shared[0] if shared else GpuMatrix(matrix, model.device)
        if isinstance(layer, QuantizedLinear):
            bias = None if layer.bias is None else layer.bias.to(model.device)
            model.set_submodule(name, KernelLinear(layer.matrix, bias, layer.activations))
        else:
            tables.append((matrix, layer.matrix))
