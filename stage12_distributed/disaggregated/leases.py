"""Blocks that go from one process to another: leases over one memory.

Two processes map one file as the memory of their blocks. Each can read all of it, but writes only
the blocks of its own pool. The prefill process computes a prompt and sends the numbers of its
blocks. They are leased: it leaves them unchanged until it learns that they were copied, or until
the lease expires.

A lease may expire while the other process copies. So each block has a generation, in a second file:
the number of times that it was taken for new contents. The reader copies a block first and reads
its generation afterwards. If the generation differs from the lease's, the copy is worthless, and
the request fails.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from shared.config import Config
from shared.errors import UserError
from stage01_forward.generation import Token, finish_reason
from stage04_continuous import drive
from stage04_continuous.request import Request
from stage04_continuous.runner import Attention
from stage05_paged.blocks import BlockPool, BlockTable, Move
from stage05_paged.cache import Share
from stage05_paged.engine import cache_type
from stage05_paged.planes import Device

from ..tensor import shard

EXPIRED = "The lease on the prompt's blocks expired before the copy: send the request again."
ENDED = "The prefill process has ended: restart both."
OTHER = (
    "The prefill process has another model, or keeps keys and values in another format: start both "
    "with the same model, weights and formats."
)
SILENT = "The prefill process has not answered within {:g} s: restart both."
LEASE = 10.0  # seconds
DEADLINE = 30.0  # seconds in which the prefill process must answer while prompts wait
PATIENCE = 0.01  # seconds to wait for a message when there is nothing to compute


@dataclass(frozen=True)
class Memory:
    """Blocks in two files that both processes map: the first `prefill` blocks belong to one
    process, the next `decode` blocks to the other."""

    folder: Path
    prefill: int
    decode: int

    @property
    def blocks(self) -> int:
        return self.prefill + self.decode

    def mapped(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """(count,) numbers in the file `name`, zero at first."""
        return torch.from_file(str(self.folder / name), shared=True, size=count, dtype=dtype)

    def pool(self, decode: bool, block_size: int) -> BlockPool:
        """The pool of one process, in which the other's blocks are owned from the start."""
        pool = BlockPool(self.blocks if decode else self.prefill, block_size)
        for _ in range(self.prefill if decode else 0):
            pool.take()
        return pool


