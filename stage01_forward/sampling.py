"""From logits to the next token: what the caller may ask for, and one batched function that does it.

The order is fixed, and it is the order of vLLM's V1 sampler. It matters, because the steps do not commute:

    1. log probabilities, when asked for, come from the logits as the model made them
    2. min_tokens: the ids that would end the text get -inf while the output is too short
    3. logit_bias is added
    4. repetition_penalty (ids of the prompt and the output), then frequency_penalty and presence_penalty (output only)
    5. greedy rows (temperature 0) take the highest score and are done; a tie goes to the lowest id
    6. temperature divides the scores
    7. min_p, then top_k, then top_p, each judging what the one before it left over
    8. one token is drawn

Steps 2 to 4 can change which score is the highest, so greedy rows go through them. Steps 6 and 7 cannot.

Every row is worked out from its own logits, options, history and generator, and nothing else.
So a request gets the same token whether it is alone or in a crowd, and later stages use this file as it is.

Left out on purpose: stop strings (they need text), several samples per request, beam search, grammars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

Ids = Sequence[int] | np.ndarray
History = tuple[Ids, Ids]  # ids of the prompt, ids of the output so far

MIN_TEMPERATURE = 0.01  # a smaller one is raised to this, as in vLLM: dividing by it would overflow
NOT_FINITE = (
    "The model's scores are NaN or infinite, so there is no next token: use another --dtype (float16 overflows easily), or "
    "check the weights."
)
BLOCK = 64  # the vocabulary is searched in blocks of this many ids


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler. The defaults are greedy decoding.

    Raises UserError for a value of the wrong type or out of range, so that an object that exists is a valid one.
    """

    max_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy, 1 the model's own distribution
    top_k: int = 0  # 0 or -1 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None or -1: another one each time
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = (
        None  # None: none; 0: of the sampled token only; n: and of the n likeliest
    )

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, low=1)
        _check_number("temperature", self.temperature, "from 0 to 2", lambda value: 0 <= value <= 2)
        _check_integer("top_k", self.top_k, low=-1, hint=" (0 turns it off)")
        _check_number("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda value: 0 <= value <= 1)
        # vLLM takes any positive number here; far out ones turn scores into infinities, so they stop at 100 times.
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            "from 0.01 to 100",
            lambda value: 0.01 <= value <= 100,
        )
        _check_number(
            "presence_penalty",
            self.presence_penalty,
            "from -2 to 2",
            lambda value: -2 <= value <= 2,
        )
        _check_number(
            "frequency_penalty",
            self.frequency_penalty,
            "from -2 to 2",
            lambda value: -2 <= value <= 2,
        )
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.")
        for token, bias in self.logit_bias.items():
            _check_integer("A token id in logit_bias", token, low=0)
            _check_number(
                f"logit_bias of token {token}",
                bias,
                "from -100 to 100",
                lambda value: -100 <= value <= 100,
            )
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise UserError(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}."
            )
        for token in self.stop_token_ids:
            _check_integer("A token id in stop_token_ids", token, low=0)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        _check_integer("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}."
            )
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, low=0)
        # Own copies: what the caller does to his list or dictionary afterwards must not change a checked object.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the highest score is taken, with no chance involved."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the history changes the scores."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError if an option names a token, or a number of tokens, that a model of this size does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                _check_integer(
                    f"A token id in {name}",
                    token,
                    low=0,
                    high=vocab_size - 1,
                    hint=" for this model",
                )
        _check_integer(
            "top_k", self.top_k, low=-1, high=vocab_size, hint=" for this model (0 turns it off)"
        )
        if self.logprobs is not None:
            _check_integer(
                "logprobs", self.logprobs, low=0, high=vocab_size, hint=" for this model"
            )
        if (
            self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size - 1
        ):  # the last one may be the end of text
            raise UserError(
                "min_tokens must be 0 where stop_token_ids names all tokens: no token could begin the answer."
            )

    def generator(self) -> torch.Generator:
        """A new generator for one request, on the CPU whatever the model runs on: a seed then means the same everywhere.

        torch's CPU generator uses the lowest 32 bits of a seed: seeds 2**32 apart give the same numbers.
        """
        generator = torch.Generator()
        if self.seed is None or self.seed == -1:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


