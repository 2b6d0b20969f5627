"""From logits to the next token: a distribution, and a draw from it.

The operations run in a fixed order, that of vLLM's V1 sampler. The order matters, because they do
not commute:

    1. log probabilities, if a request wants them, come from the model's unmodified logits
    2. while the output is shorter than min_tokens, the ids that would end it get -inf
    3. logit_bias is added
    4. repetition_penalty (ids of the prompt and the output), then frequency_penalty and
       presence_penalty (output only)
    5. greedy rows (temperature 0) put all probability on the highest score; a tie goes to the
       lowest id
    6. temperature divides the scores
    7. min_p, then top_k, then top_p; each sees only what the one before it kept
    8. one token is drawn

A row depends only on itself, so a request gets the same token alone and in a batch. The draw is
defined to the last number: the row throws one dart, a uniform random number times the sum of what
is kept, and takes the first token, by id, at which the running sum exceeds the dart. Sums are in
float64. Every other sampler does the same, without a sort, so a seed gives the same tokens in every
engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

from .generation import NOT_FINITE, Logprobs, Row
from .params import SamplingParams

MIN_TEMPERATURE = 0.01  # smaller ones are raised to it, as in vLLM: dividing by them overflows


def sample(
    logits: Tensor, rows: Sequence[Row], eos_ids: Sequence[int] = ()
) -> tuple[list[int], list[Logprobs | None]]:
    """The next token of each row of logits (R, V), and its log probabilities where requested.

    eos_ids: the ids that end a text, for min_tokens. Raises UserError where scores are NaN or
    infinite.
    """
    ids: list[int] = []
    for row, unmodified in zip(rows, logits, strict=True):
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = unmodified.to("cpu", dtype, copy=True)
        edit(scores, row, eos_ids)
        best = int(scores.numpy().argmax())  # the lowest id of a tie; NumPy's is vectorized
        if not scores[best].isfinite():
            raise UserError(NOT_FINITE)
        if row.params.greedy:
            ids.append(best)
        else:
            ids.append(draw(distribution(scores, row.params), row.dart()))
    return ids, [
        None if row.params.logprobs is None else logprobs_of(unmodified, id, row.params.logprobs)
        for row, unmodified, id in zip(rows, logits, ids, strict=True)
    ]


def distribution(scores: Tensor, params: SamplingParams) -> Tensor:
    """Steps 6 and 7: the probabilities (V,) that follow from scores (V,), in float64."""
    temperature = max(params.temperature, MIN_TEMPERATURE)
    weights = _filtered(((scores - scores.max()) / temperature).exp(), params)
    return weights / weights.sum()


def edit(scores: Tensor, row: Row, eos_ids: Sequence[int]) -> None:
    """Steps 2 to 4, in place, on one row of scores (V,)."""
    p = row.params
    if len(row.output) < p.min_tokens:
        scores[[*p.stop_token_ids, *eos_ids]] = -math.inf
    if p.logit_bias:  # all at once: one by one, 300 of them take longer than a small model's pass
        biases = torch.tensor([*p.logit_bias.values()], dtype=torch.float64)
        scores[[*p.logit_bias]] += biases.to(scores)
    if p.repetition_penalty != 1:
        ids = torch.tensor([*{*row.prompt, *row.output}], dtype=torch.int64)
        seen = scores[ids]  # dividing a negative score would raise it
        scores[ids] = torch.where(
            seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty
        )
    if p.frequency_penalty or p.presence_penalty:
        ids, counts = torch.tensor([*row.output], dtype=torch.int64).unique(return_counts=True)
        scores[ids] -= (p.frequency_penalty * counts.double() + p.presence_penalty).to(scores)


def _filtered(weights: Tensor, params: SamplingParams) -> Tensor:
    """Step 7: weights (V,), the largest 1, with 0 for tokens that min_p, top_k and top_p drop.

    Tokens of equal weight are kept or dropped together. Returns float64.
    """
    weights = torch.where(weights >= params.min_p, weights, 0).double()
    if params.top_k <= 0 and params.top_p >= 1:
        return weights
    ordered = torch.from_numpy(np.sort(weights.numpy())).flip(0)  # 8 times as fast as PyTorch's
    if params.top_k > 0:
        limit = ordered[min(params.top_k, len(ordered)) - 1]
        weights[weights < limit], ordered[ordered < limit] = 0, 0
    if params.top_p < 1:  # keep a token if the heavier ones together weigh less than top_p of all
        heavier = ordered.cumsum(0) - ordered
        count = int((heavier < params.top_p * ordered.sum()).sum())
        weights[weights < ordered[count - 1]] = 0
    return weights


def draw(probabilities: Tensor, dart: float) -> int:
    """Step 8: an id, from probabilities (V,) and a random number from 0 to 1.

    Lay the probabilities end to end and throw a dart at them: likelier tokens are wider targets.
    """
    ends = probabilities.cumsum(0)
    hit = int(torch.searchsorted(ends, dart * ends[-1], right=True))
    return min(hit, int(probabilities.nonzero()[-1]))  # rounding must not carry it past the last


def logprobs_of(logits: Tensor, token: int, count: int) -> Logprobs:
    """Step 1, last because it needs the token: log softmax of unmodified logits (V,)."""
    scores = (logits if logits.dtype == torch.float64 else logits.float()).cpu().numpy()
    highest = float(scores.max())
    log_total = highest + math.log(np.exp(scores - highest).sum(dtype=np.float64))
    limit = float(torch.from_numpy(scores).topk(count).values[-1]) if count else math.inf
    ids = np.flatnonzero(scores >= limit)  # more than `count` if some tie
    ids = ids[np.argsort(-scores[ids], kind="stable")[:count]]  # of a tie, the lower id first
    top = [(id, float(scores[id]) - log_total) for id in ids.tolist()]
    return Logprobs(float(scores[token]) - log_total, top, highest)
