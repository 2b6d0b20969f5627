"""Rotary positions: each pair of channels of a query or a key is rotated by an angle that grows
with the position.

The dot product of two vectors that are rotated by angles a and b depends on a - b alone, so
attention sees distances and not places. Slow pairs reach far, and fast pairs distinguish adjacent
tokens. Models that were stretched to longer contexts slow some pairs down: `frequencies` has three
ways.

Channel i is paired with channel i + D / 2, as in checkpoints of Hugging Face. Meta's own files pair
2i with 2i + 1; the wrong pairing agrees at position 0 only.
Paper: Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = "original_max_position_embeddings"
KINDS = {  # rope_type, and the options of each
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", LENGTH),
    "llama3": ("factor", LENGTH, "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class Rope:
    """Options of config.json. `trained` is the context before it was stretched by `factor`."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    trained: int = 0
    low_factor: float = 1.0  # llama3: wavelengths over trained / low_factor are stretched,
    high_factor: float = 4.0  # those below trained / high_factor are kept


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle by which one position rotates each pair, (D / 2,) float32.

    "dynamic" uses the default's. It stretches only past the trained context, where our
    configurations end, because cached keys could not be rotated again.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind in ("default", "dynamic"):
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.trained / (2 * math.pi / plain)  # within the trained context
    kept = (turns - rope.low_factor) / (rope.high_factor - rope.low_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` (...,), each (..., 1, D / 2) float32.

    Always in float32: bfloat16 cannot count past 256. Computed once a pass: all layers share them.
    """
    angles = positions[..., None, None].float() * frequencies  # (..., 1, D / 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x (..., H, D), in float32 at least; the result has the dtype of x."""
    first, second = x.chunk(2, dim=-1)  # each (..., H, D / 2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
