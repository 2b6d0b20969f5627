"""The parts of a model that a runner calls: products side by side, and what lies between two."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fused
from .cache import power
from .launch import launch

GATES = 1024  # columns that one program of `fused.silu_mul` takes


class Products:
    """Linear layers that read the same input, as one product. Their weights become views of one
    tensor, so the model keeps its layers and no second copy. Layers in a format of their own
    compute each for itself."""

    def __init__(self, *layers: Any) -> None:
        self.layers = layers
        self.bias: Tensor | None = None
        self.weight: Tensor | None = None
        if all(type(layer) is nn.Linear for layer in layers):
            self.weight = layers[0].weight
            self.bias = layers[0].bias
            if len(layers) > 1:
                self._join()

    def _join(self) -> None:
        counts = [layer.out_features for layer in self.layers]
        self.weight = torch.cat([layer.weight for layer in self.layers])
        for layer, weight in zip(self.layers, self.weight.split(counts), strict=True):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        if any(layer.bias is not None for layer in self.layers):
            self.bias = torch.cat(
                [
                    self.weight.new_zeros(count) if layer.bias is None else layer.bias
                    for layer, count in zip(self.layers, counts, strict=True)
                ]
            )

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> (N, the outputs of all layers, side by side)."""
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


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
