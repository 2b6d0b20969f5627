"""The least cost of a forward pass, from arithmetic: what benchmarks predict before they measure.

A pass needs operations and must read bytes. It cannot be faster than either allows:

    seconds >= max(operations / (operations per second), bytes / (bytes per second))

(Williams, Waterman and Patterson, "Roofline", 2009.) Reading weights dominates when few tokens
share them: decode. Operations dominate when many do: prefill. The machine's two rates are measured
(`measure.speeds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from .config import Config

Limits = Mapping[str, float]  # GB/s of "memory", GFLOP/s of "float32" and "bfloat16"
Lengths = Sequence[tuple[int, int]]  # tokens of prompt and answer of each request, as they arrive


@dataclass(frozen=True)
class Cost:
    """Operations (a multiply and an add are two) and bytes read from memory."""

    flops: float
    bytes: float

    def times(self, limits: Limits, dtype: torch.dtype) -> dict[str, float]:
        """Seconds that either takes alone, on a machine with these limits."""
        rate, memory = limits[str(dtype).removeprefix("torch.")], limits["memory"]
        return {"memory": self.bytes / (memory * 1e9), "compute": self.flops / (rate * 1e9)}

    def seconds(self, limits: Limits, dtype: torch.dtype) -> float:
        """The least time that such a machine needs."""
        return max(self.times(limits, dtype).values())


@cache
def block_weights(config: Config) -> int:
    """Numbers in the weight matrices of all blocks: 12 C^2 a layer in GPT-2."""
    matrices = {name: shape for name, shape in config.shapes().items() if len(shape) == 2}
    blocks = {name for name in matrices if any(part.isdigit() for part in name.split("."))}
    return sum(math.prod(matrices[name]) for name in blocks)


def forward_cost(
    config: Config,
    dtype: torch.dtype,
    new: int,
    cached: int = 0,
    sampled: int | None = None,
    rows: int = 1,
) -> Cost:
    """One pass over `rows` equal sequences: `new` tokens of each, with `cached` tokens before them.

    sampled: tokens with logits, by default one of each sequence. Each weight is read once per pass
    and used for two operations per token. Attention costs 4 H D operations for each pair of a token
    and one that it sees, and reads the cached keys and values of each row once.
    """
    size = dtype.itemsize
    head = config.vocab_size * config.n_embd
    sampled = rows if sampled is None else sampled
    seen = rows * (new * cached + new * (new + 1) / 2)
    flops = (
        2 * block_weights(config) * rows * new
        + 2 * head * sampled
        + 4 * config.n_head * config.head_dim * config.n_layer * seen
    )
    return Cost(
        flops,
        (block_weights(config) + head) * size + rows * cached * config.kv_bytes_per_token(dtype),
    )


def naive_costs(config: Config, dtype: torch.dtype, lengths: Lengths) -> list[Cost]:
    """The costs of passes that compute everything again, one request after another."""
    return [
        forward_cost(config, dtype, prompt + done)
        for prompt, answer in lengths
        for done in range(answer)
    ]


def static_costs(config: Config, dtype: torch.dtype, lengths: Lengths, size: int = 1) -> list[Cost]:
    """The costs of the passes of static batches of `size` requests: every row is as wide as the
    longest prompt of its batch, and runs to the batch's last token."""
    costs = []
    for start in range(0, len(lengths), size):
        batch = lengths[start : start + size]
        width, rows = max(prompt for prompt, _ in batch), len(batch)
        costs.append(forward_cost(config, dtype, width, rows=rows))
        for done in range(1, max(answer for _, answer in batch)):
            alive = sum(answer > done for _, answer in batch)
            costs.append(forward_cost(config, dtype, 1, width + done - 1, alive, rows))
    return costs
