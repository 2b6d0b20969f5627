"""The engines behind `--engine`: stage 05's and earlier ones, so that a load test can show what
each stage gained.

Each engine still decides which requests run together, and when: `Stepping` wraps an engine that
admits and releases requests at every step (stage 04 and later), `Batches` feeds an engine that
takes some requests and runs them to the end.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shared.config import Config
from shared.errors import UserError
from shared.peers import TransformersSequence
from shared.records import StepRecord
from stage01_forward.generation import NOT_FINITE, Output, Token, check_request, finish_reason
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample
from stage02_kv_cache.engine import Engine as CacheEngine
from stage03_batching.engine import Engine as StaticEngine
from stage04_continuous.engine import Engine
from stage04_continuous.plan import Observer, Plan
from stage04_continuous.records import SlotsRecord
from stage04_continuous.request import Request, State
from stage05_paged.blockmap import FREE, blockmap
from stage05_paged.records import BlocksRecord, SequenceRecord

from .scoring import PromptRunner
from .status import DiskCounts, DraftCounts, Status


class Stepping:
    """An engine that has `add`, `abort` and `step`. `status` is its state before any step."""

    steps: deque[BlocksRecord]
    takes_prompt_requests = True
    disk: DiskCounts | None = None
    drafts: DraftCounts | None = None

    @property
    def health(self) -> str:
        return "ok"

    @property
    def variants(self) -> Mapping[str, bytes]:
        return {}

    def __init__(self, engine: Engine, status: Status) -> None:
        self.engine, self.status, self.requests = engine, status, engine.requests
        self.embeds = hasattr(engine.runner, "hidden")
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

    def _memory(self) -> dict[str, int]:
        """The fields of Status that depend on how this engine keeps memory."""
        raise NotImplementedError


class Paged(Stepping):
    """Stage 05's engine, or a later one with the same kind of scheduler."""

    def __init__(self, engine: Engine) -> None:
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        super().__init__(engine, Status(scheduler.max_sequences, pool.count, pool.block_size))
        self.steps: deque[Any] = engine.steps

    def map(self) -> Sequence[int]:
        return blockmap(self.engine.scheduler)

    def _memory(self) -> dict[str, int]:
        scheduler = self.engine.scheduler
        return {
            "owned": scheduler.pool.owned,
            "preemptions": scheduler.counts.preemptions,
            "lookup_tokens": scheduler.counts.lookup_tokens,
            "hit_tokens": scheduler.counts.hit_tokens,
        }


class Slots(Stepping):
    """Stage 04's engine: each running request has a slot for a whole context."""

    def __init__(self, engine: Engine) -> None:
        rows = engine.scheduler.max_sequences
        super().__init__(engine, Status(rows, rows, engine.config.n_positions))
        self.steps = deque(maxlen=engine.steps.maxlen)

    def map(self) -> Sequence[int]:
        return slot_map(self.status)

    def after(self, plan: Plan) -> None:
        if plan:
            self.steps.append(in_blocks(self.engine.steps[-1]))

    def _memory(self) -> dict[str, int]:
        return {"owned": len(self.engine.scheduler.running)}


def slot_map(status: Status) -> list[int]:
    """The map of an engine whose running requests have one slot each."""
    taken = [number for _, number in status.running]
    return taken + [FREE] * (status.blocks - len(taken))


def in_blocks(record: SlotsRecord) -> BlocksRecord:
    """A record of stage 04 as one of stage 05: a slot is a block."""
    return BlocksRecord(
        record.rows,
        record.prefill_tokens,
        record.decode_tokens,
        record.seconds,
        started=record.started,
        sequences=tuple(
            SequenceRecord(
                slot.request_id, slot.prefill_tokens, slot.decode_tokens, 1, slot.finish_reason
            )
            for slot in record.slots
        ),
        waiting=record.waiting,
        owned_blocks=len(record.slots),
        bookkeeping_seconds=record.bookkeeping_seconds,
    )


# ---- engines that run a batch to its end --------------------------------------------------------


class BatchEngine(Protocol):
    """An engine that finishes all requests of a batch before it takes others."""

    config: Config

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        """The tokens of each step, each with the index of its request. A request without a token in
        a step has failed."""
        ...

    @property
    def record(self) -> StepRecord:
        """The newest step; `rows` counts its tokens."""
        ...


class OneByOne:
    """Stage 02's engine: one request after the other, with a KV cache."""

    def __init__(self, model: GPT2) -> None:
        self.engine = CacheEngine(model)
        self.config = self.engine.config

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        (request,) = requests
        tokens = self.engine.stream(request.output.prompt_ids, request.sampling)
        return ((0, token) for token in tokens)

    @property
    def record(self) -> StepRecord:
        return self.engine.steps[-1]


class Static:
    """Stage 03's engine: a batch, padded to its longest prompt, until its last row has ended."""

    def __init__(self, model: GPT2, rows: int) -> None:
        self.engine = StaticEngine(model, max_batch=rows)
        self.config = self.engine.config

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        # The engine gets outputs of its own: an aborted request's row still runs to its end.
        outputs = [Output(list(request.output.prompt_ids)) for request in requests]
        return self.engine.run(outputs, [request.sampling for request in requests])

    @property
    def record(self) -> StepRecord:
        return self.engine.steps[-1]


