"""Rotary positions: each pair of channels of a query or a key is rotated by an angle that grows
with the position.

The dot product of two vectors that are rotated by angles a and b depends on a - b alone, so
attention sees distances and not places. Slow pairs reach far, and fast pairs distinguish adjacent
tokens. Models that were stretched to longer contexts slow some pairs down: `frequencies` has the
four ways.

Channel i is paired with channel i + D / 2, as in checkpoints of Hugging Face. Meta's own files pair
2i with 2i + 1; the wrong pairing agrees at position 0 only.
Papers: Su et al., "RoFormer" (2021); Peng et al., "YaRN" (2023).
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
    "yarn": ("factor", LENGTH, "attention_factor", "beta_fast", "beta_slow"),
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
    slow: float = 1.0  # yarn: pairs that turn less often within `trained` are stretched,
    fast: float = 32.0  # those that turn more often than `fast` are kept
    scale: float = 1.0  # yarn: cosines and sines are multiplied by it


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle by which one position rotates each pair, (D / 2,) float32.

    "dynamic" uses the default's. It stretches only past the trained context, where our
    configurations end, because cached keys could not be rotated again.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    stretched = plain / rope.factor
    if rope.kind in ("default", "dynamic"):
        return plain
    if rope.kind == "linear":
        return stretched
    if rope.kind == "llama3":
        turns = rope.trained / (2 * math.pi / plain)  # within the trained context
        kept = (turns - rope.low_factor) / (rope.high_factor - rope.low_factor)
    else:

        def pair(turns: float) -> float:
            """The pair, as a real number, that turns this often within the trained context."""
            length = rope.trained / (turns * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(rope.theta))

        first, last = max(math.floor(pair(rope.fast)), 0), math.ceil(pair(rope.slow))
        last = min(last, head_dim - 1)
        places = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - (places - first) / (last - first if last > first else 0.001)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def rotation(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `positions` (...,), each (..., 1, D / 2) float32.

    Always in float32: bfloat16 cannot count past 256. Computed once a pass: all layers share them.
    """
    angles = positions[..., None, None].float() * frequencies  # (..., 1, D / 2)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x (..., H, D), in float32 at least; the result has the dtype of x."""
    first, second = x.chunk(2, dim=-1)  # each (..., H, D / 2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
