"""The next tokens of a step, chosen on the GPU: stage 01's `choose`, for all rows at once.

Stage 04's takes each row's weights to the processor, 200 KB for GPT-2's vocabulary. Here the ids
alone leave the GPU, which is the one time in a step that Python waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stage01_forward.generation import Row
from stage01_forward.sampling import MIN_TEMPERATURE
from stage04_continuous import engine


def choose(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row of scores (R, V), on any device; -1 where they are NaN or
    infinite."""
    ids = scores.argmax(-1)  # (R,); of a tie the first, and NaN before any number
    best = scores.gather(1, ids[:, None])  # (R, 1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        options = [_options(rows[i]) for i in drawn]
        pinned = scores.is_cuda  # so copies do not wait for the pass
        numbers = torch.tensor(options, dtype=torch.float64, pin_memory=pinned)  # (n, 5)
        numbers = numbers.to(scores.device, non_blocking=True)
        place = torch.tensor(drawn, pin_memory=pinned).to(scores.device, non_blocking=True)
        ids[place] = _draw(scores[place] - best[place], numbers, options)
    return torch.where(best[:, 0].isfinite(), ids, -1).tolist()


def _options(row: Row) -> tuple[float, float, float, float, float]:
    p = row.params
    return max(p.temperature, MIN_TEMPERATURE), p.min_p, p.top_k, p.top_p, row.dart()


def _draw(scores: Tensor, numbers: Tensor, options: Sequence[Sequence[float]]) -> Tensor:
    """The tokens (n,) that darts hit. scores (n, V): the largest 0; numbers (n, 5): the options."""
    temperature, min_p, top_k, top_p, dart = (column[:, None] for column in numbers.t())  # (n, 1)
    weights = (scores / temperature.to(scores.dtype)).exp().double()  # (n, V)
    weights = weights * (weights >= min_p)
    _, _, most, nuclei, _ = zip(*options, strict=True)
    if any(0 < k < scores.shape[1] for k in most) or min(nuclei) < 1:
        ordered = weights.sort(-1, descending=True).values
        last = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1])
        limit = ordered.gather(1, last.long() - 1)  # (n, 1): the k-th largest weight
        ordered = ordered * (ordered >= limit)
        heavier = ordered.cumsum(-1) - ordered
        count = (heavier < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        nucleus = ordered.gather(1, count.clamp(min=1) - 1)
        weights = weights * (weights >= torch.where(top_p < 1, nucleus, limit))
    ends = weights.cumsum(-1)
    hit = torch.searchsorted(ends, dart * ends[:, -1:], right=True)  # (n, 1)
    ids = torch.arange(scores.shape[1], device=scores.device)
    return torch.minimum(hit[:, 0], (ids * (weights > 0)).amax(-1))  # not past the last


sample_tokens = partial(engine.sample_tokens, choose=choose)
