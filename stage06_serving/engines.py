"""Earlier engines behind the same HTTP, `--engine static` and the like, so that a load test can tell what each step brought.

The server is written for stage 05's engine. Here is what it asks of one, put around those that lack it, and nothing more: who
runs when and beside whom is decided where it was. `Batches` feeds an engine that takes some requests and runs them to the end;
`Slots` wraps stage 04's, which lets them come and go.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.config import Config
from shared.errors import UserError
from shared.peers import TransformersSequence
from shared.records import StepRecord
from stage01_forward.fast_sampling import sample
from stage01_forward.generation import NOT_FINITE, Output, Token, check_request, finish_reason
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage02_kv_cache.engine import Engine as CacheEngine
from stage03_batching.engine import Engine as StaticEngine
from stage04_continuous.engine import STEPS_KEPT, SlotsRecord
from stage04_continuous.engine import Engine as ContinuousEngine
from stage04_continuous.request import Request, State
from stage05_paged.blockmap import FREE
from stage05_paged.engine import BlocksRecord, Engine, SequenceRecord
from stage05_paged.scheduler import Counts


@dataclass
class SlotPool:
    """Memory as the metrics and the page see it: a slot, which is a whole context, is one block."""

    count: int
    block_size: int  # tokens
    owned: int = 0


@dataclass
class Line:
    """Who waits and who runs: what the server reads of a scheduler."""

    max_sequences: int
    pool: SlotPool
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)  # nothing is ever found again, or taken away

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def set(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        self.running, self.waiting = list(running), list(waiting)
        self.pool.owned = len(self.running)

    def slots(self) -> list[int]:
        """The map of the slots, as `blockmap` has it for blocks."""
        taken = [request.arrival for request in self.running]
        return taken + [FREE] * (self.pool.count - len(taken))


class Adapter:
    """What the server asks of any engine. `model` is also what scores the prompts of an echo."""

    def __init__(self, model: GPT2, rows: int) -> None:
        self.model = model
        self.scheduler = Line(rows, SlotPool(rows, model.config.n_positions))
        self.requests: dict[str, Request] = {}  # those that wait or run
        self.steps: deque[BlocksRecord] = deque(maxlen=STEPS_KEPT)

    def check(self, request: Request) -> None:
        """Raise UserError if `request` can never be answered."""
        check_request(request.output.prompt_ids, request.sampling, self.model.config)

    def add(self, request: Request) -> Request:
        """Put a request, which has an id, in line. Raises UserError if it is unfit."""
        raise NotImplementedError

    def add_samples(
        self,
        prompt: Sequence[int],
        sampling: Sequence[SamplingParams],
        salt: bytes,
        ids: Sequence[str],
    ) -> list[Request]:
        """Several samples of one prompt. They share nothing here, so there is nothing to salt. Raises UserError if unfit."""
        requests = [Request(prompt, each, name) for each, name in zip(sampling, ids, strict=True)]
        for request in requests:  # all or none
            self.check(request)
        return [self.add(request) for request in requests]

    def abort(self, request_id: str) -> Output:
        """End a request now, whatever it is doing."""
        raise NotImplementedError

    def step(self) -> list[tuple[str, Token]]:
        """One forward pass, if there is anything to do; the tokens that came of it, each with the id of its request."""
        raise NotImplementedError

    def fail(self, error: UserError) -> list[Request]:
        """To be called when `step` has raised: those that run end with `error`, and the others go on; but if nobody ran, it was
        not the pass that failed, and all of them end."""
        failed = list(self.scheduler.running) or list(self.requests.values())
        for request in failed:
            self.abort(request.id)
            request.output.fail(error)
        return failed


# ---- engines that run a batch to its end ----------------------------------------------------------------------------------


class Runner(Protocol):
    """An engine that takes some requests at a time and answers all of them before it takes others."""

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        """Each token with the place of its request, pass by pass. A place that says no more has failed."""
        ...

    @property
    def record(self) -> StepRecord:
        """Of the newest pass; `rows` are its tokens."""
        ...


class OneByOne:
    """Stage 02: one request after the other, with a KV cache."""

    def __init__(self, model: GPT2) -> None:
        self.engine = CacheEngine(model)

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        (request,) = requests
        return (
            (0, token) for token in self.engine.stream(request.output.prompt_ids, request.sampling)
        )

    @property
    def record(self) -> StepRecord:
        return self.engine.steps[-1]


class Static:
    """Stage 03: a batch, padded to its longest prompt, until its last row has ended."""

    def __init__(self, model: GPT2, rows: int) -> None:
        self.engine = StaticEngine(model, max_batch=rows)

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        outputs = [
            Output(list(request.output.prompt_ids)) for request in requests
        ]  # a row goes on when nobody reads it
        return self.engine.run(outputs, [request.sampling for request in requests])

    @property
    def record(self) -> StepRecord:
        return self.engine.steps[-1]


class Transformers:
    """transformers' own model and cache, one request after the other. The sampling is ours, as everywhere."""

    def __init__(self, theirs: Any, config: Config) -> None:
        self.theirs, self.config = theirs, config
        self.record = StepRecord(0, 0, 0, 0.0)

    def start(self, requests: Sequence[Request]) -> Iterator[tuple[int, Token]]:
        (request,) = requests
        prompt, params, eos = request.output.prompt_ids, request.sampling, self.config.eos_ids
        output_ids: list[int] = []
        sequence, fresh, reason = TransformersSequence(self.theirs), prompt, None
        while reason is None:
            started = time.perf_counter()
            logits = sequence.feed(fresh)[None]  # (1, V)
            ids, logprobs = sample(
                logits, [params], [(prompt, output_ids)], [request.generator], eos
            )
            output_ids.append(int(ids[0]))
            reason = finish_reason(output_ids, len(prompt), params, self.config, eos)
            prefill = len(fresh) if fresh is prompt else 0
            self.record = StepRecord(1, prefill, 0 if prefill else 1, time.perf_counter() - started)
            fresh = output_ids[-1:]
            yield 0, Token(output_ids[-1], logprobs[0], reason)


