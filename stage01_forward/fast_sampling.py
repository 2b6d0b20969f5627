"""The engines' sampler: does what sampling.py does, in the same order, at a fraction of the cost.

It works on the logits' device, on all rows at once where it can, and each row pays only for the
options it uses. The vocabulary is never sorted. The tests compare it with sampling.py token for
token. With top_p, which may take several draws (see `_draw`), they compare the distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

from .generation import NOT_FINITE, Logprobs
from .params import SamplingParams
from .sampling import MIN_TEMPERATURE, History, Ids

BLOCK = 64  # the vocabulary is searched in blocks of this many ids


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    generators: Sequence[torch.Generator | None],
    eos_ids: Sequence[int] = (),
) -> tuple[Tensor, list[Logprobs | None]]:
    """The next token of each of R rows, and its log probabilities where requested.

    logits: (R, V), any floating dtype, any device; not modified. float64 stays float64, the half
        dtypes become float32.
    histories: each row's prompt and output so far, read only where a penalty or min_tokens needs
        them. Any sequence of ints will do; NumPy arrays are the fastest.
    generators: a drawn row advances its own; a greedy row needs none. A drawn row with None uses
        torch's global generator, so its token depends on the other rows.
    eos_ids: the tokens that end a text, which min_tokens suppresses.
    Returns the tokens, (R,) int64 on the CPU. Raises UserError where scores are NaN or infinite.
    """
    if not logits.ndim == 2 or not len(logits) == len(params) == len(histories) == len(generators):
        raise ValueError(
            f"logits {tuple(logits.shape)} need one row each of params ({len(params)}), histories "
            f"({len(histories)}) and generators ({len(generators)})"
        )
    edits = [
        p.penalised or bool(p.logit_bias) or len(h[1]) < p.min_tokens
        for p, h in zip(params, histories, strict=True)
    ]
    tokens = torch.empty(len(params), dtype=torch.int64)
    # Rows are of four kinds, and each pays only for what it uses. Most batches have a single kind.
    for greedy, edited in ((True, False), (True, True), (False, False), (False, True)):
        rows = [row for row, p in enumerate(params) if p.greedy == greedy and edits[row] == edited]
        if not rows:
            continue
        mine = [params[row] for row in rows]
        scores = _take(logits, rows)
        if edited:
            scores = _edited(scores, mine, [histories[row] for row in rows], eos_ids)
        tokens[rows] = (
            _best(scores) if greedy else _draw(scores, mine, [generators[row] for row in rows])
        )
    return tokens, _logprobs(logits, params, tokens)


# ---- steps 2 to 4: changes to single scores ----


def _edited(
    scores: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    eos_ids: Sequence[int],
) -> Tensor:
    """A copy of scores (r, V), changed for the ids that an option names or a history holds."""
    scores = _wide(scores).clone()
    ending = [
        (row, token)
        for row, (p, (_, output)) in enumerate(zip(params, histories, strict=True))
        if len(output) < p.min_tokens
        for token in (*p.stop_token_ids, *eos_ids)
    ]
    if ending:
        rows, ids = torch.tensor(ending, device=scores.device).T
        scores[rows, ids] = -math.inf
    biased = [
        (row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()
    ]
    if biased:
        rows, ids = torch.tensor([entry[:2] for entry in biased], device=scores.device).T
        # A row names no id twice, so no addition is lost.
        scores[rows, ids] += _column(scores, [bias for _, _, bias in biased])[:, 0]
    if any(p.penalised for p in params):
        _penalise(scores, params, histories)
    return scores


def _penalise(
    scores: Tensor, params: Sequence[SamplingParams], histories: Sequence[History]
) -> None:
    """Step 4, in place, on all rows of scores (r, V) at once."""
    prompts = [
        prompt if p.repetition_penalty != 1 else ()
        for p, (prompt, _) in zip(params, histories, strict=True)
    ]
    outputs = [
        output if p.repetition_penalty != 1 else ()
        for p, (_, output) in zip(params, histories, strict=True)
    ]
    rows, ids = _flat(*prompts, *outputs)
    rows = rows % len(params)  # the prompts are numbered first, then the outputs
    factor = torch.tensor([p.repetition_penalty for p in params], dtype=torch.float64)[rows].to(
        scores
    )
    cells = rows.to(scores.device), ids.to(scores.device)
    old = scores[cells]
    # Dividing a negative score would raise it. A repeated id gets the same score each time.
    scores[cells] = torch.where(old > 0, old / factor, old * factor)

    counted = [p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params]
    rows, ids = _flat(
        *(output if wanted else () for wanted, (_, output) in zip(counted, histories, strict=True))
    )
    distinct, counts = torch.unique(rows * scores.shape[1] + ids, return_counts=True)
    rows, ids = distinct // scores.shape[1], distinct % scores.shape[1]
    frequency = torch.tensor([p.frequency_penalty for p in params], dtype=torch.float64)[rows]
    presence = torch.tensor([p.presence_penalty for p in params], dtype=torch.float64)[rows]
    scores[rows.to(scores.device), ids.to(scores.device)] -= (frequency * counts + presence).to(
        scores
    )


def _flat(*sequences: Ids) -> tuple[Tensor, Tensor]:
    """Two tensors (n,): for each id in `sequences`, the number of its sequence, and the id."""
    numbers = np.repeat(np.arange(len(sequences), dtype=np.int64), [len(ids) for ids in sequences])
    return torch.from_numpy(numbers), torch.from_numpy(
        np.concatenate([np.asarray(ids, np.int64) for ids in sequences])
    )


# ---- steps 5 to 8: one token a row ----


def _best(scores: Tensor) -> Tensor:
    """The id of each row's highest score, the lowest of a tie: scores (r, V) -> (r,) on the CPU."""
    scores = _wide(scores)  # a CPU takes four times as long in bfloat16 as in float32
    # NumPy's argmax uses vector instructions, PyTorch's does not.
    on_cpu = scores.device.type == "cpu"
    ids = torch.from_numpy(scores.numpy().argmax(-1)) if on_cpu else scores.argmax(-1)
    _check_finite(scores.gather(1, ids[:, None]))
    return ids.cpu()