@dataclass
class Logprobs:
    """Natural logarithms of the model's own probabilities at one position, before any option had its say."""

    token: float  # of the token that was taken
    top: list[
        tuple[int, float]
    ]  # (id, logprob) of the likeliest, best first; a tie goes to the lower id
    highest: (
        float  # the highest logit itself: logarithms of probabilities hide how large logits are
    )


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    generators: Sequence[torch.Generator | None],
    eos_ids: Sequence[int] = (),
) -> tuple[Tensor, list[Logprobs | None]]:
    """The next token of each of R rows. The order of operations is at the top of this file.

    logits: (R, V), any floating dtype, any device; not modified. float64 stays float64, the half dtypes become float32.
    histories: the prompt and the output so far of each row, read only where a penalty or min_tokens needs them.
        Any sequence of ints will do; NumPy arrays are the quickest.
    generators: each drawn row advances its own, greedy rows need none. A drawn row with None takes
        torch's global one, and is then not the same in a crowd.
    eos_ids: the tokens that end a text, which min_tokens holds back too.
    Returns the tokens, (R,) int64 on the CPU, and for each row its log probabilities, or None where not asked for.
    Raises UserError where the scores are NaN or infinite, as half precision can make them.
    """
    if not logits.ndim == 2 or not len(logits) == len(params) == len(histories) == len(generators):
        raise ValueError(
            f"logits {tuple(logits.shape)} need one row each of params ({len(params)}), histories ({len(histories)}) "
            f"and generators ({len(generators)})"
        )
    edits = [
        p.penalised or bool(p.logit_bias) or len(h[1]) < p.min_tokens
        for p, h in zip(params, histories, strict=True)
    ]
    tokens = torch.empty(len(params), dtype=torch.int64)
    # Four kinds of rows, so that each pays only for what it uses. Mostly one kind is all there is.
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
    """A changed copy of scores (r, V). Only the scores of ids that an option names or a history holds are touched."""
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
        scores[rows, ids] += _column(scores, [bias for _, _, bias in biased])[
            :, 0
        ]  # no id twice in a dictionary
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
    # Dividing a negative score would raise it. An id that occurs often is only given the same new score again.
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
    """Every id of some sequences in a row, and beside each the number of its sequence: two tensors (n,) on the CPU."""
    numbers = np.repeat(np.arange(len(sequences), dtype=np.int64), [len(ids) for ids in sequences])
    return torch.from_numpy(numbers), torch.from_numpy(
        np.concatenate([np.asarray(ids, np.int64) for ids in sequences])
    )


# ---- steps 5 to 8: one token a row ----


def _best(scores: Tensor) -> Tensor:
    """The id of the highest of scores (r, V); of equal ones the lowest. (r,) on the CPU."""
    ids = _wide(scores).argmax(
        -1
    )  # on a CPU, argmax in bfloat16 takes four times as long as in float32
    _check_finite(scores.gather(1, ids[:, None]))
    return ids.cpu()


