"""Rejection sampling (Leviathan et al., 2023; Chen et al., 2023): drafts that were drawn from a
distribution q are accepted so often that the tokens have the target's distribution p.

A draft x is accepted with the probability min(1, p(x) / q(x)). After the first refusal the token is
drawn from what p has and q lacks, max(0, p - q). The chance that x comes out is then

    q(x) min(1, p(x) / q(x)) + (1 - sum of min(p, q)) max(0, p - q)(x) / (sum of max(0, p - q))
    = min(p, q)(x) + max(0, p - q)(x) = p(x), because both sums are 1 - (sum of min(p, q))

The waves of `engine.py` accept with the probability sum of p q; this accepts sum of min(p, q),
never less. But its random numbers depend on how many drafts there were, so a seed fixes the
distribution of an answer and not the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import UserError
from stage01_forward.generation import NOT_FINITE
from stage01_forward.sampling import distribution, draw, edit, logprobs_of
from stage04_continuous.engine import Sampled
from stage04_continuous.request import Request


def accept(p: Tensor, q: Tensor, draft: int, dart: float) -> bool:
    """Whether `draft`, drawn from q (V,), is accepted for p (V,). dart: from 0 to below 1. There is
    no division, so q may be 0 where rounding made it so."""
    return dart * float(q[draft]) < float(p[draft])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution (V,) after a refusal. Where rounding leaves nothing of it, p."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p


@dataclass
class Draws:
    """Drafts of one pass that were drawn, behind the first `place` tokens of an output: ids, each
    with the q (V,) that it came from."""

    place: int
    ids: list[int]
    q: list[Tensor]


class Rejection:
    """Takes the place of an engine's `sample_tokens`: samples by the rule above. Requests whose
    drafts were not drawn are sampled as always. drawn: the drafts of this pass, by request."""

    def __init__(self, drawn: Mapping[Request, Draws]) -> None:
        self.drawn = drawn

    def __call__(
        self, requests: Sequence[Request], logits: Tensor, eos_ids: Sequence[int]
    ) -> list[Sampled]:
        sampled: list[Sampled] = []
        for request, unmodified in zip(requests, logits, strict=True):
            params = request.sampling
            scores = unmodified.to("cpu", torch.float64, copy=True)
            edit(scores, request.row, eos_ids)
            if not scores.max().isfinite():
                request.output.fail(UserError(NOT_FINITE))
                continue
            token = int(scores.argmax()) if params.greedy else self._token(request, scores)
            wanted = params.logprobs
            logprobs = None if wanted is None else logprobs_of(unmodified, token, wanted)
            sampled.append((request, token, logprobs))
        return sampled

    def _token(self, request: Request, scores: Tensor) -> int:
        p, row = distribution(scores, request.sampling), request.row
        draws = self.drawn.get(request)
        wave = len(request.output.token_ids) - draws.place if draws else 0
        if draws is None or wave >= len(draws.ids):
            return draw(p, row.dart())
        draft, q = draws.ids[wave], draws.q[wave]
        return draft if accept(p, q, draft, row.dart()) else draw(residual(p, q), row.dart())