def _draw(
    scores: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """A drawn id for each row of scores (r, V), after temperature and the filters: (r,) on the CPU.

    A softmax would divide the weights exp(score / temperature) by their sum, and do so again after
    each filter. The draw scales its random number by the sum instead.
    """
    temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    weights = _weights(_wide(scores), temperatures)  # (r, N), the largest is 1
    _filter(weights, [p.min_p for p in params], _column)  # min_p times the largest weight, 1
    ks = [min(p.top_k, scores.shape[1]) if p.top_k > 0 else 0 for p in params]
    _filter(weights, ks, _kth_largest)
    sums = _running_sums(weights)
    tokens = _spin(weights, list(range(len(params))), sums, generators)

    # top_p without a sort. The nucleus holds every token whose heavier ones together weigh less
    # than `wanted`. Draw from all tokens. A token in the nucleus is a fair draw from the nucleus.
    # If it is outside, so is every token that is as light or lighter: drop these and draw again.
    # The first draw succeeds with probability top_p or more. So a generator may advance by several
    # numbers here, and give another token than sampling.py, which finds the nucleus first.
    wanted = [p.top_p * total for p, total in zip(params, sums[:, -1].tolist(), strict=True)]
    pending = [row for row, p in enumerate(params) if p.top_p < 1]
    heavier = torch.empty_like(weights[0])  # (N,), reused: new memory would cost more than the sum
    while pending:
        outside = {}
        for row in pending:
            weight = weights[row]
            torch.gt(weight, weight[tokens[row]], out=heavier).mul_(weight)
            if float(heavier.sum()) >= wanted[row]:
                weight.copy_(heavier)
                outside[row] = _running_sums(weight[None])
        pending = list(outside)
        if pending:
            sums = torch.cat(list(outside.values()))
            tokens[pending] = _spin(weights, pending, sums, [generators[row] for row in pending])
    return tokens


def _weights(scores: Tensor, temperatures: Sequence[float]) -> Tensor:
    """exp(score / temperature), scaled to a largest weight of 1 in each row: (r, V) -> (r, N).

    N is V rounded up to whole blocks; the added places have weight 0.
    """
    rows, vocabulary = scores.shape
    largest = scores.amax(-1, keepdim=True)
    _check_finite(largest)
    weights = scores.new_empty(rows, -(-vocabulary // BLOCK) * BLOCK)
    weights[:, vocabulary:] = 0
    used = weights[:, :vocabulary]
    torch.sub(scores, largest, out=used)
    if any(temperature != 1 for temperature in temperatures):
        used.div_(_column(weights, temperatures))
    used.exp_()
    return weights


def _filter(
    weights: Tensor, values: Sequence[float], limit: Callable[[Tensor, Sequence[float]], Tensor]
) -> None:
    """Zero the weights (r, N) below a limit, in place, in rows where the option is not 0.

    `limit` maps the weights (n, N) and the values of those rows to their limits (n, 1). Weights
    equal to the limit stay, so that tokens of equal weight are kept or dropped together.
    """
    rows = [row for row, value in enumerate(values) if value]
    if not rows:
        return
    limits = limit(_take(weights, rows), [values[row] for row in rows])
    # The comparison writes 0.0 and 1.0 into the same memory for each row. On a CPU, multiplying by
    # these is ten times as fast as masked_fill.
    keep = torch.empty_like(weights[0])
    for row, lowest in zip(rows, limits, strict=True):
        weights[row].mul_(torch.ge(weights[row], lowest, out=keep))


def _kth_largest(weights: Tensor, ks: Sequence[float]) -> Tensor:
    """The k-th largest weight of each row, each with its own k: weights (n, N) -> (n, 1).

    The k largest are in the k blocks with the largest maxima, or tie with weights there, so most
    blocks are not read.
    """
    most = int(max(ks))
    blocks = weights.unflatten(1, (-1, BLOCK))  # (n, N / BLOCK, BLOCK)
    if most < blocks.shape[1]:
        best = blocks.amax(-1).topk(most, sorted=False).indices  # (n, most)
        blocks = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK))  # (n, most, BLOCK)
    places = torch.tensor(ks, device=weights.device).long()[:, None] - 1  # (n, 1)
    return blocks.flatten(1).topk(most).values.gather(1, places)


def _running_sums(weights: Tensor) -> Tensor:
    """The weight up to the end of each block: (r, N) -> (r, N / BLOCK), float64 on the CPU."""
    return weights.unflatten(1, (-1, BLOCK)).sum(-1).cpu().double().cumsum(-1)


def _spin(
    weights: Tensor, rows: Sequence[int], sums: Tensor, generators: Sequence[torch.Generator | None]
) -> Tensor:
    """A draw in n `rows` of weights (r, N), with running sums (n, N / BLOCK): (n,) ids on the CPU.

    The dart of sampling.py, in two searches: for the block that it hits, then inside that block.
    """
    darts = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    dart = torch.stack(darts) * sums[:, -1:]  # (n, 1)
    block = _first_above(sums, dart)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, block)
    blocks = weights.unflatten(1, (-1, BLOCK))  # (r, N / BLOCK, BLOCK)
    hit = torch.tensor(rows, device=weights.device), block[:, 0].to(weights.device)
    inside = blocks[hit].cpu().double().cumsum(-1)  # (n, BLOCK)
    return (block * BLOCK + _first_above(inside, dart - before))[:, 0]