def _draw(
    scores: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """An id by chance for each row of scores (r, V), after temperature and the filters. (r,) on the CPU.

    A softmax would divide the weights exp(score / temperature) by their sum, and once more after each filter. There
    is no need: a filter sets weights to zero, and the draw scales its random number by whatever sum is left.
    """
    weights = _weights(
        _wide(scores), [max(p.temperature, MIN_TEMPERATURE) for p in params]
    )  # (r, N), the largest is 1
    _filter(
        weights, [p.min_p for p in params], _column
    )  # min_p times the largest weight, which is 1
    _filter(
        weights, [min(p.top_k, scores.shape[1]) if p.top_k > 0 else 0 for p in params], _kth_largest
    )
    sums = _running_sums(weights)
    tokens = _spin(weights, list(range(len(params))), sums, generators)

    # top_p without sorting the vocabulary. The nucleus holds every token that has less than `wanted` above it. Draw
    # from all tokens. If the token is in the nucleus, that was a fair draw from the nucleus. If not, then neither is
    # any token as light as this one: drop them all and draw again. The first draw is good with probability top_p.
    wanted = [p.top_p * total for p, total in zip(params, sums[:, -1].tolist(), strict=True)]
    pending = [row for row, p in enumerate(params) if p.top_p < 1]
    heavier = torch.empty_like(
        weights[0]
    )  # (N,), used again for every row: fresh memory would cost more than the sum
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
    """exp(score / temperature), scaled so that the largest of each row is 1: scores (r, V) -> (r, N).

    N is V rounded up to whole blocks; the places added weigh nothing.
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
    """Zero, in place, the weights (r, N) below a limit, in the rows whose value of an option is not 0.

    `limit` gets the weights (n, N) and the values of just those rows, and returns their limits (n, 1). Weights equal
    to the limit stay: tokens that are equally likely stay or go together.
    """
    rows = [row for row, value in enumerate(values) if value]
    if not rows:
        return
    limits = limit(_take(weights, rows), [values[row] for row in rows])
    # The comparison is written as 0.0 and 1.0, row by row into the same memory: on a CPU, multiplying by that is ten
    # times as fast as masked_fill.
    keep = torch.empty_like(weights[0])
    for row, lowest in zip(rows, limits, strict=True):
        weights[row].mul_(torch.ge(weights[row], lowest, out=keep))


def _kth_largest(weights: Tensor, ks: Sequence[float]) -> Tensor:
    """The k-th largest weight of each row, each with its own k: weights (n, N) -> (n, 1).

    The k largest lie in the k blocks with the largest maxima (or tie with some that do), so most blocks are never
    looked into.
    """
    most = int(max(ks))
    blocks = weights.unflatten(1, (-1, BLOCK))  # (n, N / BLOCK, BLOCK)
    if most < blocks.shape[1]:
        best = blocks.amax(-1).topk(most, sorted=False).indices  # (n, most)
        weights = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(
            1
        )  # (n, most * BLOCK)
    return weights.topk(most).values.gather(
        1, torch.tensor(ks, device=weights.device).long()[:, None] - 1
    )


def _running_sums(weights: Tensor) -> Tensor:
    """The weight of all blocks up to and including each: weights (r, N) -> (r, N / BLOCK), float64 on the CPU."""
    return weights.unflatten(1, (-1, BLOCK)).sum(-1).cpu().double().cumsum(-1)


def _spin(
    weights: Tensor, rows: Sequence[int], sums: Tensor, generators: Sequence[torch.Generator | None]
) -> Tensor:
    """A fair draw in n rows of weights (r, N), with their running sums (n, N / BLOCK): (n,) ids on the CPU.

    Lay a row's weights end to end and throw one dart: first find the block that it hits, then the place inside.
    """
    darts = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    dart = torch.stack(darts) * sums[:, -1:]  # (n, 1)
    block = _first_above(sums, dart)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, block)
    blocks = weights.unflatten(1, (-1, BLOCK))  # (r, N / BLOCK, BLOCK)
    inside = blocks[
        torch.tensor(rows, device=weights.device), block[:, 0].to(weights.device)
    ]  # (n, BLOCK)
    return (block * BLOCK + _first_above(inside.cpu().double().cumsum(-1), dart - before))[:, 0]


def _first_above(cumulative: Tensor, dart: Tensor) -> Tensor:
    """The first place of each row whose cumulative weight exceeds the dart: (r, n), (r, 1) -> (r, 1).

    Something of weight zero is never the first. Rounding must not carry a dart past the end, hence the minimum.
    """
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros((), dtype=cumulative.dtype))
    return torch.searchsorted(cumulative, torch.minimum(dart, below_end), right=True)


# ---- step 1, written down last, because it needs to know the token ----


def _logprobs(
    logits: Tensor, params: Sequence[SamplingParams], tokens: Tensor
) -> list[Logprobs | None]:
    """For each row that asked, log softmax of its unmodified logits at the token and at the likeliest ids."""
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
            # Everything from the limit up, ids ascending; a stable sort then leaves ties in that order.
            ids = (weights[place, : scores.shape[1]] >= limits[place]).nonzero()[:, 0]
            values, order = scores[place, ids].cpu().sort(descending=True, stable=True)
            logprobs = values[:count].double() - log_total[place]
            top = list(zip(ids.cpu()[order[:count]].tolist(), logprobs.tolist(), strict=True))
        answers[row] = Logprobs(float(taken[place]), top, float(highest[place]))
    return answers


# ---- small helpers ----


def _take(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a matrix, given in ascending order: a copy, or the matrix itself, uncopied, if that is all of them."""
    return matrix if len(rows) == len(matrix) else matrix[list(rows)]


def _wide(scores: Tensor) -> Tensor:
    """The same in float32, or in float64 if it is that already: half precision is too coarse to add up chances."""
    return scores if scores.dtype == torch.float64 else scores.float()


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    """One value a row, (r, 1), of the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _check_finite(largest: Tensor) -> None:
    if not bool(torch.isfinite(largest).all()):
        raise UserError(NOT_FINITE)


def _check_integer(
    name: str, value: object, low: int, high: int | None = None, hint: str = ""
) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number, got {value!r}.")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{name} must be {allowed}{hint}, got {value}.")


def _check_number(name: str, value: object, allowed: str, inside: Callable[[float], bool]) -> None:
    # NaN compares false with everything, so it is never inside.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name} must be a number {allowed}, got {value!r}.")
    if not inside(value):
        raise UserError(f"{name} must be {allowed}, got {value}.")
