"""Stage 05: the engine that takes memory a block at a time, shares it, and gives it back when it runs out.

A step is: schedule (who runs, in which blocks), move (wipe, copy, swap blocks), run (one pass, prefill and decode together, no
padding), sample, postprocess (who has ended).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared import measure
from shared.errors import UserError
from shared.records import StepRecord
from shared.roofline import forward_cost
from stage01_forward.attention import Recompute
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
from stage04_continuous.request import Request, State

from .blocks import BlockPool
from .cache import Move, PagedCache
from .memory import Cost, block_bytes, default_memory, free_memory, make_pool
from .sanitizer import Sanitizer
from .scheduler import Scheduler, Work

SEQUENCES = 8  # at a time, if nobody says how many; memory is for so many whole contexts
STEPS_KEPT = 100_000  # records; an engine behind a server runs for weeks


@dataclass(frozen=True)
class SequenceRecord:
    """What one request did in a pass: how many of its tokens were computed, in how many blocks it lies, and how it ended, if it
    did."""

    request_id: str
    prefill_tokens: int
    decode_tokens: int
    blocks: int
    finish_reason: str | None


@dataclass(frozen=True)
class BlocksRecord(StepRecord):
    """A StepRecord that tells the requests and the blocks apart; `started` is `time.perf_counter()`."""

    started: float = 0.0
    sequences: tuple[SequenceRecord, ...] = ()
    waiting: int = 0  # requests that do not run, and of these
    swapped: int = 0  # the ones whose keys and values are in the swap pool
    owned_blocks: int = 0  # during the pass, in somebody's table;
    shared_blocks: int = 0  # of these, in several;
    cached_blocks: int = 0  # in nobody's, but to be found; the others are free
    used_tokens: int = (
        0  # of all running requests, after the pass: positions that have keys and values
    )
    moves: tuple[Move, ...] = ()  # memory work before the pass
    preempted: int = 0  # requests that lost their memory before the pass
    bookkeeping_seconds: float = (
        0.0  # of `seconds`, what was not the model: scheduling, moves, sampling, postprocessing
    )


class Engine:
    """Generates with `model`, as many requests at a time as find room in the blocks of `scheduler`, by default those of
    `default_memory`. `eos_ids` None: those of the config.

    sanitize: check after every step that no block is lost, shared by mistake or read after it was given back; slow.
    """

    def __init__(
        self,
        model: GPT2,
        eos_ids: Sequence[int] | None = None,
        scheduler: Scheduler | None = None,
        sanitize: bool = False,
    ) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: deque[BlocksRecord] = deque(maxlen=STEPS_KEPT)  # one a forward pass
        self.scheduler = (
            Scheduler(self._default_pool(), SEQUENCES) if scheduler is None else scheduler
        )
        pool, swap_pool = self.scheduler.pool, self.scheduler.swap_pool
        swap_blocks = swap_pool.count if swap_pool else 0
        self.cache = PagedCache(
            model.config, pool.count, pool.block_size, swap_blocks, model.dtype, model.device
        )
        self.scheduler.longest = model.config.n_positions
        if swap_pool and self.scheduler.preemption == "auto":
            self.scheduler.cheaper = self.measure_cost().cheaper
        self.sanitizer = Sanitizer(self.scheduler, self.cache) if sanitize else None
        self.requests: dict[str, Request] = {}  # those that wait or run
        self.work: list[Work] = []  # of the pass that is being made
        self._named = 0

    def _default_pool(self) -> BlockPool:
        config, dtype = self.model.config, self.model.dtype
        return make_pool(
            default_memory(config, dtype, SEQUENCES, free_memory(self.model.device)), config, dtype
        )

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

    def add(self, request: Request, salt: bytes = b"") -> Request:
        """Put a request in line. Raises UserError if it is unfit, or if its id is that of another one in the engine.

        salt: only requests with the same one find each other's blocks; give each tenant one of its own.
        """
        self.check(request)
        self._name(request)
        self.scheduler.add(request, salt)
        self.requests[request.id] = request
        return request

    def check(self, request: Request) -> None:
        """Raise UserError if `request` can never be answered. Only settings are read, so any thread may ask."""
        check_request(request.output.prompt_ids, request.sampling, self.model.config)
        self.scheduler.check(request)

    def add_samples(
        self,
        prompt: Sequence[int],
        sampling: Sequence[SamplingParams],
        salt: bytes = b"",
        ids: Sequence[str] = (),
    ) -> list[Request]:
        """Put several samples of one prompt in line, by `ids` if there are any. The prompt is computed once, and they share its
        blocks. Raises as `add` does."""
        if not sampling:
            raise UserError("There are no samples to make: ask for at least 1.")
        requests = [
            Request(prompt, each, name)
            for each, name in zip(sampling, ids or [""] * len(sampling), strict=True)
        ]
        for request in requests:  # all or none
            self.check(request)
            self._name(request)
        for name, count in Counter(request.id for request in requests).items():
            if count > 1:
                raise UserError(f"Two samples have the id '{name}': give each an id of its own.")
        first, *others = requests
        self.scheduler.add(first, salt)
        for request in others:
            self.scheduler.add_sample(first, request)
        self.requests |= {request.id: request for request in requests}
        return requests

    def fork(
        self, request_id: str, sampling: SamplingParams | None = None, fork_id: str = ""
    ) -> Request:
        """A request that has the same prompt and answer so far as another one, and goes on by itself: with `sampling`, or with
        the other one's. They share all blocks until one writes.

        Raises UserError if no such request waits or runs, or if the new one is unfit.
        """
        parent = self._find(request_id)
        sampling = parent.sampling if sampling is None else sampling
        if len(parent.output.token_ids) >= sampling.max_tokens:
            raise UserError(
                f"The request '{request_id}' has said {len(parent.output.token_ids)} tokens already: let its fork say more."
            )
        child = Request(parent.output.prompt_ids, sampling, fork_id, parent.priority)
        child.output.token_ids += parent.output.token_ids
        child.output.logprobs += parent.output.logprobs
        self.check(child)
        self._name(child)
        self.scheduler.fork(parent, child)
        self.requests[child.id] = child
        return child

    def _name(self, request: Request) -> None:
        """Give a request an id, if it has none. Raises UserError if it has that of another one."""
        if not request.id:
            self._named += 1
            while f"request-{self._named}" in self.requests:  # somebody chose this name
                self._named += 1
            request.id = f"request-{self._named}"
        if request.id in self.requests:
            raise UserError(
                f"There is a request '{request.id}' in the engine already: give each an id of its own."
            )

    def _find(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise UserError(
                f"There is no request '{request_id}' in the engine: it was never added, or it has ended already."
            )
        return self.requests[request_id]

    def abort(self, request_id: str) -> Output:
        """End a request now, whatever it is doing; what it has said so far is returned.

        Raises UserError if no such request waits or runs.
        """
        request = self._find(request_id)
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
        preemptions = self.scheduler.counts.preemptions
        work = self.scheduler.schedule()
        moves = tuple(self.scheduler.moves)
        self.cache.move(moves)
        self.scheduler.moves.clear()
        if not work:
            if self.sanitizer:
                self.sanitizer.after()
            return []
        self.work = work
        work.sort(
            key=lambda each: (each.count, each.start)
        )  # those of like length attend together: see cache.py
        if self.sanitizer:
            self.sanitizer.before(work)
        pool = self.scheduler.pool
        owned, shared, cached = (
            pool.owned,
            pool.shared,
            len(pool.cached),
        )  # what ends in this step gives its blocks back
        scheduled = time.perf_counter()
        logits = self._forward(work)  # (requests that sample, V)
        computed = time.perf_counter()
        samples, logits = self._advance(work, logits)
        used_tokens = sum(request.computed for request in self.scheduler.running)
        sampled = self._sample(samples, logits)
        tokens = self._postprocess(work, sampled)
        ended = time.perf_counter()
        record = self._record(
            work, started, ended - started, (scheduled - started) + (ended - computed)
        )
        self.steps.append(
            replace(
                record,
                moves=moves,
                preempted=self.scheduler.counts.preemptions - preemptions,
                owned_blocks=owned,
                shared_blocks=shared,
                cached_blocks=cached,
                used_tokens=used_tokens,
            )  # fmt: skip
        )
        self.work = []
        if self.sanitizer:
            self.sanitizer.after()
        return tokens

    def fail(self, error: UserError) -> list[Request]:
        """To be called when `step` has raised: ends the requests of that pass with `error`, and returns them. The others go on;
        but if it was not the pass that failed, nobody's memory is to be trusted, and all of them end."""
        failed = [each.request for each in self.work] or list(self.requests.values())
        self.work = []
        self.scheduler.moves.clear()
        for request in failed:
            for each in (request, *self.scheduler.samples.get(request, ())):
                if each.output.finish_reason is None:
                    each.output.fail(error)
        failed = [
            request
            for request in self.requests.values()
            if request.output.finish_reason is not None
        ]
        for request in failed:
            self._finish(request)
        return failed

    @torch.inference_mode()
    def _forward(self, work: list[Work]) -> torch.Tensor:
        """Logits (requests that sample, V) of one pass over the N tokens of `work`, packed one request after the other."""
        ids = [id for each in work for id in each.request.tokens(each.start, each.count)]
        tokens = torch.tensor(ids, device=self.model.device)  # (N,)
        attention = self.cache.extend([(each.blocks, each.start, each.count) for each in work])
        hidden = self.model(tokens, attention.positions, attention.attend)  # (N,) -> (N, C)
        ends = itertools.accumulate(each.count for each in work)
        last = [end - 1 for end, each in zip(ends, work, strict=True) if each.samples]
        return self.model.logits(
            hidden[last]
        )  # (requests that sample, C) -> (requests that sample, V)

    def _advance(
        self, work: list[Work], logits: torch.Tensor
    ) -> tuple[list[Request], torch.Tensor]:
        """Write down what was computed. The requests to sample (R), and their logits (R, V): several samples of one prompt, which
        begin here, have the same."""
        samples, rows = [], []
        for each in work:
            each.request.computed += each.count
            self.scheduler.publish(each)
        for row, each in enumerate(each for each in work if each.samples):
            group = [each.request, *self.scheduler.begin_samples(each.request)]
            samples += group
            rows += [row] * len(group)
        return samples, logits[rows]

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
        """Write down what was said, and let go of whoever has ended."""
        tokens = []
        for request, token_id, logprobs in sampled:
            output = request.output
            output.append(Token(token_id, logprobs, None))
            output.finish_reason = finish_reason(
                output.token_ids,
                len(output.prompt_ids),
                request.sampling,
                self.model.config,
                self.eos_ids,
            )
            tokens.append((request.id, Token(token_id, logprobs, output.finish_reason)))
        for request in list(self.requests.values()):
            if request.output.finish_reason is not None:
                self._finish(request)
        return tokens

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.requests[request.id]

    def _record(
        self, work: list[Work], started: float, seconds: float, bookkeeping_seconds: float
    ) -> BlocksRecord:
        size = self.scheduler.pool.block_size
        sequences = []
        for each in work:
            prefill, decode = each.prefill_tokens, each.count - each.prefill_tokens
            blocks = -(-(each.start + each.count) // size)
            sequences.append(
                SequenceRecord(
                    each.request.id, prefill, decode, blocks, each.request.output.finish_reason
                )
            )
        return BlocksRecord(
            rows=len(work),
            prefill_tokens=sum(each.prefill_tokens for each in sequences),
            decode_tokens=sum(each.decode_tokens for each in sequences),
            seconds=seconds,
            started=started,
            sequences=tuple(sequences),
            waiting=self.scheduler.unfinished - len(self.scheduler.running),
            swapped=len(self.scheduler.swapped),
            bookkeeping_seconds=bookkeeping_seconds,
        )

    @torch.inference_mode()
    def measure_cost(self) -> Cost:
        """What preemption costs here: a pass over a few tokens and two copies of blocks are tried, while nothing runs."""
        config, count = self.model.config, min(64, self.model.config.n_positions)
        tokens = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        positions = torch.arange(count, device=self.model.device)
        flops = forward_cost(config, self.model.dtype, count, sampled=0).flops
        seconds = min(
            measure.seconds(lambda: self.model(tokens, positions, Recompute().attend))
            for _ in range(3)
        )
        context = self.scheduler.pool.blocks_for(
            config.n_positions
        )  # no sequence has more, and a pool may be all of memory
        many = min(context, self.cache.blocks, self.cache.swapped.shape[3])
        times = {}
        for blocks in (1, many):
            moves = [Move(kind, block, block) for kind in ("out", "in") for block in range(blocks)]
            times[blocks] = min(measure.seconds(partial(self.cache.move, moves)) for _ in range(3))
        copied = 2 * many * block_bytes(config, self.model.dtype, self.cache.block_size)
        return Cost(config, self.model.dtype, flops / seconds, copied / times[many], times[1] / 2)