def _first_above(cumulative: Tensor, dart: Tensor) -> Tensor:
    """The first place whose cumulative weight exceeds the dart: (r, n), (r, 1) -> (r, 1).

    A place of weight 0 is never the first. The minimum keeps rounding from carrying a dart too far.
    """
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros((), dtype=cumulative.dtype))
    return torch.searchsorted(cumulative, torch.minimum(dart, below_end), right=True)


# ---- step 1, last because it needs the token ----


def _logprobs(
    logits: Tensor, params: Sequence[SamplingParams], tokens: Tensor
) -> list[Logprobs | None]:
    """Log softmax of the unmodified logits for the token and the likeliest ids, where requested."""
    answers: list[Logprobs | None] = [None] * len(params)
    wanted = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
    if not wanted:
        return answers
    rows = list(wanted)
    scores = _wide(_take(logits, rows))
    weights = _weights(scores, [1.0] * len(rows))
    highest = scores.amax(-1).cpu().double()  # (n,)
    log_total = highest + _running_sums(weights)[:, -1].log()  # (n,)
    taken = scores.gather(1, tokens[rows, None].to(scores.device))[:, 0].cpu().double() - log_total
    counts = [min(count, scores.shape[1]) for count in wanted.values()]
    limits = _kth_largest(weights, [max(count, 1) for count in counts])
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        top: list[tuple[int, float]] = []
        if count:
            # All ids at or above the limit, ascending; the stable sort keeps ties in that order.
            ids = (weights[place, : scores.shape[1]] >= limits[place]).nonzero()[:, 0]
            values, order = scores[place, ids].cpu().sort(descending=True, stable=True)
            logprobs = values[:count].double() - log_total[place]
            top = list(zip(ids.cpu()[order[:count]].tolist(), logprobs.tolist(), strict=True))
        answers[row] = Logprobs(float(taken[place]), top, float(highest[place]))
    return answers


# ---- small helpers ----


def _take(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a matrix, ascending: a copy, or the matrix itself if these are all its rows."""
    return matrix if len(rows) == len(matrix) else matrix[list(rows)]


def _wide(scores: Tensor) -> Tensor:
    """float64 unchanged, all else as float32: half precision is too coarse to add up weights."""
    return scores if scores.dtype == torch.float64 else scores.float()


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    """One value per row, (r, 1), with the dtype and device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _check_finite(largest: Tensor) -> None:
    if not bool(torch.isfinite(largest).all()):
        raise UserError(NOT_FINITE)
