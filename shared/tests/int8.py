"""A toy of quantization: linear layers whose weight is int8, with a scale for each output.

No stage knows it. Its products are bit for bit those of the dequantized weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8Linear(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """weight (out, in) int8, scale (out,), bias (out,)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.scale, self.bias = weight, scale, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)[:, None], self.bias)

    def shard(self, rows: Tensor | None, columns: Tensor | None) -> Int8Linear:
        if columns is not None:
            return Int8Linear(self.weight[:, columns], self.scale, None)
        bias = None if self.bias is None else self.bias[rows]
        return Int8Linear(self.weight[rows], self.scale[rows], bias)


class Int8:
    """Converts layers whose name contains one of `kinds`: all, if there are none."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.stored = kinds or ("",), ()

    def layer(self, name: str, plain: nn.Linear) -> nn.Module:
        if not any(kind in name for kind in self.kinds):
            return plain
        scale = plain.weight.detach().abs().amax(-1) / 127
        weight = (plain.weight.detach() / scale[:, None]).round().to(torch.int8)
        return Int8Linear(weight, scale, plain.bias)

    def embedding(self, name: str, plain: nn.Embedding) -> nn.Embedding:
        return plain
