"""The sampler for many requests: the tokens of stage 01's sampling.py at a fraction of the cost.

A row pays only for the options it uses. Nothing as long as the vocabulary is sorted: the tokens
that the filters keep are those whose weight is at least some limit, and the limit is found by a
search that looks at most weights once. Other stages bring a faster `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stage01_forward.generation import Logprobs, Row
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import MIN_TEMPERATURE, edit, logprobs_of

Weights = np.ndarray  # (N,), float32 or float64, the largest 1
BLOCK = 64  # weights whose sum, or whose largest, stands for all of them


def choose(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """Steps 5 to 8: the next token of each row of scores (R, V), float32 or float64, from any
    device; -1 where they are NaN or infinite. Overwrites scores."""
    on_cpu = scores.device.type == "cpu"  # NumPy's argmax uses vector instructions, PyTorch's not
    ids = torch.from_numpy(scores.numpy().argmax(-1)) if on_cpu else scores.argmax(-1)
    highest = scores.gather(1, ids[:, None])  # (R, 1); of several the first, and NaN before any
    result = torch.where(highest.isfinite()[:, 0], ids, -1).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy and result[i] >= 0]
    if drawn:
        everything = len(drawn) == len(rows)
        weights = scores if everything else scores[drawn]  # (n, V)
        temperatures = [[max(rows[i].params.temperature, MIN_TEMPERATURE)] for i in drawn]
        weights.sub_(highest if everything else highest[drawn])
        weights.div_(torch.tensor(temperatures, dtype=weights.dtype, device=weights.device)).exp_()
        for i, row_weights in zip(drawn, weights.cpu().numpy(), strict=True):
            result[i] = _draw(row_weights, rows[i].params, rows[i].dart())
    return result


@torch.inference_mode()
def sample(
    logits: Tensor,
    rows: Sequence[Row],
    eos_ids: Sequence[int] = (),
    choose: Callable[[Tensor, Sequence[Row]], list[int]] = choose,
) -> tuple[list[int], list[Logprobs | None]]:
    """The next token of each of R rows, and its log probabilities where requested.

    logits: (R, V), any floating dtype, any device; overwritten. float64 stays float64, the half
        dtypes become float32: they are too coarse to add up weights.
    eos_ids: the ids that end a text, for min_tokens.
    A token is -1 where scores are NaN or infinite.
    """
    if len(logits) != len(rows):
        raise ValueError(f"there are {len(logits)} rows of logits, but {len(rows)} rows to sample")
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    kept = dict(zip(wanted, logits[wanted].cpu(), strict=True))
    scores = logits if logits.dtype == torch.float64 else logits.float()
    for i, row in enumerate(rows):
        p = row.params
        early = len(row.output) < p.min_tokens
        if early or p.penalised or p.logit_bias or row.mask is not None:
            edit(scores[i], row, eos_ids)
    ids = choose(scores, rows)
    logprobs: list[Logprobs | None] = [None] * len(rows)
    for i, row_logits in kept.items():
        if ids[i] >= 0:
            logprobs[i] = logprobs_of(row_logits, ids[i], rows[i].params.logprobs or 0)
    return ids, logprobs


def _draw(weights: Weights, params: SamplingParams, dart: float) -> int:
    """The token that a dart hits, of those that the filters keep."""
    if limit := _limit(weights, params):
        weights = weights * (weights >= limit)
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].reshape(-1, BLOCK) @ np.ones(BLOCK, weights.dtype)
    sums = np.append(sums, weights[whole:].sum())
    block, rest = _hit(sums, dart * sums.sum(dtype=np.float64))
    return block * BLOCK + _hit(weights[block * BLOCK :][:BLOCK], rest)[0]


def _hit(widths: Weights, distance: float) -> tuple[int, float]:
    """Of widths laid end to end, the one that lies at `distance`, and how far into it. If rounding
    carries `distance` to the end or past it, the last that is not 0."""
    ends = widths.cumsum(dtype=np.float64)
    place = int(ends.searchsorted(distance, side="right"))
    if place == len(ends):
        place = int(widths.nonzero()[0][-1])
    return place, distance - (ends[place - 1] if place else 0.0)


def _limit(weights: Weights, params: SamplingParams) -> float:
    """The smallest weight that min_p, top_k and top_p keep; 0: they keep all."""
    limit = params.min_p  # times the largest weight, 1
    if 0 < params.top_k < len(weights):
        limit = max(limit, _kth_largest(weights, params.top_k))
    if params.top_p < 1:
        kept = weights[np.flatnonzero(weights >= limit)] if limit else weights
        limit = _lightest_of_nucleus(kept, params.top_p)
    return limit


def _kth_largest(weights: Weights, k: int) -> float:
    """The k-th largest weight. The k largest are in the k blocks with the largest maxima, or tie
    with weights there."""
    most = np.maximum.reduceat(weights, np.arange(0, len(weights), BLOCK))
    if k < len(most):
        weights = weights[np.flatnonzero(weights >= np.partition(most, -k)[-k])]
    return float(np.partition(weights, -k)[-k])


def _lightest_of_nucleus(weights: Weights, top_p: float) -> float:
    """The largest weight that, with all that are at least as large, makes up top_p of the sum.

    One weight of each block tells about where it is. Only the weights around there are sorted, or
    all of them if that was misleading.
    """
    total, heavier = weights.sum(dtype=np.float64), 0.0
    needed = top_p * total
    if len(weights) > BLOCK**2:
        picks = np.sort(weights[::BLOCK])
        lighter = BLOCK * picks.cumsum(dtype=np.float64)  # what lies below each of them, roughly
        places = lighter.searchsorted(np.array((0.5, 2.0)) * (total - needed))
        low, high = picks[places.clip(max=len(picks) - 1)]
        above = weights[np.flatnonzero(weights > low)]
        around = above[above <= high]
        reach = above.sum(dtype=np.float64)
        beyond = reach - around.sum(dtype=np.float64)
        if beyond < needed <= reach:
            weights, heavier = around, beyond
    ordered = np.sort(weights)[::-1]
    sums = heavier + ordered.cumsum(dtype=np.float64)
    return float(ordered[min(int(sums.searchsorted(needed)), len(ordered) - 1)])
