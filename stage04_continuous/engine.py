"""Stage 04: the engine for requests that come and go. Each step packs all running requests into one
forward pass.

A step is: schedule (who runs), move (prepare memory), run (one pass, prefill and decode together,
no padding), sample, postprocess (who has ended).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from shared.errors import UserError
from stage01_forward.generation import (
    NOT_FINITE,
    Logprobs,
    Output,
    Row,
    Sampling,
    Token,
    check_request,
    finish_reason,
    sampling_per_prompt,
)
from stage01_forward.model import Model
from stage01_forward.params import SamplingParams

from .cache import SlotCache
from .fast_sampling import choose, sample
from .plan import AnyScheduler, Observer, Plan
from .recorder import Recorder
from .request import Request
from .runner import AnyRunner, Runner
from .scheduler import Scheduler

Sampled = tuple[Request, int, Logprobs | None]  # a request and its next token
SchedulerT = TypeVar("SchedulerT", bound=AnyScheduler)


def sample_tokens(
    requests: Sequence[Request],
    logits: Tensor,
    eos_ids: Sequence[int],
    choose: Callable[[Tensor, Sequence[Row]], list[int]] = choose,
) -> list[Sampled]:
    """The next token of each of `requests`, from its row of logits (R, V), which are overwritten. A
    request whose logits are not finite ends with an error; the others go on. choose: see `sample`.
    """
    ids, logprobs = sample(logits, [request.row for request in requests], eos_ids, choose)
    for request, id in zip(requests, ids, strict=True):
        if id < 0:
            request.output.fail(UserError(NOT_FINITE))
    return [sampled for sampled in zip(requests, ids, logprobs, strict=True) if sampled[1] >= 0]


class Engine(Generic[SchedulerT]):
    """Generates with the logits of `runner`, in the steps that `scheduler` plans.

    eos_ids: the ids that end a text; None: those of the model's config.
    recorder: the observer that keeps `steps`, one record a pass; None: this stage's Recorder.
    observers: see every plan before its pass and after its step.
    sample_tokens: takes the next tokens, like this module's function.
    """

    def __init__(
        self,
        runner: AnyRunner,
        scheduler: SchedulerT,
        eos_ids: Sequence[int] | None = None,
        recorder: Any = None,
        observers: Sequence[Observer] = (),
        sample_tokens: Callable[..., list[Sampled]] = sample_tokens,
    ) -> None:
        self.runner, self.scheduler, self.config = runner, scheduler, runner.config
        self.sample_tokens = sample_tokens
        self.eos_ids = self.config.eos_ids if eos_ids is None else tuple(eos_ids)
        recorder = recorder or Recorder(scheduler)
        self.steps, self.observers = recorder.steps, [recorder, *observers]
        self.requests: dict[str, Request] = {}  # those that wait or run
        self._named = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        """Continue every prompt (token ids) to its end. An invalid one ends with the reason
        "error"."""
        params = sampling_per_prompt(prompts, sampling)
        self.steps.clear()
        requests = [Request(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        for request in requests:
            try:
                self.add(request)
            except UserError as error:
                request.output.fail(error)
        for _ in self.run():
            pass
        return [request.output for request in requests]

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
        """Continue one prompt. Yields each token as soon as it is sampled; the last one carries the
        finish reason.

        Other requests advance too, so several streams may be read in turn. Closing the stream early
        aborts its request.
        """
        request = self.add(Request(prompt, sampling))
        output, sent = request.output, 0
        try:
            while output.finish_reason is None or sent < len(output.tokens):
                if sent == len(output.tokens):
                    self.step()
                for token in output.tokens[sent:]:
                    sent += 1
                    yield token
        finally:
            if self.requests.get(request.id) is request:  # not a later one with the same id
                self.abort(request.id)
        if output.error is not None:
            raise UserError(output.error)

    def run(self) -> Iterator[tuple[str, Token]]:
        """Step until no request waits or runs. Yields each token with the id of its request."""
        while self.requests:
            yield from self.step()

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
        """End a request now, waiting or running; returns its output so far. The reason is "abort",
        unless it has one already. Raises KeyError if no such request waits or runs."""
        request = self.requests[request_id]
        request.output.finish_reason = request.output.finish_reason or "abort"
        self._finish(request)
        return request.output

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is work. Returns its tokens, each with its request's id."""
        plan = self.scheduler.schedule()
        self.runner.move(plan.moves)
        for observer in self.observers:
            observer.before(plan)
        logits = self.runner.run(*plan.tokens())  # (requests that sample, V)
        tokens = self._postprocess(plan, self._sample(plan, logits))
        for observer in self.observers:
            observer.after(plan)
        return tokens

    def _sample(self, plan: Plan, logits: Tensor) -> list[Sampled]:
        """The next token of each request whose last token was computed."""
        requests = [work.request for work in plan.work if work.rows]
        return self.sample_tokens(requests, logits, self.eos_ids)

    def _postprocess(self, plan: Plan, sampled: list[Sampled]) -> list[tuple[str, Token]]:
        """Note what was computed and sampled, and release the requests that have ended."""
        self.scheduler.advance(plan)
        tokens = []
        for request, id, logprobs in sampled:
            reason = finish_reason(id, request.row, self.config, self.eos_ids)
            token = Token(id, logprobs, reason)
            request.output.append(token)
            tokens.append((request.id, token))
        for work in plan.work:
            if work.request.output.finish_reason is not None:
                self._finish(work.request)
        return tokens

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.requests[request.id]


def make(
    model: Model,
    contexts: int | None = None,
    *,
    scheduler: Scheduler | None = None,
    eos_ids: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Engine:
    """The engine for `model` with `contexts` slots (default 8) of a whole context each.

    options: those of Scheduler; or give a `scheduler`. Raises UserError for invalid settings.
    """
    if contexts is not None:
        options["max_sequences"] = contexts
    if scheduler is None:
        scheduler = Scheduler(**options)
    slots = scheduler.max_sequences
    cache = SlotCache(model.config, slots, dtype=model.dtype, device=model.device)
    return Engine(Runner(model, cache), scheduler, eos_ids, None, observers)