class Batches(Adapter):
    """Feeds `runner` from a line: up to `rows` of those who wait, then nobody until all of these have ended."""

    def __init__(self, model: GPT2, runner: Runner, rows: int) -> None:
        super().__init__(model, rows)
        self.runner = runner
        self._batch: list[Request] = []
        self._tokens: Iterator[tuple[int, Token]] = iter(())
        self._arrivals = 0

    def add(self, request: Request) -> Request:
        self.check(request)
        request.move(State.WAITING)
        request.arrival = self._arrivals
        self._arrivals += 1
        self.requests[request.id] = request
        line = self.scheduler
        line.set(line.running, [*line.waiting, request])
        return request

    def abort(self, request_id: str) -> Output:
        request = self.requests[request_id]
        request.output.finish_reason = "abort"
        self._finish(request)
        return request.output

    def step(self) -> list[tuple[str, Token]]:
        line = self.scheduler
        if not line.running:
            if not line.waiting:
                return []
            self._batch, waiting = (
                line.waiting[: line.max_sequences],
                line.waiting[line.max_sequences :],
            )
            for request in self._batch:
                request.move(State.RUNNING)
            line.set(self._batch, waiting)
            self._tokens = self.runner.start(self._batch)
        started = time.perf_counter()
        before = {request.id: len(request.output.token_ids) for request in line.running}
        said: list[tuple[str, Token]] = []
        with contextlib.suppress(
            UserError
        ):  # of an engine with one row whose scores are not numbers
            for count, (place, token) in enumerate(self._tokens, 1):
                request = self._batch[place]
                if (
                    request.state is State.RUNNING
                ):  # who has left is still computed: the batch is as it was made
                    request.output.append(token)
                    said.append((request.id, token))
                if count == self.runner.record.rows:
                    break
        for request in line.running:
            if (
                len(request.output.token_ids) == before[request.id]
            ):  # a pass has a token for everybody who can go on
                request.output.fail(UserError(NOT_FINITE))
        if said:
            self._keep(started, before)
        for request in line.running:
            if request.output.finish_reason is not None:
                self._finish(request)
        return said

    def _finish(self, request: Request) -> None:
        request.move(State.FINISHED)
        del self.requests[request.id]
        line = self.scheduler
        line.set(
            [each for each in line.running if each is not request],
            [each for each in line.waiting if each is not request],
        )

    def _keep(self, started: float, before: dict[str, int]) -> None:
        """Write down the pass: a prompt is computed in the first one of its batch, and one token in each that follows."""
        sequences = []
        for request in self.scheduler.running:
            output = request.output
            prefill = 0 if before[request.id] else len(output.prompt_ids)
            sequences.append(
                SequenceRecord(request.id, prefill, 0 if prefill else 1, 1, output.finish_reason)
            )
        record = self.runner.record
        self.steps.append(
            BlocksRecord(
                record.rows, record.prefill_tokens, record.decode_tokens, record.seconds, record.wasted_tokens, started,
                tuple(sequences), len(self.scheduler.waiting), owned_blocks=self.scheduler.pool.owned,
            )
        )  # fmt: skip


# ---- stage 04's ---------------------------------------------------------------------------------------------------------


class Slots(Adapter):
    """Stage 04's engine: requests come and go, and each has a slot for a whole context."""

    def __init__(self, engine: ContinuousEngine) -> None:
        super().__init__(engine.model, len(engine.scheduler.free_slots))
        self.engine = engine
        self.engine.steps = deque(maxlen=1)  # they are kept here
        self.requests = engine.requests

    def add(self, request: Request) -> Request:
        self.engine.add(request)
        self._look()
        return request

    def abort(self, request_id: str) -> Output:
        output = self.engine.abort(request_id)
        self._look()
        return output

    def step(self) -> list[tuple[str, Token]]:
        before = self.engine.steps[-1] if self.engine.steps else None
        try:
            said = self.engine.step()
        finally:
            self._look()  # who was in a pass that failed, too
        record = self.engine.steps[-1] if self.engine.steps else None
        if record is not None and record is not before:
            self.steps.append(in_blocks(record))
        return said

    def _look(self) -> None:
        """Bring the line up to date."""
        self.scheduler.set(self.engine.scheduler.running, self.engine.scheduler.waiting)


def in_blocks(record: SlotsRecord) -> BlocksRecord:
    """A pass of stage 04 as stage 05 writes it down: a slot is a block."""
    return BlocksRecord(
        record.rows, record.prefill_tokens, record.decode_tokens, record.seconds,
        started=record.started,
        sequences=tuple(
            SequenceRecord(each.request_id, each.prefill_tokens, each.decode_tokens, 1, each.finish_reason)
            for each in record.slots
        ),
        waiting=record.waiting,
        owned_blocks=len(record.slots),
        bookkeeping_seconds=record.bookkeeping_seconds,
    )  # fmt: skip


AnyEngine = Engine | Adapter
