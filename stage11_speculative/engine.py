"""Stage 11: stage 04's engine with another end of a step. A pass gives the logits behind every
draft, and the sampler goes through them as long as it agrees.

The first position of each request is sampled, by the ordinary sampler, with the ordinary history
and the request's own random numbers. If the token is the draft that was computed there, the
logits behind it are those of plain decode, and the second position is sampled, and so on: in waves,
all requests that still agree at once. The first token that is not the draft ends the request's
waves. It is a token as good as any other. So every answer is what it would be without drafts, to
the token and whatever the options, and a pass yields at least one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stage01_forward.generation import Token, finish_reason
from stage04_continuous import engine as stage04
from stage04_continuous.request import Request
from stage09_kernels.engine import make as make_plain

from .draft_model import DraftModel
from .drafts import DraftPlan, DraftScheduler, Proposer
from .proposers import NGram
from .rejection import Rejection
from .suffix import Suffix


class Engine(stage04.Engine[Any]):
    """The engine `plain`, which stage 05's `make` or a later one made, with drafts in its plans and
    another end of its steps. It takes over all parts of `plain`."""

    scheduler: DraftScheduler
    plan: DraftPlan

    def __init__(self, plain: Any, scheduler: DraftScheduler) -> None:
        recorder, *observers = plain.observers
        parts = plain.runner, scheduler, plain.eos_ids, recorder, observers
        super().__init__(*parts, plain.sample_tokens)
        self.plan = DraftPlan()  # of the pass being run

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is work. Returns its tokens, each with its request's id."""
        self.plan = DraftPlan()
        plan = self.scheduler.schedule()
        self.runner.move(plan.moves)
        self.plan = plan
        for observer in self.observers:
            observer.before(plan)
        logits = self.runner.run(*plan.tokens())  # (rows of all requests that sample, V)
        tokens = self._verify(plan, logits)
        for observer in self.observers:
            observer.after(plan)
        return tokens

    def _verify(self, plan: DraftPlan, logits: Tensor) -> list[tuple[str, Token]]:
        """Sample position by position, as long as the tokens are the drafts, and release the
        requests that have ended."""
        self.scheduler.advance(plan)
        first, place = dict[Request, int](), 0  # of each request, its first row of `logits`
        for work in plan.work:
            if work.rows:
                first[work.request] = place
                place += work.rows
        tokens, wave, going = [], 0, list(first)
        while going:
            rows = logits
            if len(going) < logits.shape[0]:  # else all, in their order
                rows = logits[[first[request] + wave for request in going]]
            sampled = self.sample_tokens(going, rows, self.eos_ids)
            going = []
            for request, id, logprobs in sampled:
                reason = finish_reason(id, request.row, self.config, self.eos_ids)
                token = Token(id, logprobs, reason)
                request.output.append(token)
                tokens.append((request.id, token))
                if reason is None and plan.drafts.get(request, [])[wave : wave + 1] == [id]:
                    going.append(request)
            wave += 1
            plan.accepted |= dict.fromkeys(going, wave)
        if plan.drafts:
            self.scheduler.accept(plan)
        for work in plan.work:
            if work.request.output.finish_reason is not None:
                self._finish(work.request)
        return tokens


def with_drafts(plain: Any, proposer: Proposer, most: int = 4) -> Engine:
    """The engine `plain` with drafts of `proposer`, at most `most` of a request in a pass."""
    return Engine(plain, DraftScheduler(plain.scheduler, proposer, most))


def with_draft_model(plain: Any, draft: Any, most: int = 4, draws: bool = False) -> Engine:
    """The same with drafts of the model `draft`. draws: sampling requests get drafts drawn from its
    distribution, by rejection: their answers keep their distribution, and not their seed's tokens.
    Raises UserError if the models do not fit."""
    inner = plain.scheduler
    swap = inner.swap_pool.count if inner.swap_pool else 0
    sizes = inner.pool, inner.tables, most, inner.max_sequences, swap
    proposer = DraftModel(draft, plain.config, *sizes, draws, plain.eos_ids)
    engine = with_drafts(plain, proposer, most)
    if draws:
        engine.sample_tokens = Rejection(proposer.drawn)
    engine.scheduler.prepare = proposer.prepare
    engine.observers.append(proposer)
    return engine


def past_answers(plain: Any) -> Suffix:
    """Drafts from past answers to requests of the same salt."""
    return Suffix(salt_of=lambda request: plain.scheduler.tables[request].salt)


def speculate(plain: Any, kind: str, count: int, draft: Any = None, draws: bool = False) -> Engine:
    """For the server: drafts of `kind`, of registry.DRAFTS, at most `count` of a request in a pass.
    draft, draws: the draft model, see `with_draft_model`. Raises UserError if it does not fit."""
    if kind == "draft":
        return with_draft_model(plain, draft, count, draws)
    return with_drafts(plain, NGram() if kind == "ngram" else past_answers(plain), count)


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 09's engine with drafts from the request's own text and from past answers. options:
    those of its `make`."""
    plain = make_plain(model, contexts, **options)
    return with_drafts(plain, past_answers(plain))
