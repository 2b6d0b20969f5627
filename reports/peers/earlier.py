"""Stage 06's server with an engine from before stage 05, or with transformers, for comparisons
under load: `python -m reports.peers.earlier --engine static --max-num-seqs 8`.

All other options are the server's. A request that runs has a slot for a whole context.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from shared import cli
from shared.checkpoint import Checkpoint
from shared.config import Config
from shared.errors import UserError
from shared.models import load as load_weights
from shared.peers import TransformersSequence, transformers_model
from shared.records import StepRecord
from stage01_forward.generation import Output, Token, check_request, finish_reason
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample
from stage02_kv_cache.engine import Engine as CacheEngine
from stage03_batching.engine import Engine as StaticEngine
from stage04_continuous.engine import Engine
from stage04_continuous.engine import make as make_slots
from stage04_continuous.plan import Observer, Plan
from stage04_continuous.request import Request, State
from stage05_paged.blockmap import FREE
from stage05_paged.blocks import BlockPool
from stage05_paged.records import BlocksRecord, SequenceRecord
from stage06_serving.__main__ import main as serve
from stage06_serving.engines import Paged
from stage06_serving.status import Status

MODULE = "reports.peers.earlier"
ENGINES = ("transformers", "sequential", "static", "continuous")
TRANSFORMERS, SEQUENTIAL, STATIC, CONTINUOUS = ENGINES
# Runs a batch to its end. Yields each step's record, and its tokens by their place in the batch.
Start = Callable[[Sequence[Request]], Iterator[tuple[StepRecord, list[tuple[int, Token]]]]]


def sequential(model: GPT2) -> Start:
    """Stage 02's engine: one request after the other, with a KV cache."""
    engine = CacheEngine(model)

    def start(batch: Sequence[Request]) -> Any:
        (request,) = batch
        for token in engine.stream(request.prompt_ids, request.sampling):
            yield engine.steps[-1], [(0, token)]

    return start


def static(model: GPT2, rows: int) -> Start:
    """Stage 03's engine: a batch, padded to its longest prompt, until its last row has ended."""
    engine = StaticEngine(model, max_batch=rows)

    def start(batch: Sequence[Request]) -> Any:
        # The engine gets outputs of its own: an aborted request's row still runs to its end.
        outputs = [Output(list(request.prompt_ids)) for request in batch]
        tokens = engine.run(outputs, [request.sampling for request in batch])
        for first in tokens:
            record = engine.steps[-1]
            yield record, [first, *islice(tokens, record.rows - 1)]

    return start


def transformers(model: Any, config: Config) -> Start:
    """transformers' model and cache, one request after the other, with our sampling."""

    def start(batch: Sequence[Request]) -> Any:
        (request,) = batch
        prompt, row = list(request.prompt_ids), request.row
        sequence, fresh, reason = TransformersSequence(model), prompt, None
        while reason is None:
            started = time.perf_counter()
            logits = sequence.feed(fresh)[None]  # (1, V)
            (id,), (logprobs,) = sample(logits, [row], config.eos_ids)
            reason = finish_reason(id, row, config, config.eos_ids)
            prefill, decode = (len(prompt), 0) if fresh is prompt else (0, 1)
            record = StepRecord(1, prefill, decode, time.perf_counter() - started)
            fresh = [id]
            yield record, [(0, Token(id, logprobs, reason))]

    return start


