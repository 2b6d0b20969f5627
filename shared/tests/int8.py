"""A toy of quantization: linear layers whose weight is int8, with a scale for each output.

No stage knows it. Its products are bit for bit those of the dequantized weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8Linear(nn.Module):
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """weight (out, in) int8, scale (out,), bias (out,)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = False
        for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, tensor)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized(x.dtype), self.bias)

    def pack(self) -> Int8Linear:
        layer = Int8Linear(self.weight, self.scale, self.bias)
        layer.packed = True
        return layer

    def shard(self, rows: Tensor | None, columns: Tensor | None) -> Int8Linear:
        if columns is not None:
            return Int8Linear(self.weight[:, columns], self.scale, None)
        bias = None if self.bias is None else self.bias[rows]
        return Int8Linear(self.weight[rows], self.scale[rows], bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) -> int8 (out, in), scale (out,)."""
    scale = weight.abs().amax(-1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


class Int8:
    """Converts layers whose name contains one of `kinds`: all, if there are none."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds or ("",)

    def declares(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}

    def layer(self, name: str, plain: nn.Linear, tensors: Any) -> nn.Module:
        if not any(kind in name for kind in self.kinds):
            return plain
        return Int8Linear(*quantize(plain.weight.detach()), plain.bias)

    def embedding(self, name: str, plain: nn.Embedding, tensors: Any) -> nn.Embedding:
        return plain
