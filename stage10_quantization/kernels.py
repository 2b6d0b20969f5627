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
from stage09_kernels.operations import PANEL, SILU_MUL, Linear
from stage09_kernels.program import LINE, interleave, side_by_side

from .matrix import QuantizedMatrix

FOLDER = ROOT / "stage10_quantization"
NAIVE, FAST = FOLDER / "naive.c", FOLDER / "fast" / "linear.c"
STEP = 8  # inputs to whose multiple a group is padded
GROUP_BYTES = 12  # struct group
AT_A_TIME = 2**18  # codes that are laid out


class Quantized(ctypes.Structure):
    """`struct quantized` of quantized.h."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_bytes", "code_bytes", "count", "group", "bits")),
        *((name, ctypes.c_int64) for name in ("offset", "scale_bytes", "minimum", "floats")),
    ]


class Panels:
    """The rows of matrices (N, K) of one format in panels of 64: (panels, groups, bytes), uint8.

    numbers: (panels * 64,) for each row its number in the matrices, one after the other, from 1 on;
        0 for a row of padding.
    """

    def __init__(self, matrices: Sequence[QuantizedMatrix], numbers: Tensor) -> None:
        parts = [m.rows(torch.arange(m.shape[0])) for m in matrices]
        minima = [m.minimum for m in parts if m.minimum is not None]
        whole, sides = torch.cat([m.codes for m in parts]), [torch.cat([m.scale for m in parts])]
        sides += [torch.cat(minima)] if minima else []
        self.inputs, self.count = whole.shape[1], sides[0].shape[1]
        self.group, self.bits, self.minimum = parts[0].group, parts[0].bits, len(minima) > 0
        self.offset = 0 if self.minimum else 1 << (self.bits - 1)
        exact = all(torch.equal(side.half().float(), side) for side in sides)
        self.scale_dtype = torch.float16 if exact else torch.float32
        padded, panels = self.group + -self.group % STEP, len(numbers) // PANEL
        size = len(sides) * self.scale_dtype.itemsize + padded * self.bits // 8
        self.bytes = library.blank((panels, self.count, PANEL * size), torch.uint8)
        step = max(1, AT_A_TIME // (PANEL * self.inputs))  # no more than those exist twice
        for start in range(0, panels, step):
            rows = numbers[start * PANEL : (start + step) * PANEL]
            exists, index = rows.gt(0)[:, None], rows.sub(1).clamp(min=0)
            scales = torch.stack([side[index] for side in sides]) * exists
            codes, stored = whole[index] * exists, scales.to(self.scale_dtype)
            self.bytes[start : start + step] = self._laid_out(codes, stored)

    def _laid_out(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes (64 P, K) and scales (1 or 2, 64 P, G) -> (P, G, bytes)."""
        stored = codes.view(torch.uint8) + self.offset  # wraps around
        stored = stored.unflatten(1, (-1, self.group))
        if self.group % STEP:
            stored = nn.functional.pad(stored, (0, -self.group % STEP))
        if self.bits == 4:
            low, high = stored.unflatten(2, (-1, 2, 4)).unbind(3)  # (64 P, G, steps / 2, 4)
            stored = (low | high << 4).flatten(2)
        steps = stored.contiguous().view(torch.int32).unflatten(0, (-1, PANEL))  # (P, 64, G, steps)
        turned = steps.permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.uint8)
        sides = scales.unflatten(1, (-1, PANEL)).permute(1, 3, 0, 2)  # (P, G, 1 or 2, 64)
        return torch.cat((sides.contiguous().flatten(2).view(torch.uint8), turned), 2)

    def matrix(self, rows: Tensor) -> QuantizedMatrix:
        """The rows `rows` (R,) of the matrix: a copy."""
        panel, place = rows // PANEL, rows % PANEL
        width = PANEL * self.scale_dtype.itemsize
        count = 2 if self.minimum else 1
        sides = self.bytes[..., : count * width].view(self.scale_dtype).unflatten(2, (count, PANEL))
        scale, *minima = sides[panel, :, :, place].float().unbind(2)  # (R, G)
        codes = self.bytes[..., count * width :].unflatten(2, (-1, PANEL, 4))
        codes = codes[panel, :, :, place]  # (R, G, steps, 4)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 3)
        codes = codes.flatten(2)[..., : self.group].flatten(1)
        signed = (codes.int() - self.offset).to(torch.int8)
        return QuantizedMatrix(signed, scale, minima[0] if minima else None, self.bits)


