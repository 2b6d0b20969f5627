"""Stage 04: the engine for requests that come and go. Each step packs whatever is alive into one forward pass.

A step is: schedule (who runs), run (one pass, prefill and decode together, no padding), sample, postprocess (who has ended).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shared.errors import UserError
from shared.records import StepRecord
from stage01_forward.generation import (
    Output,
    Sampling,
    Token,
    check_request,
    finish_reason,
    finite_rows,
    sampling_per_prompt,
)
from stage01_forward.model import GPT2
from stage01_forward.sampling import Logprobs, SamplingParams, sample

from .cache import SlotCache
from .request import Request, State
from .scheduler import Scheduler, Work

STEPS_KEPT = 100_000  # records; an engine behind a server runs for weeks


@dataclass(frozen=True)
class SlotRecord:
    """What one slot did in a pass: whose tokens it computed, and how its request ended, if it did."""

    slot: int
    request_id: str
    prefill_tokens: int
    decode_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class SlotsRecord(StepRecord):
    """A StepRecord that tells the slots apart; `started` is `time.perf_counter()`."""

    started: float = 0.0
    slots: tuple[SlotRecord, ...] = ()
    waiting: int = 0  # requests without a slot
    bookkeeping_seconds: float = (
        0.0  # of `seconds`, what was not the model: scheduling, sampling, postprocessing
    )


class Engine:
    """Generates with `model`, as many requests at a time as `scheduler` has slots. `eos_ids` None: those of the config.

    slot_tokens: what a slot holds, prompt and answer together; None: the model's whole context.
    """

    def __init__(
        self,
        model: GPT2,
        eos_ids: Sequence[int] | None = None,
        scheduler: Scheduler | None = None,
        slot_tokens: int | None = None,
    ) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: deque[SlotsRecord] = deque(maxlen=STEPS_KEPT)  # one a forward pass
        self.scheduler = Scheduler() if scheduler is None else scheduler
        self.cache = SlotCache(
            model.config, len(self.scheduler.free_slots), slot_tokens, model.dtype, model.device
        )
        self.limits = replace(
            model.config, n_positions=self.cache.slot_tokens
        )  # where an answer ends for want of room
        self.requests: dict[str, Request] = {}  # those that wait or run
        self._named = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        """Continue every prompt (token ids) to its end. An unfit prompt ends with the reason "error"; the others go on.

        Raises UserError if there is no prompt at all.
        """
        params = sampling_per_prompt(prompts, sampling)
        if not prompts:
            raise UserError("There are no prompts: give at least one.")
        self.steps.clear()
        requests = [Request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        for request in requests:
            try:
                self.add(request)
            except UserError as error:
                request.output.fail(error)
        for _ in self.run():
            pass
        return [request.output for request in requests]

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
        """Continue one prompt, each token as soon as it is there; the last one carries the finish reason.

        Other requests move on too, so several streams may be read in turn. A stream that is closed early is aborted.
        """
        request = self.add(Request(prompt, sampling))
        try:
            yield from self._tokens(request)
        finally:
            if request.state is not State.FINISHED:
                self.abort(request.id)

    def _tokens(self, request: Request) -> Iterator[Token]:
        output, sent = request.output, 0
        while output.finish_reason is None or sent < len(output.token_ids):
            if sent == len(output.token_ids):
                self.step()
            while sent < len(output.token_ids):
                sent += 1
                reason = output.finish_reason if sent == len(output.token_ids) else None
                yield Token(
                    output.token_ids[sent - 1],
                    output.logprobs[sent - 1] if output.logprobs else None,
                    reason,
                )
        if output.error is not None:
            raise UserError(output.error)

    def add(self, request: Request) -> Request:
        """Put a request in line. Raises UserError if it is unfit, or if its id is that of another one in the engine."""
        if not request.id:
            self._named += 1
            while f"request-{self._named}" in self.requests:  # somebody chose this name
                self._named += 1
            request.id = f"request-{self._named}"
        if request.id in self.requests:
            raise UserError(
                f"There is a request '{request.id}' in the engine already: give each an id of its own."
            )
        check_request(request.output.prompt_ids, request.sampling, self.model.config)
        length, room = len(request.output.prompt_ids), self.cache.slot_tokens
        if length >= room:
            raise UserError(
                f"The prompt has {length} tokens, and a slot holds {room} with the answer counted in: shorten the prompt to "
                f"{room - 1} tokens or fewer."
            )
        self.scheduler.add(request)
        self.requests[request.id] = request
        return request

    def abort(self, request_id: str) -> Output:
        """End a request now, whatever it is doing; what it has said so far is returned.

        Raises UserError if no such request waits or runs.
        """
        if request_id not in self.requests:
            raise UserError(
                f"There is no request '{request_id}' to abort: it was never added, or it has ended already."
            )
        request = self.requests[request_id]
        request.output.finish_reason = "abort"
        self._finish(request)
        return request.output

    def run(self) -> Iterator[tuple[str, Token]]:
        """Make steps until nothing waits or runs; yields each token with the id of its request."""
        while self.scheduler.unfinished:
            yield from self.step()

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is anything to do; the tokens that came of it, each with the id of its request."""
        started = time.perf_counter()
        work = self.scheduler.schedule()
        if not work:
            return []
        work.sort(
            key=lambda each: (each.count, each.slot)
        )  # neighbours attend together: see cache.py
        scheduled = time.perf_counter()
        logits = self._forward(work)  # (requests that sample, V)
        computed = time.perf_counter()
        sampled = self._sample([each.request for each in work if each.samples], logits)
        tokens = self._postprocess(work, sampled)
        ended = time.perf_counter()
        self.steps.append(
            self._record(work, started, ended - started, (scheduled - started) + (ended - computed))
        )
        return tokens

    @torch.inference_mode()
    def _forward(self, work: list[Work]) -> torch.Tensor:
        """Logits (requests that sample, V) of one pass over the N tokens of `work`, packed one request after the other."""
        ids = [id for each in work for id in each.request.tokens(each.start, each.count)]
        tokens = torch.tensor(ids, device=self.model.device)  # (N,)
        attention = self.cache.extend([(each.slot, each.start, each.count) for each in work])
        hidden = self.model(tokens, attention.positions, attention.attend)  # (N,) -> (N, C)
        ends = itertools.accumulate(each.count for each in work)
        last = [end - 1 for end, each in zip(ends, work, strict=True) if each.samples]
        return self.model.logits(
            hidden[last]
        )  # (requests that sample, C) -> (requests that sample, V)

    def _sample(
        self, requests: list[Request], logits: torch.Tensor
    ) -> list[tuple[Request, int, Logprobs | None]]:
        """The next token of each request. One whose scores are not numbers ends with an error, and nobody else does."""
        finite = finite_rows(logits, [request.output for request in requests])
        if len(finite) < len(requests):
            requests, logits = [requests[row] for row in finite], logits[finite]
        ids, logprobs = sample(
            logits,
            [request.sampling for request in requests],
            [(request.output.prompt_ids, request.output.token_ids) for request in requests],
            [request.generator for request in requests],
            self.eos_ids,
        )
        return list(zip(requests, ids.tolist(), logprobs, strict=True))

    def _postprocess(
        self, work: list[Work], sampled: list[tuple[Request, int, Logprobs | None]]
    ) -> list[tuple[str, Token]]:
        """Write down what was computed and said, and let go of whoever has ended."""
        for each in work:
            each.request.computed += each.count
        tokens = []
        for request, token_id, logprobs in sampled:
            output = request.output
            output.append(Token(token_id, logprobs, None))
            output.finish_reason = finish_reason(
                output.token_ids, len(output.prompt_ids), request.sampling, self.limits, self.eos_ids
            )
            tokens.append((request.id, Token(token_id, logprobs, output.finish_reason)))
        for each in work:
            if each.request.output.finish_reason is not None:
                self._finish(each.request)
        return tokens

    def _finish(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self.cache.reset(request.slot, request.computed)
        self.scheduler.finish(request)
        del self.requests[request.id]

    def _record(
        self, work: list[Work], started: float, seconds: float, bookkeeping_seconds: float
    ) -> SlotsRecord:
        slots = []
        for each in work:
            prefill, decode = each.prefill_tokens, each.count - each.prefill_tokens
            slots.append(
                SlotRecord(
                    each.slot, each.request.id, prefill, decode, each.request.output.finish_reason
                )
            )
        return SlotsRecord(
            rows=len(work),
            prefill_tokens=sum(each.prefill_tokens for each in slots),
            decode_tokens=sum(each.decode_tokens for each in slots),
            seconds=seconds,
            started=started,
            slots=tuple(slots),
            waiting=len(self.scheduler.waiting),
            bookkeeping_seconds=bookkeeping_seconds,
        )