class MappedCache:
    """Stage 05's cache in `memory`. A block's generation goes up before the block is written."""

    def __init__(
        self, memory: Memory, config: Config, blocks: int, block_size: int, swap_blocks: int,
        dtype: torch.dtype, device: Device,
    ) -> None:  # fmt: skip
        self.generations = memory.mapped("generations", memory.blocks, torch.int64)
        names = map("plane {}".format, itertools.count())

        def allocate(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
            return memory.mapped(next(names), math.prod(shape), dtype).view(*shape)

        sizes = memory.blocks, block_size, swap_blocks, dtype, device
        self.paged = cache_type(config, dtype)(config, *sizes, allocate=allocate)
        self.blocks, self.block_size, self.dtype = memory.blocks, block_size, dtype
        self.memory = self.paged.memory

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.generations[move.target] += 1
        self.paged.move(moves)

    def extend(self, shares: Sequence[Share]) -> Attention:
        return self.paged.extend(shares)


@dataclass(frozen=True)
class Lease:
    """A computed prompt's full blocks, and the answer's first token. identity: of what computed
    them. error: why there are none."""

    id: str
    first: int = 0
    blocks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    expires: float = 0.0  # time.monotonic(), which all processes of a machine share
    identity: bytes = b""
    error: str | None = None


def identity_of(engine: Any) -> bytes:
    """Equal for engines that read each other's blocks: the same model, and the same dtype of keys
    and values."""
    return shard.digest(engine.runner.model) + str(engine.runner.cache.dtype).encode()


class Prefill:
    """Computes prompts that arrive on `connection`, and leases their blocks for `seconds`."""

    def __init__(self, engine: Any, connection: Connection, seconds: float = LEASE) -> None:
        self.engine, self.connection, self.seconds = engine, connection, seconds
        self.clock, self.identity = time.monotonic, identity_of(engine)
        self.pool, self.generations = engine.scheduler.pool, engine.runner.cache.generations
        self.leases: dict[str, Lease] = {}

    def turn(self) -> None:
        """Read messages, release expired leases, and run a step. Raises EOFError if the other
        process has ended."""
        while self.connection.poll(0 if self.engine.requests and self.engine.plan else PATIENCE):
            name, prompt, sampling = self.connection.recv()
            if prompt is None:
                self._release(name)
                continue
            try:
                self.engine.add(Request(prompt, replace(sampling, max_tokens=1), name))
            except UserError as error:
                self.connection.send(Lease(name, error=str(error)))
        for name in [n for n, lease in self.leases.items() if lease.expires <= self.clock()]:
            self._release(name)
        requests = dict(self.engine.requests)
        for name, token in self.engine.step() if requests else ():
            self._lease(requests[name], token)

    def _lease(self, request: Request, token: Token) -> None:
        # They have just become cached: all that the scheduler has published is still there.
        blocks = self.pool.match(BlockTable(self.pool).digest(request.output.prompt_ids))
        for block in blocks:
            self.pool.share(block)
        generations, expires = self.generations[blocks].tolist(), self.clock() + self.seconds
        held = tuple(blocks), tuple(generations)
        lease = Lease(request.id, token.id, *held, expires, self.identity)
        self.leases[request.id] = lease
        self.connection.send(lease)

    def _release(self, name: str) -> None:
        """End a lease: blocks that no other lease or request holds may be taken from now on."""
        if name in self.leases:
            for block in reversed(self.leases.pop(name).blocks):
                self.pool.give_back(block)


def send_all(outbox: SimpleQueue[Any], connection: Connection) -> None:
    """Send what is put into `outbox`, until the other process ends, which `step` notices."""
    with contextlib.suppress(OSError):
        while True:
            connection.send(outbox.get())


class Disaggregated:
    """An engine that decodes, and has its prompts computed at the other end of `connection`. If
    nothing comes from there for `deadline` seconds, the requests whose prompts wait fail.

    It offers what stage 05's engine does, but greedy only: to sample, the random generator's state
    would have to travel with the blocks.
    """

    generate, stream, run = drive.generate, drive.stream, drive.run

    def __init__(self, engine: Any, connection: Connection, deadline: float = DEADLINE) -> None:
        self.engine, self.connection, self.clock = engine, connection, time.monotonic
        self.pool, self.cache = engine.scheduler.pool, engine.runner.cache
        self.steps, self.deadline, self.identity = engine.steps, deadline, identity_of(engine)
        self.capacity = self.pool.available  # blocks
        self.remote: dict[str, Request] = {}  # whose prompts are computed elsewhere
        self.expired = self._named = 0
        self._heard = self.clock()  # when the other process last answered, or had nothing to do
        # A process that stands still reads nothing: only this thread waits until it does.
        outbox: SimpleQueue[Any] = SimpleQueue()
        self.post: Callable[[Any], object] = outbox.put
        threading.Thread(target=send_all, args=(outbox, connection), daemon=True).start()

    @property
    def requests(self) -> dict[str, Request]:
        """The requests that have not ended."""
        return self.remote | self.engine.requests

    def add(self, request: Request) -> Request:
        """Have a request's prompt computed. Raises UserError if the request is invalid."""
        self.engine.check(request.prompt_ids, request.sampling)
        most = len(request.prompt_ids) + request.sampling.max_tokens
        if request.sampling.temperature > 0:
            raise UserError("Disaggregated decoding is greedy: set the temperature to 0.")
        if self.pool.blocks_for(most) > self.capacity:
            raise UserError(
                f"Prompt and answer of up to {most} tokens need more than the {self.capacity} "
                "blocks of the decode process: ask for fewer tokens."
            )
        self._named += 1
        request.id = request.id or f"disaggregated-{self._named}"
        if not self.remote:
            self._heard = self.clock()
        self.post((request.id, request.output.prompt_ids, request.sampling))
        self.remote[request.id] = request
        return request

    def abort(self, name: str) -> Any:
        if name not in self.remote:
            return self.engine.abort(name)
        request = self.remote.pop(name)  # its lease is given back on arrival
        request.output.finish_reason = "abort"
        return request.output

    def step(self) -> list[tuple[str, Token]]:
        """Take the prompts that were computed elsewhere, then run a pass. Returns new tokens."""
        tokens = []
        try:
            while self.connection.poll(0 if self.engine.requests else PATIENCE):
                tokens += self._take(self.connection.recv())
                self._heard = self.clock()
            if self.remote and self.clock() - self._heard > self.deadline:
                self._fail(SILENT.format(self.deadline))
        except (EOFError, OSError):
            self._fail(ENDED)
        return tokens + (self.engine.step() if self.engine.requests else [])

    def _fail(self, why: str) -> None:
        """End the requests whose prompts are computed elsewhere."""
        for request in self.remote.values():
            request.output.fail(UserError(why))
        self.remote.clear()

    def _take(self, lease: Lease) -> list[tuple[str, Token]]:
        """Copy a prompt's blocks. Returns its answer's first token; the engine computes the
        others."""
        request = self.remote.pop(lease.id, None)
        error = lease.error or (None if lease.identity == self.identity else OTHER)
        copied = request is not None and error is None and self._copy(request, lease)
        self.post((lease.id, None, None))
        if request is None:
            return []
        if not copied:
            self.expired += error is None
            request.output.fail(UserError(error or EXPIRED))
            return []
        config, eos = self.engine.config, self.engine.eos_ids
        token = Token(lease.first, None, finish_reason(lease.first, request.row, config, eos))
        request.output.append(token)
        if token.finish_reason is None:
            self.engine.enqueue(request)
        return [(request.id, token)]

    def _copy(self, request: Request, lease: Lease) -> bool:
        """Copy leased blocks into this engine's prefix cache, where the request will find them.
        Returns whether the copies are what was leased. The request will compute blocks for which
        the cache has no room."""
        digests = BlockTable(self.pool).digest(request.output.prompt_ids)[: len(lease.blocks)]
        held = self.pool.match(digests)
        for block in held:
            self.pool.share(block)  # so that `take` does not evict them
        missing = list(zip(lease.blocks, digests, strict=True))[len(held) :][: self.pool.available]
        copies = [self.pool.take() for _ in missing]
        moves = [Move("copy", there, b) for (there, _), b in zip(missing, copies, strict=True)]
        self.cache.move(moves)
        valid = self.clock() < lease.expires
        valid &= self.cache.generations[list(lease.blocks)].tolist() == list(lease.generations)
        for block, (_, digest) in zip(copies, missing, strict=True):
            if valid:
                self.pool.publish(block, digest)
        for block in reversed(held + copies):
            self.pool.give_back(block)
        return valid