class PanelMatrix:
    """The rows `columns` (N,) of a matrix in panels: a QuantizedMatrix that is put together again
    whenever it is read."""

    def __init__(self, panels: Panels, columns: Tensor) -> None:
        self.panels, self.columns = panels, columns
        self.bits, self.group = panels.bits, panels.group

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.columns), self.panels.inputs

    def rows(self, index: Tensor) -> QuantizedMatrix:
        return self.panels.matrix(self.columns[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.panels.matrix(self.columns), name)


class PanelProduct:
    """`stage09_kernels.program.Product` of QuantizedLinears side by side.

    function, read_row: the addresses of the C functions.
    """

    def __init__(
        self, layers: Sequence[Any], epilogue: int, function: int | None, read_row: int | None
    ) -> None:
        self.read_row = read_row
        self.matrices = [layer.matrix for layer in layers]
        counts = [layer.out_features for layer in layers]

        def side(parts: Sequence[Tensor]) -> Tensor:
            return interleave(*parts) if epilogue == SILU_MUL else torch.cat(list(parts))

        numbers = side(torch.arange(1, sum(counts) + 1).split(counts))
        numbers = nn.functional.pad(numbers, (0, -len(numbers) % PANEL))
        self.places = numbers.argsort(stable=True)[numbers.eq(0).sum() :].split(counts)
        self.panels = p = Panels(self.matrices, numbers)
        self.bytes = p.bytes.nbytes
        self.bias = side_by_side(layers)
        if self.bias is not None:
            bias = side(self.bias.split(counts))
            self.bias = nn.functional.pad(bias, (0, -len(bias) % PANEL))
        floats = layers[0].activations == "float"
        x_bytes = p.count * (p.group + -p.group % STEP) * (4 if floats else 1)
        code_bytes = x_bytes + -x_bytes % LINE + LINE  # the last vector may write one line more
        group_bytes = p.count * GROUP_BYTES
        self.scratch = code_bytes + group_bytes + -group_bytes % LINE
        self.format = Quantized(
            panels=p.bytes.data_ptr(),
            row_bytes=self.scratch,
            code_bytes=code_bytes,
            count=p.count,
            group=p.group,
            bits=p.bits,
            offset=p.offset,
            scale_bytes=p.scale_dtype.itemsize,
            minimum=p.minimum,
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
        matrix = getattr(table, "matrix", None)
        here = isinstance(matrix, PanelMatrix) and matrix.panels is self.panels
        if len(self.places) == 1 and (here or any(matrix is one for one in self.matrices)):
            return self.read_row, ctypes.addressof(self.format)
        return None

    def release(self, model: nn.Module) -> None:
        """The layers of `model`, and a table that shares a matrix with one, drop it: they read the
        panels."""
        for matrix, places in zip(self.matrices, self.places, strict=True):
            module: Any
            for module in model.modules():
                if getattr(module, "matrix", None) is matrix:
                    module.matrix = PanelMatrix(self.panels, places)
        self.matrices = []


def product_of(
    layers: Sequence[Any], epilogue: int, cache: KernelCache, dtype: torch.dtype
) -> PanelProduct | None:
    """The product of `layers` side by side for kernels with this cache and with operands of
    `dtype`. None if they differ in format, or read their input in float64."""
    rows = [layer.matrix.rows(torch.tensor([0])) for layer in layers]
    formats = {
        (row.group, row.bits, row.minimum is None, layer.activations)
        for row, layer in zip(rows, layers, strict=True)
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
