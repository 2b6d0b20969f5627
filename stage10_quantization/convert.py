"""Quantize the layers of a model as they are loaded, or of a float model that is there already; or
take those that its files have.

checkpoint = models.load("stories")
checkpoint.conversion = Quantize("int4")
shared.conversion.convert(model, Quantize("int8"))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.checkpoint import Checkpoint
from shared.config import Config
from shared.errors import UserError

from . import numpy_quant
from .layers import QuantizedEmbedding, QuantizedLinear
from .matrix import PROJECTIONS, QuantizedMatrix

AT_A_TIME = 2**20  # weights: what is made on the way takes some 20 MB


@dataclass(frozen=True)
class Format:
    """How a weight is stored. group: None for a whole row. dtype: of the values of the scales.
    zero: minima are whole multiples of scales, as compressed-tensors stores them."""

    bits: int
    group: int | None = None
    minimum: bool = False
    dtype: torch.dtype = torch.float32
    zero: bool = False

    def nearest(self, weight: Tensor) -> QuantizedMatrix:
        """`weight` (N, K) by the page; a group that cannot be quantized has scale NaN."""
        kind = numpy_quant.symmetric
        if self.minimum:
            kind = numpy_quant.with_zero if self.zero else numpy_quant.asymmetric
        w = weight.detach().float().cpu().contiguous().numpy()
        dtype = str(self.dtype).removeprefix("torch.")
        pieces = np.array_split(w, max(1, w.size // AT_A_TIME))
        with np.errstate(all="ignore"):
            parts = [kind(piece, self.bits, self.group or w.shape[1], dtype) for piece in pieces]
        whole = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
        return QuantizedMatrix(*(part.to(weight.device) for part in whole), bits=self.bits)

    def quantized(self, name: str, weight: Tensor) -> QuantizedMatrix:
        """The nearest codes for `weight` (N, K), called `name`. Raises UserError if groups do not
        divide it, or if it is not finite."""
        width = weight.shape[1]
        if self.group and width % self.group:
            raise UserError(
                f"{name}.weight has {width} inputs, which do not divide into groups of "
                f"{self.group}: use --weights int8, which has no groups."
            )
        matrix = self.nearest(weight)
        if (rows := matrix.scale.isnan().any(1)).any():
            raise UserError(
                f"{name}.weight has NaN, infinity or numbers too large for a scale in row "
                f"{int(rows.nonzero()[0])}: it cannot be quantized, so check the checkpoint, or "
                "use --weights float32."
            )
        return matrix


GROUP = 32
INT8 = Format(8)
INT8_GROUPS = Format(8, GROUP, dtype=torch.float16)  # llama.cpp's q8_0
INT4 = Format(4, GROUP, minimum=True, dtype=torch.float16)
INT4_ZERO = replace(INT4, zero=True)
FORMATS = {"int8": INT8, "int8-g32": INT8_GROUPS, "int4": INT4}  # of the layers


def of_table(weight: Tensor) -> Format:
    """The format of the table of tokens and of the head `weight` (V, C), whatever that of the
    layers: 8 bits, in groups where they divide the width. With a scale for each token, the rounding
    of the head's input costs more than that of all layers."""
    return INT8 if weight.shape[1] % GROUP else INT8_GROUPS


class Quantize:
    """A shared.conversion.Conversion: the nearest codes for each weight.

    weights: a key of FORMATS, or the format itself. activations: see QuantizedLinear.
    """

    stored: Collection[str] = ()

    def __init__(self, weights: str | Format, activations: str = "int8") -> None:
        self.format = FORMATS[weights] if isinstance(weights, str) else weights
        self.activations = activations

    def matrix(self, name: str, plain: nn.Linear | nn.Embedding) -> QuantizedMatrix | None:
        """What takes the place of the weight of `plain`; None: it stays."""
        table = name == "lm_head" or isinstance(plain, nn.Embedding)
        format = of_table(plain.weight) if table else self.format
        return format.quantized(name, plain.weight)

    def layer(self, name: str, plain: nn.Linear) -> Any:
        matrix = self.matrix(name, plain)
        return plain if matrix is None else QuantizedLinear(matrix, plain.bias, self.activations)

    def embedding(self, name: str, plain: nn.Embedding) -> Any:
        if (matrix := self.matrix(name, plain)) is None:
            return plain
        return QuantizedEmbedding(matrix, plain.weight.dtype, self.activations)


class Stored(Quantize):
    """A Conversion to `matrices` of whole numbers, by name, that the files of a model have."""

    def __init__(self, matrices: dict[str, QuantizedMatrix], activations: str) -> None:
        self.matrices, self.activations = matrices, activations
        self.stored = matrices.keys()

    def matrix(self, name: str, plain: nn.Linear | nn.Embedding) -> QuantizedMatrix | None:
        return self.matrices.get(f"{name}.weight")


def opened(
    config: Config, values: Mapping[str, Tensor | QuantizedMatrix], folder: Path, activations: str
) -> Checkpoint:
    """The checkpoint with `values` for all of config.shapes: floats in that shape, or matrices
    (out, in), GPT-2's projections too."""
    matrices = {key: value for key, value in values.items() if isinstance(value, QuantizedMatrix)}
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return Checkpoint(config, tensors, folder, conversion=Stored(matrices, activations))


def change(checkpoint: Checkpoint, weights: str) -> None:
    """Change the checkpoint so that its model has `weights`, of --weights, whatever its own are.
    Whole numbers are replaced by what they stand for, and rounded anew if `weights` are of
    others."""
    if isinstance(stored := checkpoint.conversion, Stored):
        checkpoint.conversion = None
        while stored.matrices:
            name, matrix = stored.matrices.popitem()
            weight = matrix.dequantized()
            checkpoint.tensors[name] = weight.t() if name.endswith(PROJECTIONS) else weight
    if weights in FORMATS:
        checkpoint.conversion = Quantize(weights)
