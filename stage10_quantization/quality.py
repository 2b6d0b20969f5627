"""What quantization costs in quality, by llama.cpp's protocol; `losses.py` makes the table.

A text in disjoint windows of 512 tokens, the tail dropped, and only the second half of each scored.
Mean KL(float || quantized) of the next token; how often the likeliest token is the same; nats a
token above the float model, with the interval of resampled windows (bootstrap). Both models run in
the kernels, as a server runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared.errors import UserError
from stage05_paged.blocks import BlockPool
from stage09_kernels.engine import make

WINDOW = 512
BLOCKS = WINDOW // 16  # of a cache
RESAMPLED = 2000  # times, for an interval of 95 %


@dataclass(frozen=True)
class Divergence:
    """Of the scored tokens: mean KL in nats, share of the same likeliest tokens, and nats a token
    above the float model, with their interval of 95 %."""

    tokens: int
    kl: float
    top_1: float
    difference: float
    low: float
    high: float


def engine_of(model: Any, **options: Any) -> Any:
    """The kernels' engine. options: dtype=torch.int8 for keys and values in int8."""
    return make(model, pool=BlockPool(BLOCKS), prefix_caching=False, **options)


@torch.inference_mode()
def logprobs(engine: Any, ids: Sequence[int], first: int) -> Tensor:
    """Log probabilities (T - first, V) in float64 behind each of `ids` (T,) from `first` on."""
    share = list(range(BLOCKS)), 0, len(ids)
    logits: Tensor = engine.runner.run(ids, [share], range(first, len(ids)))
    return logits.float().log_softmax(-1).double()


def divergence(reference: Any, engine: Any, ids: Sequence[int], window: int = WINDOW) -> Divergence:
    """Of a text's token ids, by two engines. Raises UserError for less than a window."""
    if len(ids) < window:
        raise UserError(
            f"The text has {len(ids)} tokens, but a window has {window}: give a longer text."
        )
    starts, middle = range(0, len(ids) - window + 1, window), window // 2
    kl, lost, same = 0.0, [], 0
    for start in tqdm(starts, unit="window", desc="KL", disable=None):
        part = ids[start : start + window]
        p, q = (logprobs(kind, part[:-1], middle) for kind in (reference, engine))
        kl += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = torch.tensor(part[middle + 1 :])[:, None]
        lost.append((p - q).gather(1, following).mean().item())
    tokens, losses = len(lost) * (window - 1 - middle), torch.tensor(lost, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(lost), (RESAMPLED, len(lost)), generator=generator)
    ends = losses[picks].mean(1).quantile(torch.tensor([0.025, 0.975]).double())
    return Divergence(tokens, kl / tokens, same / tokens, losses.mean().item(), *ends.tolist())
