"""Matrices of whole numbers laid out for the kernels, and their place in stage 09's list.

`quantized.h` describes the layout, `naive.c` and `fast/linear.c` compute with it: the same bits as
`layers.multiply`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.paths import ROOT
from stage09_kernels import library
from stage09_kernels.cache import KernelCache
from stage09_kernels.operations import PANEL, SILU_MUL, Linear, fields
from stage09_kernels.program import LINE, interleave, side_by_side

from .matrix import QuantizedMatrix

FOLDER = ROOT / "stage10_quantization"
NAIVE, FAST = FOLDER / "naive.c", FOLDER / "fast" / "linear.c"
STEP = 8  # inputs to whose multiple a group is padded
GROUP_BYTES = 12  # struct group
AT_A_TIME = 8  # panels that are laid out: what is made on the way takes some 10 MB


class Quantized(ctypes.Structure):
    """`struct quantized` of quantized.h."""

    _fields_ = fields("panels", "row_bytes count group bits offset scale_bytes minimum floats")


def lay_out(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Rows (64 P, K), with scales in `dtype` -> (P, G, bytes)."""
    stored = (matrix.codes.view(torch.uint8) + offset_of(matrix)).unflatten(1, (-1, matrix.group))
    stored = nn.functional.pad(stored, (0, -matrix.group % STEP))
    if matrix.bits == 4:
        low, high = stored.unflatten(2, (-1, 2, 4)).unbind(3)  # (64 P, G, steps / 2, 4)
        stored = (low | high << 4).flatten(2)
    steps = stored.contiguous().view(torch.int32).unflatten(0, (-1, PANEL))  # (P, 64, G, steps)
    codes = steps.permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.uint8)
    scales = torch.stack(matrix.sides).to(dtype).unflatten(1, (-1, PANEL))  # (1 or 2, P, 64, G)
    sides = scales.permute(1, 3, 0, 2).contiguous().flatten(2).view(torch.uint8)
    return torch.cat((sides, codes), 2)


def offset_of(matrix: QuantizedMatrix) -> int:
    """What is added to a code, so that it has no sign."""
    return 0 if matrix.minimum is not None else 1 << (matrix.bits - 1)


class PanelProduct:
    """`stage09_kernels.program.Product` of QuantizedLinears side by side.

    function, read_row: the addresses of the C functions.
    """

    def __init__(
        self, layers: Sequence[Any], epilogue: int, function: int | None, read_row: int | None
    ) -> None:
        self.read_row = read_row
        self.matrices: list[QuantizedMatrix] = [layer.matrix for layer in layers]
        counts = [layer.out_features for layer in layers]

        def side(parts: Sequence[Tensor]) -> Tensor:
            """One after the other, or by turns, and then zeros up to a whole panel."""
            whole = interleave(*parts) if epilogue == SILU_MUL else torch.cat(list(parts))
            return nn.functional.pad(whole, (0, -len(whole) % PANEL))

        rows = side(torch.arange(sum(counts)).split(counts))  # padding is row 0, and not stored
        bias = side_by_side(layers)
        self.bias = None if bias is None else side(bias.split(counts))
        parts = zip(*((matrix.codes, *matrix.sides) for matrix in self.matrices), strict=True)
        whole = QuantizedMatrix(*map(torch.cat, parts), bits=self.matrices[0].bits)
        exact = all(torch.equal(part.half().float(), part) for part in whole.sides)
        dtype, padded = torch.float16 if exact else torch.float32, whole.group + -whole.group % STEP
        size = len(whole.sides) * dtype.itemsize + padded * whole.bits // 8
        count = whole.scale.shape[1]
        self.panels = library.blank((len(rows) // PANEL, count, PANEL * size), torch.uint8)
        pieces = self.panels.split(AT_A_TIME), rows.split(AT_A_TIME * PANEL)
        for panels, index in zip(*pieces, strict=True):
            panels[:] = lay_out(whole.rows(index), dtype)
        self.bytes = self.panels.nbytes
        floats = layers[0].activations == "float"
        x_bytes = count * (padded * (4 if floats else 1) + GROUP_BYTES)
        self.scratch = x_bytes + -x_bytes % LINE + LINE  # the last vector may write one line more
        self.format = Quantized(
            panels=self.panels.data_ptr(),
            row_bytes=self.scratch,
            count=count,
            group=whole.group,
            bits=whole.bits,
            offset=offset_of(whole),
            scale_bytes=dtype.itemsize,
            minimum=whole.minimum is not None,
            floats=floats,
        )
        self.linear = Linear(
            inputs=layers[0].in_features,
            outputs=counts[0] if epilogue == SILU_MUL else sum(counts),
            epilogue=epilogue,
            product=function,
            format=ctypes.addressof(self.format),
        )

    def reader(self, table: nn.Module) -> tuple[int | None, int] | None:
        (matrix, *others) = self.matrices
        if others or matrix is not getattr(table, "matrix", None):
            return None
        return self.read_row, ctypes.addressof(self.format)

    def release(self, model: nn.Module) -> None:
        """The layers of `model`, and a table that shares a matrix with one, drop it."""
        for place, matrix in enumerate(self.matrices):
            codes, scale = matrix.codes.to("meta"), matrix.scale.to("meta")
            self.matrices[place] = empty = QuantizedMatrix(codes, scale, bits=matrix.bits)
            module: Any
            for module in model.modules():
                if getattr(module, "matrix", None) is matrix:
                    module.matrix = empty


def product_of(
    layers: Sequence[Any], epilogue: int, cache: KernelCache, dtype: torch.dtype
) -> PanelProduct | None:
    """The product of `layers` side by side for kernels with this cache and with operands of
    `dtype`. None if they differ in format, or read their input in float64."""
    formats = {
        (layer.matrix.group, layer.matrix.bits, layer.matrix.minimum is None, layer.activations)
        for layer in layers
    }
    if len(formats) > 1 or layers[0].activations == "float" and cache.real == torch.float64:
        return None
    naive = cache.source.name.startswith("naive")
    sizes = {"REAL": cache.real, "WEIGHT": dtype, "CACHE": cache.real}
    defines = tuple(f"{name}={dtype.itemsize}" for name, dtype in sizes.items())
    loaded = library.load(NAIVE if naive else FAST, defines + cache.defines, cache.level)
    function = loaded.product if naive else loaded.add_product
    addresses = (ctypes.cast(f, ctypes.c_void_p).value for f in (function, loaded.read_row))
    return PanelProduct(layers, epilogue, *addresses)
