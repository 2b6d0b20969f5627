"""Prefill and decode: as products of matrices, and under the roof."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from shared import charts
from shared.checkpoint import PRESETS
from shared.kit import ROUND
from shared.roofline import forward_cost

from . import ORANGE, TEAL, Look, box, canvas, cells, words

TOKENS = 8  # of the prompt in the picture


def phases() -> Figure:
    """The same weights, met by many rows and by one: what is read, and what is computed."""
    figure, axes = canvas("A weight is read once a step, and used once for each token", 80, 36)
    _phase(axes, 1, TOKENS, "prefill: matrix by matrix")
    _phase(axes, 43, 1, "decode: vector by matrix")
    words(axes, 1, 35, "Bars to scale: decode reads as much, and computes an eighth.", ha="left")
    return figure


def _phase(axes: Any, left: float, rows: int, title: str) -> None:
    looks: dict[str, Look] = {"x": (ORANGE, ""), "w": (TEAL, "")}
    words(axes, left, 1, title, ha="left", weight="bold")
    grid = partial(cells, axes, look=looks.__getitem__, size=(1.6, 1.6))
    grid(left, 4 + 0.8 * (TOKENS - rows), ["xxxxxx"] * rows)
    words(axes, left + 11.2, 10.4, "x", weight="bold")
    grid(left + 12.8, 5.6, ["w" * 6] * 6)
    words(axes, left + 24, 10.4, "=", weight="bold")
    grid(left + 25.6, 4 + 0.8 * (TOKENS - rows), ["xxxxxx"] * rows)
    tokens = f"{rows} tokens" if rows > 1 else "1 token"
    words(axes, left + 4.8, 18.6, tokens)
    words(axes, left + 17.6, 18.6, "weights")
    words(axes, left + 30.4, 18.6, tokens)
    words(axes, left, 22, "bytes read", ha="left")
    box(axes, left, 23.4, 36, 2.6, fill=TEAL)
    words(axes, left, 28.2, "operations", ha="left")
    box(axes, left, 29.6, 36 * rows / TOKENS, 2.6, fill=ORANGE)


def roofline() -> Figure:
    """Steps of GPT-2 124M at what the machine of round numbers allows them."""
    peak, memory = ROUND["float32"], ROUND["memory"]
    cost = partial(forward_cost, PRESETS["gpt2"], torch.float32)
    costs = [cost(tokens) for tokens in (1, 2, 4, 8, 16, 512)]
    steps = [cost.flops / cost.bytes for cost in costs]
    return charts.lines(
        "Decode waits for memory, prefill for arithmetic",
        "operations per byte read, of steps with 1 (decode), 2, 4, 8, 16 and 512 tokens", "GFLOP/s",
        [round(intensity, 1) for intensity in steps],
        {
            "what the machine allows": [min(peak, memory * intensity) for intensity in steps],
            f"arithmetic: {peak:.0f} GFLOP/s": [peak] * len(steps),
        },
        dashed=[f"arithmetic: {peak:.0f} GFLOP/s"], log_x=True, log_y=True,
    )  # fmt: skip


DRAW = (phases, roofline)
