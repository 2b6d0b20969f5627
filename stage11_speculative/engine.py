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

from shared.errors import UserError
from stage01_forward.generation import Output, Token, check_request, finish_reason
from stage01_forward.params import SamplingParams
from stage04_continuous import drive
from stage04_continuous.engine import Sampled
from stage04_continuous.plan import Observer
from stage04_continuous.request import Request, State
from stage04_continuous.runner import AnyRunner

from .drafts import DraftPlan, DraftScheduler

# A plan, the wave, its requests, their logits (R, V), end ids -> tokens of those that have one.
Verifier = Callable[[DraftPlan, int, Sequence[Request], Tensor, Sequence[int]], list[Sampled]]


class Engine:
    """Generates with the logits of `runner`, in the steps that `scheduler` plans: as stage 04's
    engine, whose arguments these are. verify: takes the tokens of a wave; None: sample_tokens."""

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
        self.runner, self.scheduler, self.config = runner, scheduler, runner.config
        self.sample_tokens, self.eos_ids = sample_tokens, tuple(eos_ids)
        self.verify = verify or (lambda plan, wave, *row: sample_tokens(*row))
        self.recorder = recorder
        self.steps, self.observers = self.recorder.steps, [self.recorder, *observers]
        self.requests: dict[str, Request] = {}  # those that wait or run
        self.plan = DraftPlan()  # of the pass being run
        self._named = 0

    generate, stream, run = drive.generate, drive.stream, drive.run

    def add(self, request: Request) -> Request:
        """Queue a request. Raises UserError if it is invalid, or if its id is taken."""
        self.check(request.prompt_ids, request.sampling)
        return self.enqueue(request)

    def enqueue(self, request: Request) -> Request:
        """Queue a request that `check` has accepted. Raises UserError if its id is taken."""
        if not request.id:
            self._named += 1
            while f"request-{self._named}" in self.requests:  # a caller chose this name
                self._named += 1
            request.id = f"request-{self._named}"
        if request.id in self.requests:
            raise UserError(
                f"The engine already has a request '{request.id}': give each request its own id."
            )
        self.scheduler.add(request)
        self.requests[request.id] = request
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise UserError if such a request can never be answered. Reads settings only, so any
        thread may call it."""
        check_request(prompt, params, self.config)
        self.scheduler.check(len(prompt), params.max_tokens)

    def abort(self, request_id: str) -> Output:
        """End a request now, waiting or running; returns its output so far.

        Raises UserError if no such request waits or runs.
        """
        if request_id not in self.requests:
            raise UserError(
                f"There is no request '{request_id}' in the engine: "
                "it was never added, or it has ended already."
            )
        request = self.requests[request_id]
        request.output.finish_reason = "abort"
        self._finish(request)
        return request.output

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

    def fail(self, error: UserError) -> list[Request]:
        """After `step` has raised, end requests with `error` and return them: those of the pass, or
        all if the pass had not begun, because then no memory can be trusted."""
        failed = [work.request for work in self.plan.work] or list(self.requests.values())
        failed = [request for request in failed if request.state is not State.FINISHED]
        for request in failed:
            if request.output.finish_reason is None:
                request.output.fail(error)
            self._finish(request)
        return failed

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
            if len(going) < len(logits):  # else all, in their order
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
        self.scheduler.accept(plan)
        for work in plan.work:
            if work.request.output.finish_reason is not None:
                self._finish(work.request)
        return tokens

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.requests[request.id]
