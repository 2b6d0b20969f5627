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

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stage01_forward.generation import Token, finish_reason
from stage04_continuous import engine as stage04
from stage04_continuous.engine import Sampled
from stage04_continuous.plan import Observer
from stage04_continuous.request import Request
from stage04_continuous.runner import AnyRunner
from stage09_kernels.engine import make as make_plain

from .draft_model import DraftModel
from .drafts import DraftPlan, DraftScheduler, Proposer
from .grammar import Forced
from .lengths import Adaptive, Lengths, measure_passes
from .proposers import NGram
from .records import Recorder
from .rejection import Rejection
from .suffix import Suffix

# A plan, the wave, its requests, their logits (R, V), end ids -> tokens of those that have one.
Verifier = Callable[[DraftPlan, int, Sequence[Request], Tensor, Sequence[int]], list[Sampled]]


class Engine(stage04.Engine[Any]):
    """Generates with the logits of `runner`, in the steps that `scheduler` plans: as stage 04's
    engine, whose arguments these are. verify: takes the tokens of a wave; None: sample_tokens."""

    scheduler: DraftScheduler
    plan: DraftPlan

    def __init__(
        self,
        runner: AnyRunner,
        scheduler: DraftScheduler,
        eos_ids: Sequence[int],
        recorder: Any,
        observers: Sequence[Observer],
        sample_tokens: Callable[..., list[Sampled]],
        verify: Verifier | None = None,
    ) -> None:
        super().__init__(runner, scheduler, eos_ids, recorder, observers, sample_tokens)
        self.plan = DraftPlan()  # of the pass being run
        self.verify = verify or (lambda plan, wave, *row: sample_tokens(*row))

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is work. Returns its tokens, each with its request's id."""
        self.plan = DraftPlan()
        plan = self.scheduler.schedule()
        self.runner.move(plan.moves)
        self.plan = plan
        for observer in self.observers:
            observer.before(plan)
        with self.recorder.model_time:
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
            sampled = self.verify(plan, wave, going, rows, self.eos_ids)
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


def with_drafts(
    plain: Any,
    proposer: Proposer,
    most: int = 4,
    lengths: Lengths | None = None,
    verify: Verifier | None = None,
) -> Engine:
    """The engine that verifies drafts, with the parts of `plain`, which stage 05's `make` or a
    later one made. most, lengths: see DraftScheduler. verify: see Engine."""
    scheduler = DraftScheduler(plain.scheduler, Forced(proposer), most, lengths)
    recorder, *observers = plain.observers
    return Engine(
        plain.runner,
        scheduler,
        plain.eos_ids,
        Recorder(recorder),
        observers,
        plain.sample_tokens,
        verify,
    )


def with_draft_model(
    plain: Any, draft: Any, most: int = 4, lengths: Lengths | None = None, drawn: bool = False
) -> Engine:
    """The same with drafts of the model `draft`. drawn: sampling requests get drafts drawn from its
    distribution, by rejection: their answers keep their distribution, and not their seed's
    tokens. Raises UserError if the models do not fit."""
    inner = plain.scheduler
    swap = inner.swap_pool.count if inner.swap_pool else 0
    proposer = DraftModel(
        draft,
        plain.config,
        inner.pool,
        inner.tables,
        most,
        inner.max_sequences,
        swap,
        drawn,
        plain.eos_ids,
    )
    engine = with_drafts(plain, proposer, most, lengths, Rejection(proposer) if drawn else None)
    engine.scheduler.prepare = proposer.prepare
    engine.observers.append(proposer)
    return engine


def speculate(plain: Any, kind: str, count: int, draft: Any = None, drawn: bool = False) -> Engine:
    """For the server: drafts of `kind`, of registry.DRAFTS, as many as pay, at most `count` in a
    pass of a request. draft, drawn: the draft model, see `with_draft_model`. Raises UserError if it
    does not fit."""
    lengths = Adaptive(measure_passes(plain.runner, plain.scheduler.pool.count))
    if kind == "draft":
        return with_draft_model(plain, draft, count, lengths, drawn)
    return with_drafts(plain, NGram() if kind == "ngram" else Suffix(), count, lengths)


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 09's engine with drafts from the request's own text and from past answers. options:
    those of its `make`."""
    return with_drafts(make_plain(model, contexts, **options), Suffix())