class Transformers:
    """transformers' model and cache, one request after the other, with our sampling."""

    def __init__(self, model: Any, config: Config) -> None:
        self.model, self.config = model, config
        self.record = StepRecord(0, 0, 0, 0.0)

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        (request,) = requests
        prompt, row, eos_ids = request.output.prompt_ids, request.row, self.config.eos_ids
        sequence, fresh, reason = TransformersSequence(self.model), prompt, None
        while reason is None:
            started = time.perf_counter()
            logits = sequence.feed(fresh)[None]  # (1, V)
            (id,), (logprobs,) = sample(logits, [row], eos_ids)
            reason = finish_reason(id, row, self.config, eos_ids)
            prefill = len(fresh) if fresh is prompt else 0
            seconds = time.perf_counter() - started
            self.record = StepRecord(1, prefill, 0 if prefill else 1, seconds)
            fresh = [id]
            yield 0, Token(id, logprobs, reason)


class Batches:
    """Feeds `engine` from a queue: up to `rows` requests, then none until all have ended."""

    health = "ok"
    variants: Mapping[str, bytes] = {}
    takes_prompt_requests = embeds = False
    disk: DiskCounts | None = None
    drafts: DraftCounts | None = None

    def __init__(self, engine: BatchEngine, rows: int, steps_kept: int) -> None:
        self.engine = engine
        self.status = Status(rows, rows, engine.config.n_positions)
        self.steps: deque[BlocksRecord] = deque(maxlen=steps_kept)
        self.requests: dict[str, Request] = {}  # those that wait or run
        self._batch: list[Request] = []  # as started, ended requests included
        self._tokens: Iterator[tuple[int, Token]] = iter(())
        self._arrivals = 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_request(prompt, params, self.engine.config)

    def add(self, request: Request) -> Request:
        self.check(request.prompt_ids, request.sampling)
        return self.enqueue(request)

    def enqueue(self, request: Request) -> Request:
        request.move(State.WAITING)
        request.arrival = self._arrivals
        self._arrivals += 1
        self.requests[request.id] = request
        self._report()
        return request

    def abort(self, request_id: str) -> Output:
        if request_id not in self.requests:
            raise UserError(
                f"There is no request '{request_id}' in the engine: "
                "it was never added, or it has ended already."
            )
        request = self.requests[request_id]
        request.output.finish_reason = "abort"
        self._release()
        return request.output

    def step(self) -> list[tuple[str, Token]]:
        if not self._in(State.RUNNING):
            self._batch = self._in(State.WAITING)[: self.status.max_sequences]
            if not self._batch:
                return []
            for request in self._batch:
                request.move(State.RUNNING)
            self._report()
            self._tokens = self.engine.start(self._batch)
        running, started = self._in(State.RUNNING), time.perf_counter()
        before = {request.id: len(request.output.token_ids) for request in running}
        tokens: list[tuple[str, Token]] = []
        with contextlib.suppress(UserError):  # the logits of an engine with one row are not finite
            for count, (row, token) in enumerate(self._tokens, 1):
                request = self._batch[row]
                if request.state is State.RUNNING:  # an aborted request's row is still computed
                    request.output.append(token)
                    tokens.append((request.id, token))
                if count == self.engine.record.rows:
                    break
        for request in running:
            if len(request.output.token_ids) == before[request.id]:
                request.output.fail(UserError(NOT_FINITE))
        if tokens:
            self._record(running, started, before)
        self._release()
        return tokens

    def observe(self, observer: Observer) -> None:
        """It has no plans."""

    def fail(self, error: UserError) -> list[Request]:
        failed = self._in(State.RUNNING) or self._in(State.WAITING)
        for request in failed:
            request.output.fail(error)
        self._release()
        return failed

    def map(self) -> Sequence[int]:
        return slot_map(self.status)

    def _in(self, state: State) -> list[Request]:
        return [request for request in self.requests.values() if request.state is state]

    def _release(self) -> None:
        """Forget the requests that have ended."""
        for request in list(self.requests.values()):
            if request.output.finish_reason is not None:
                request.move(State.FINISHED)
                del self.requests[request.id]
        self._report()

    def _report(self) -> None:
        running = tuple((request.id, request.arrival) for request in self._in(State.RUNNING))
        waiting = len(self._in(State.WAITING))
        self.status = replace(self.status, owned=len(running), running=running, waiting=waiting)

    def _record(self, running: list[Request], started: float, before: dict[str, int]) -> None:
        """Record the step: the prompts if it is its batch's first, else one token for each row."""
        sequences = []
        for request in running:
            output = request.output
            prefill = 0 if before[request.id] else len(output.prompt_ids)
            sequences.append(
                SequenceRecord(request.id, prefill, 0 if prefill else 1, 1, output.finish_reason)
            )
        record = self.engine.record
        self.steps.append(
            BlocksRecord(
                record.rows,
                record.prefill_tokens,
                record.decode_tokens,
                record.seconds,
                record.wasted_tokens,
                started,
                tuple(sequences),
                self.status.waiting,
                owned_blocks=self.status.owned,
            )
        )