class Batches:
    """An engine that takes up to `max_sequences` requests, then none until all of them have ended;
    for the server its own scheduler, without a runner's passes."""

    def __init__(self, config: Config, rows: int, start: Start, steps_kept: int) -> None:
        self.config, self.max_sequences, self.start = config, rows, start
        self.scheduler = self.runner = self
        self.observers: list[Observer] = []  # there are no plans
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: deque[BlocksRecord] = deque(maxlen=steps_kept)
        self._batch: Sequence[Request] = ()  # as started, ended requests included
        self._batch_steps: Iterator[tuple[StepRecord, list[tuple[int, Token]]]] = iter(())
        self._arrivals = count()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        check_request(prompt, params, self.config)

    def enqueue(self, request: Request) -> Request:
        request.move(State.WAITING)
        request.arrival = next(self._arrivals)
        self.requests[request.id] = request
        self.waiting.append(request)
        return request

    def abort(self, request_id: str) -> Output:
        output = self.requests[request_id].output
        output.finish_reason = "abort"
        self._release()
        return output

    def fail(self, error: UserError) -> list[Request]:
        failed = self.running or self.waiting
        for request in failed:
            request.output.fail(error)
        self._release()
        return failed

    def step(self) -> list[tuple[str, Token]]:
        if not self.running:
            rows = self.max_sequences
            self.running, self.waiting = self.waiting[:rows], self.waiting[rows:]
            if not self.running:
                return []
            for request in self.running:
                request.move(State.RUNNING)
            self._batch = tuple(self.running)
            self._batch_steps = self.start(self._batch)
        started, tokens, sequences = time.perf_counter(), [], []
        record, computed = next(self._batch_steps)
        for row, token in computed:
            request = self._batch[row]
            if request.state is State.RUNNING:
                prefill = 0 if request.output.token_ids else len(request.prompt_ids)
                share = prefill, 0 if prefill else 1
                sequences.append(SequenceRecord(request.id, *share, 1, token.finish_reason))
                request.output.append(token)
                tokens.append((request.id, token))
        self.steps.append(in_blocks(record, started, sequences, len(self.waiting)))
        self._release()
        return tokens

    def _release(self) -> None:
        """Forget the requests that have ended."""
        for request in list(self.requests.values()):
            if request.output.finish_reason is not None:
                request.move(State.FINISHED)
                del self.requests[request.id]
        self.running = [one for one in self.running if one.id in self.requests]
        self.waiting = [one for one in self.waiting if one.id in self.requests]


class Slots(Paged):
    """An engine whose running requests have a slot each, which the server takes for a block."""

    def __init__(self, engine: Any) -> None:
        rows = engine.scheduler.max_sequences
        super().__init__(engine, Status(rows, rows, engine.config.n_positions))
        self.takes_prompt_requests = isinstance(engine, Engine)
        if self.takes_prompt_requests:
            self.steps = deque(maxlen=engine.steps.maxlen)

    def map(self) -> Sequence[int]:
        taken = [number for _, number in self.status.running]
        return taken + [FREE] * (self.status.blocks - len(taken))

    def after(self, plan: Plan) -> None:
        if plan:
            record = self.engine.steps[-1]
            sequences = [
                SequenceRecord(
                    slot.request_id, slot.prefill_tokens, slot.decode_tokens, 1, slot.finish_reason
                )
                for slot in record.slots
            ]
            self.steps.append(in_blocks(record, record.started, sequences, record.waiting))

    def _memory(self) -> dict[str, int]:
        return {"owned": len(self.engine.scheduler.running)}


def in_blocks(
    record: StepRecord, started: float, sequences: Sequence[SequenceRecord], waiting: int
) -> BlocksRecord:
    """The record of a step as one of stage 05."""
    kept = {name: getattr(record, name) for name in StepRecord.__dataclass_fields__}
    own: dict[str, Any] = {"started": started, "sequences": tuple(sequences), "waiting": waiting}
    return BlocksRecord(**kept, **own, owned_blocks=len(sequences))


@dataclass
class Maker:
    """What stage 06's server makes the engine `name` with."""

    name: str
    serve = Slots
    weights: Checkpoint | None = field(default=None, init=False)  # of transformers

    def load(self, options: argparse.Namespace) -> cli.Loaded:
        if self.name == TRANSFORMERS:
            random = options.random_weights
            self.weights = load_weights(options.model, random_weights=random)
        return cli.load_model_from(options)

    def make(
        self,
        model: GPT2,
        pool: BlockPool,
        max_sequences: int,
        token_budget: int,
        steps_kept: int,
        **_: Any,
    ) -> Any:
        """The engine, with as many whole contexts as the memory of `pool` has room for. Raises
        UserError if that is none."""
        config = model.config
        rows = min(max_sequences, pool.count * pool.block_size // config.n_positions)
        if not rows:
            raise UserError("The memory holds no whole context: give more with --kv-memory.")
        if self.name == CONTINUOUS:
            return make_slots(model, rows, token_budget=token_budget, steps_kept=steps_kept)
        if self.name == STATIC:
            return Batches(config, rows, static(model, rows), steps_kept)
        if self.name == SEQUENTIAL:
            return Batches(config, 1, sequential(model), steps_kept)
        assert self.weights is not None
        peer = transformers_model(self.weights, model.dtype).to(model.device)
        return Batches(config, 1, transformers(peer, config), steps_kept)


def main(argv: list[str] | None = None) -> int:
    example = f"  python -m {MODULE} --engine static --max-num-seqs 8"
    parser = cli.Parser(MODULE, str(__doc__), example)
    parser.add_argument("--engine", required=True, choices=ENGINES, help="the engine")
    options, rest = parser.parse_known_args(argv)
    return serve(rest, Maker(options.engine))


if __name__ == "__main__":
    cli.run(main)
