"""The sampler for many requests: the tokens of stage 01's sampling.py at a fraction of the cost.

A row pays only for the options it uses. The tokens that the filters keep are those whose weight is
at least some limit, which top_k and top_p find without a sort. Other stages bring a faster
`choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stage01_forward.generation import Logprobs, Row
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import MIN_TEMPERATURE, edit, logprobs_of

Weights = np.ndarray  # (N,), float32 or float64, the largest 1
BLOCK = 64  # weights whose sum stands for all of them
DIGIT = 12  # bits of a weight that are found at a time


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
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    kept = dict(zip(wanted, logits[wanted].cpu(), strict=True)) if wanted else {}
    scores = logits if logits.dtype == torch.float64 else logits.float()
    for i, row in enumerate(rows):
        p = row.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        if penalised or p.logit_bias or len(row.output) < p.min_tokens:
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
    sums = _block_sums(weights)
    block, rest = _hit(sums, dart * sums.sum(dtype=np.float64), "right")
    return block * BLOCK + _hit(weights[block * BLOCK :][:BLOCK], rest, "right")[0]


def _limit(weights: Weights, params: SamplingParams) -> float:
    """The smallest weight that min_p, top_k and top_p keep; 0: they keep all."""
    limit = params.min_p  # times the largest weight, 1
    if 0 < params.top_k < len(weights):
        limit = max(limit, float(np.partition(weights, -params.top_k)[-params.top_k]))
    if params.top_p < 1:
        kept = weights[np.flatnonzero(weights >= limit)] if limit else weights
        limit = _lightest_of_nucleus(kept, params.top_p)
    return limit


def _lightest_of_nucleus(weights: Weights, top_p: float) -> float:
    """The largest weight that, with all that are at least as large, makes up top_p of the sum.

    The weight is found DIGIT bits at a time, the highest first, because numbers of one sign sort
    like their bits. All weights below (1 - top_p) of the mean make up less than 1 - top_p of the
    sum, so the nucleus ends before them, and they are left out.
    """
    total = _block_sums(weights).sum(dtype=np.float64)
    missing = top_p * total
    weights = weights[np.flatnonzero(weights >= (1 - top_p) * total / len(weights))]
    for shift in range(8 * weights.itemsize - DIGIT, -DIGIT, -DIGIT):
        digits = weights.view(f"i{weights.itemsize}") >> max(shift, 0) & 2**DIGIT - 1
        sums = np.bincount(digits, weights)[::-1]  # the largest digit first
        place, missing = _hit(sums, missing, "left")
        weights = weights[digits == len(sums) - 1 - place]
    return float(weights[0])


def _block_sums(widths: Weights) -> Weights:
    whole = len(widths) // BLOCK * BLOCK
    sums = widths[:whole].reshape(-1, BLOCK) @ np.ones(BLOCK, widths.dtype)
    return np.append(sums, widths[whole:].sum())


def _hit(widths: Weights, distance: float, side: Literal["left", "right"]) -> tuple[int, float]:
    """Of widths laid end to end, the one that lies at `distance`, and how far into it; where two
    meet, the one on that side. If rounding carries `distance` to the end or past it, the last that
    is not 0."""
    ends = widths.cumsum(dtype=np.float64)
    place = int(ends.searchsorted(distance, side=side))
    if place == len(ends):
        place = int(widths.nonzero()[0][-1])
    return place, distance - (ends[place - 1] if place else 0.0)
