"""Stage 05's engine, or a later one with the same kind of scheduler, as the server runs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared.errors import UserError
from stage01_forward.generation import Output, Token
from stage01_forward.params import SamplingParams
from stage04_continuous.engine import Engine
from stage04_continuous.plan import Observer, Plan
from stage04_continuous.request import Request
from stage05_paged.blockmap import blockmap

from .scoring import PromptRunner
from .status import DraftCounts, Status


class Paged:
    """An engine that has `add`, `abort` and `step`. status: its state before any step, by default
    that of its pool of blocks."""

    takes_prompt_requests = True
    drafts: DraftCounts | None = None

    @property
    def health(self) -> str:
        return "ok"

    @property
    def variants(self) -> Mapping[str, bytes]:
        return {}

    def __init__(self, engine: Engine, status: Status | None = None) -> None:
        scheduler = engine.scheduler
        if status is None:
            pool = scheduler.pool
            status = Status(scheduler.max_sequences, pool.count, pool.block_size)
        self.engine, self.status, self.requests = engine, status, engine.requests
        self.steps: deque[Any] = engine.steps
        engine.runner = prompts = PromptRunner(engine.runner)
        engine.observers += [prompts, self]

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.engine.check(prompt, params)

    def add(self, request: Request) -> Request:
        self.check(request.prompt_ids, request.sampling)
        return self.enqueue(request)

    def enqueue(self, request: Request) -> Request:
        self.engine.enqueue(request)
        self._report()
        return request

    def abort(self, request_id: str) -> Output:
        output = self.engine.abort(request_id)
        self._report()
        return output

    def step(self) -> list[tuple[str, Token]]:
        tokens = self.engine.step()
        self._report()
        return tokens

    def fail(self, error: UserError) -> list[Request]:
        failed = self.engine.fail(error)
        self._report()
        return failed

    def observe(self, observer: Observer) -> None:
        self.engine.observers.append(observer)

    def before(self, plan: Plan) -> None:
        self._report()

    def after(self, plan: Plan) -> None:
        """The step's own report follows."""

    def _report(self) -> None:
        scheduler = self.engine.scheduler
        running = tuple((request.id, request.arrival) for request in scheduler.running)
        waiting = len(scheduler.waiting)
        self.status = replace(self.status, running=running, waiting=waiting, **self._memory())

    def map(self) -> Sequence[int]:
        return blockmap(self.engine.scheduler)

    def _memory(self) -> dict[str, int]:
        """The fields of the status that depend on how the engine keeps memory."""
        scheduler = self.engine.scheduler
        return {
            "owned": scheduler.pool.owned,
            "preemptions": scheduler.counts.preemptions,
            "lookup_tokens": scheduler.counts.lookup_tokens,
            "hit_tokens": scheduler.counts.hit_tokens,
        }
