"""Quantize the layers of a model as they are loaded, or of a float model that is there already.

checkpoint = models.load("stories")
checkpoint.conversion = Quantize("int4")
shared.conversion.convert(model, Quantize("int8"))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shared.errors import UserError

from .layers import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from .rounding import quantize


@dataclass(frozen=True)
class Format:
    """How a weight is stored. group: None for a whole row. dtype: of the values of the scales.
    zero: minima are whole multiples of scales, as compressed-tensors stores them."""

    bits: int
    group: int | None = None
    minimum: bool = False
    dtype: torch.dtype = torch.float32
    zero: bool = False

    def check(self, name: str, weight: Tensor) -> None:
        """Raise UserError unless groups divide `weight` (N, K), called `name`."""
        width = weight.shape[1]
        if self.group and width % self.group:
            raise UserError(
                f"{name}.weight has {width} inputs, which do not divide into groups of "
                f"{self.group}: use --weights int8, which has no groups."
            )

    def quantized(self, name: str, weight: Tensor) -> QuantizedMatrix:
        """Raises UserError for a weight that does not fit, or is not finite."""
        self.check(name, weight)
        matrix = quantize(weight, self.bits, self.group, self.minimum, self.dtype, self.zero)
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

    stored = ()

    def __init__(self, weights: str | Format, activations: str = "int8") -> None:
        self.format = FORMATS[weights] if isinstance(weights, str) else weights
        self.activations = activations

    def layer(self, name: str, plain: nn.Linear) -> QuantizedLinear:
        weight = plain.weight.detach()
        format = self.format if name != "lm_head" else of_table(weight)
        matrix = format.quantized(name, weight)
        return QuantizedLinear(matrix, plain.bias, self.activations)

    def embedding(self, name: str, plain: nn.Embedding) -> QuantizedEmbedding:
        weight = plain.weight.detach()
        matrix = of_table(weight).quantized(name, weight)
        return QuantizedEmbedding(matrix, plain.weight.dtype, self.activations)
