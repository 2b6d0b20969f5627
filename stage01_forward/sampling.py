"""From logits to the next token: a distribution, and a draw from it.

The operations run in a fixed order, that of vLLM's V1 sampler. The order matters, because they do
not commute:

    1. log probabilities, if a request wants them, come from the model's unmodified logits
    2. min_tokens: the ids that would end the text get -inf while the output is too short
    3. logit_bias is added
    4. repetition_penalty (ids of the prompt and the output), then frequency_penalty and
       presence_penalty (output only)
    5. greedy rows (temperature 0) put all probability on the highest score; a tie goes to the
       lowest id
    6. temperature divides the scores
    7. min_p, then top_k, then top_p; each sees only what the one before it kept
    8. one token is drawn

Each row depends only on its own logits, options, history and generator, so a request gets the same
token alone and in a batch. The engines use fast_sampling.py: the same distribution without a sort,
and, except with top_p, the same tokens from the same generators. With top_p it throws darts at all
tokens until one hits the nucleus. To throw a single dart it would have to find the nucleus first,
which takes a sort and at least twice the time of the whole draw.

Left out on purpose: stop strings (they need text), beam search, grammars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

from .generation import NOT_FINITE, Logprobs
from .params import SamplingParams

Ids = Sequence[int] | np.ndarray
History = tuple[Ids, Ids]  # ids of the prompt, ids of the output so far

MIN_TEMPERATURE = 0.01  # smaller ones are raised to it, as in vLLM: dividing by them overflows


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    generators: Sequence[torch.Generator | None],
    eos_ids: Sequence[int] = (),
) -> tuple[Tensor, list[Logprobs | None]]:
    """The next token of each row of logits (R, V), and its log probabilities where requested.

    histories: each row's prompt and output so far. generators: each advances by one number; None
    means torch's global generator. eos_ids: the ids that end a text, for min_tokens.
    Returns int64 ids (R,) on the CPU. Raises UserError where scores are NaN or infinite.
    """
    ids = draw(distribution(logits, params, histories, eos_ids), generators)
    rows = zip(logits, ids.tolist(), params, strict=True)
    return ids, [
        None if p.logprobs is None else _logprobs(row, token, p.logprobs) for row, token, p in rows
    ]


def distribution(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    eos_ids: Sequence[int] = (),
) -> Tensor:
    """Steps 2 to 7: the probabilities (R, V) of the next tokens, float64 on the CPU."""
    if not logits.ndim == 2 or not len(logits) == len(params) == len(histories):
        raise ValueError(f"logits {tuple(logits.shape)} need one row each of params and histories")
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for row, p, history, out in zip(logits, params, histories, result, strict=True):
        scores = _edited(row, p, history, eos_ids)
        if not scores.max().isfinite():
            raise UserError(NOT_FINITE)
        if p.greedy:
            out[scores.argmax()] = 1  # argmax: the lowest id of a tie
        else:
            temperature = max(p.temperature, MIN_TEMPERATURE)
            weights = _filtered(((scores - scores.max()) / temperature).exp(), p)
            out.copy_(weights / weights.sum())
    return result


def _edited(
    row: Tensor, params: SamplingParams, history: History, eos_ids: Sequence[int]
) -> Tensor:
    """Steps 2 to 4: an edited copy of one row of logits (V,), in float64 or float32."""
    prompt, output = history
    dtype = torch.float64 if row.dtype == torch.float64 else torch.float32
    scores = row.to("cpu", dtype, copy=True)
    if len(output) < params.min_tokens:
        scores[[*params.stop_token_ids, *eos_ids]] = -math.inf
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.repetition_penalty != 1:
        for token in {*prompt, *output}:  # dividing a negative score would raise it
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
    if params.frequency_penalty or params.presence_penalty:
        for token, count in Counter(output).items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def _filtered(weights: Tensor, params: SamplingParams) -> Tensor:
    """Step 7: weights (V,), the largest 1, with 0 for tokens that min_p, top_k and top_p drop.

    Tokens of equal weight are kept or dropped together. Returns float64.
    """
    weights = torch.where(weights >= params.min_p, weights, 0).double()
    ordered = weights.sort(descending=True).values
    if params.top_k > 0:
        limit = ordered[min(params.top_k, len(ordered)) - 1]
        weights[weights < limit], ordered[ordered < limit] = 0, 0
    if params.top_p < 1:  # keep a token if the heavier ones together weigh less than top_p of all
        heavier = ordered.cumsum(0) - ordered
        count = int((heavier < params.top_p * ordered.sum()).sum())
        weights[weights < ordered[count - 1]] = 0
    return weights


def draw(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Step 8: an id for each row of probabilities (R, V): (R,) int64 on the CPU.

    Lay a row's probabilities end to end and throw one dart: likelier tokens are wider targets.
    """
    ends = probabilities.cpu().double().cumsum(-1)  # (R, V)
    darts = torch.empty(len(ends), 1, dtype=torch.float64)
    for dart, generator in zip(darts, generators, strict=True):
        dart.uniform_(generator=generator)
    below_end = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))
    hits = torch.minimum(darts * ends[:, -1:], below_end)  # (R, 1): rounding must not pass the end
    return torch.searchsorted(ends, hits, right=True)[:, 0]


def _logprobs(row: Tensor, token: int, count: int) -> Logprobs:
    """Step 1, last because it needs the token: log softmax of unmodified logits (V,)."""
    scores = row.cpu().double()
    logprobs = scores.log_softmax(-1)
    order = logprobs.sort(descending=True, stable=True).indices[:count].tolist()
    top = [(id, float(logprobs[id])) for id in order]
    return Logprobs(float(logprobs[token]), top, float(scores.max()))
