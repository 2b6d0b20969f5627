"""Matrices of whole numbers laid out for the kernels, and their place in stage 09's list.

`quantized.h` describes the layout, `naive.c` and `fast/linear.c` compute with it: the same bits as
`layers.multiply`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.paths import ROOT
from stage09_kernels import library
from stage09_kernels.cache import NAIVE, SIZES, KernelCache
from stage09_kernels.operations import PANEL, SILU_MUL, Linear
from stage09_kernels.program import interleave

from .layers import QuantizedMatrix

FOLDER = ROOT / "stage10_quantization"
STEP = 8  # inputs to whose multiple a group is padded
SLACK = 64  # bytes behind the codes of a row of x, which the last vector may overwrite


class Quantized(ctypes.Structure):
    """`struct quantized` of quantized.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "codes", "groups")),
        *((name, ctypes.c_int64) for name in ("stride", "count", "group", "bits", "offset")),
        *((name, ctypes.c_int64) for name in ("scale_bytes", "minimum", "floats")),
    ]


class Panels:
    """A matrix (N, K) in panels of 64 rows: (panels, groups, bytes), uint8."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self.rows, self.group, self.bits = len(matrix.codes), matrix.group, matrix.bits
        self.stored_bits = 4 if matrix.bits == 4 else 8
        self.minimum = matrix.minimum is not None
        self.offset = 0 if self.minimum else 1 << (self.stored_bits - 1)
        scales = [matrix.scale] + ([matrix.minimum] if matrix.minimum is not None else [])
        narrow = all(torch.equal(x.half().float(), x) for x in scales)
        self.scale_dtype = torch.float16 if narrow else torch.float32
        self.bytes = library.large_pages(self._bytes(matrix.codes, scales))

    def _bytes(self, codes: Tensor, scales: Sequence[Tensor]) -> Tensor:
        missing = -len(codes) % PANEL
        stored = (codes.int() + self.offset).to(torch.uint8).unflatten(1, (-1, self.group))
        stored = nn.functional.pad(stored, (0, -self.group % STEP, 0, 0, 0, missing))
        if self.stored_bits == 4:
            low, high = stored.unflatten(2, (-1, 2, 4)).unbind(3)  # (N, G, steps / 2, 4)
            stored = (low | high << 4).flatten(2)
        stored = stored.unflatten(0, (-1, PANEL)).unflatten(3, (-1, 4))  # (P, 64, G, steps, 4)
        parts = [stored.permute(0, 2, 3, 1, 4).flatten(2)]
        for scale in reversed(scales):
            padded = nn.functional.pad(scale.to(self.scale_dtype), (0, 0, 0, missing))
            turned = padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()  # (P, G, 64)
            parts.insert(0, turned.view(torch.uint8))
        return torch.cat(parts, 2)

    def matrix(self, rows: Tensor | None = None) -> QuantizedMatrix:
        """The rows `rows` (R,) of the matrix, or all: a copy."""
        rows = torch.arange(self.rows) if rows is None else rows
        panel, place = rows // PANEL, rows % PANEL
        width = PANEL * self.scale_dtype.itemsize
        count = 2 if self.minimum else 1
        scales = [
            self.bytes[..., i * width : (i + 1) * width].view(self.scale_dtype)[panel, :, place]
            for i in range(count)
        ]  # (R, G)
        codes = self.bytes[..., count * width :].unflatten(2, (-1, PANEL, 4))
        codes = codes[panel, :, :, place]  # (R, G, steps, 4)
        if self.stored_bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 3)
        codes = codes.flatten(2)[..., : self.group].flatten(1)
        signed = (codes.int() - self.offset).to(torch.int8)
        return QuantizedMatrix(signed, *(x.float() for x in scales), bits=self.bits)


class PanelProduct:
    """`stage09_kernels.program.Product` of quantized layers side by side.

    layers: with `matrix`, `activations` and `bias`. Their matrices must have one group, as many
    bits, and all minimums or none.
    """

    def __init__(
        self, layers: Sequence[Any], epilogue: int, cache: KernelCache, dtype: torch.dtype
    ) -> None:
        matrices = [layer.matrix for layer in layers]
        gated = epilogue == SILU_MUL
        join = _interleaved if gated else torch.cat
        minimums = [m.minimum for m in matrices if m.minimum is not None]
        self.panels = Panels(
            QuantizedMatrix(
                join([m.codes for m in matrices]),
                join([m.scale for m in matrices]),
                join(minimums) if minimums else None,
                matrices[0].bits,
            )
        )
        self.bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [_bias(layer) for layer in layers]
            bias = join(biases)
            self.bias = nn.functional.pad(bias, (0, -len(bias) % PANEL))
        p = self.panels
        self.format = Quantized(
            panels=p.bytes.data_ptr(),
            count=p.bytes.shape[1],
            group=p.group,
            bits=p.stored_bits,
            offset=p.offset,
            scale_bytes=p.scale_dtype.itemsize,
            minimum=p.minimum,
            floats=layers[0].activations == "float",
        )
        outputs = len(matrices[0].codes) if gated else sum(len(m.codes) for m in matrices)
        self.linear = Linear(
            inputs=matrices[0].codes.shape[1],
            outputs=outputs,
            epilogue=epilogue,
            product=_function(cache, dtype),
            format=ctypes.addressof(self.format),
        )
        self.layers = list(layers)

    def make_room(self, rows: int) -> None:
        """Memory for `rows` rows of x: codes, or numbers, and what belongs to a group."""
        f = self.format
        f.stride = -(-(f.count * (f.group + -f.group % STEP)) // SLACK) * SLACK + SLACK
        size = 4 if f.floats else 1
        self.codes = torch.empty(rows, f.stride * size, dtype=torch.uint8)
        self.groups = torch.empty(rows, f.count, 3, dtype=torch.int32)
        f.codes, f.groups = self.codes.data_ptr(), self.groups.data_ptr()


def _interleaved(pair: Sequence[Tensor]) -> Tensor:
    return interleave(*pair)


def _bias(layer: Any) -> Tensor:
    bias: Tensor | None = layer.bias
    return torch.zeros(layer.out_features) if bias is None else bias.detach()


def _function(cache: KernelCache, dtype: torch.dtype) -> int | None:
    """The address of the C function for the kernels of `cache` and operands of `dtype`."""
    naive = cache.source == NAIVE
    source = FOLDER / "naive.c" if naive else FOLDER / "fast" / "linear.c"
    loaded = cache.library(dtype, source)
    return ctypes.cast(loaded.product if naive else loaded.add_product, ctypes.c_void_p).value
