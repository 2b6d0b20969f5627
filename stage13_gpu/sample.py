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
    width = scores.shape[1]
    drawn = [(i, row.params, row.dart()) for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        options = [
            (i, max(p.temperature, MIN_TEMPERATURE), p.min_p, p.top_k or width, p.top_p, dart)
            for i, p, dart in drawn
        ]
        # From pinned memory, a copy does not wait for the pass.
        table = torch.tensor(options, dtype=torch.float64, pin_memory=scores.is_cuda)  # (n, 6)
        table = table.to(scores.device, non_blocking=True)
        place, limited = table[:, 0].long(), any(p.top_k or p.top_p < 1 for _, p, _ in drawn)
        ids[place] = _draw(scores[place] - best[place], table[:, 1:], limited)
    return torch.where(best[:, 0].isfinite(), ids, -1).tolist()


def _draw(scores: Tensor, numbers: Tensor, limited: bool) -> Tensor:
    """The tokens (n,) that darts hit. scores (n, V): the largest 0; numbers (n, 5): the options.
    limited: some row has a top_k or top_p, for which all are sorted."""
    temperature, min_p, top_k, top_p, dart = (column[:, None] for column in numbers.t())  # (n, 1)
    weights = (scores / temperature.to(scores.dtype)).exp().double()  # (n, V)
    weights = weights * (weights >= min_p)
    if limited:
        ordered = weights.sort(-1, descending=True).values
        limit = ordered.gather(1, top_k.clamp(max=scores.shape[1]).long() - 1)  # (n, 1)
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
