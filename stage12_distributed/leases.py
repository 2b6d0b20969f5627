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

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.config import Config
from shared.errors import UserError
from stage01_forward.generation import Token, finish_reason
from stage04_continuous import drive
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool, BlockTable, Move
from stage05_paged.cache import PagedAttention, PagedCache, Share

EXPIRED = "The lease on the prompt's blocks expired before the copy: send the request again."
ENDED = "The prefill process has ended: restart both."
LEASE = 10.0  # seconds
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
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:  # fmt: skip
        self.generations = memory.mapped("generations", memory.blocks, torch.int64)
        self.paged = PagedCache(config, 1, block_size)
        shape = (*self.paged.kv.shape[:3], memory.blocks, *self.paged.kv.shape[4:])
        self.paged.kv = memory.mapped("blocks", math.prod(shape), dtype).view(shape)
        self.paged.blocks = memory.blocks

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.generations[move.target] += 1
        self.paged.move(moves)

    def extend(self, shares: Sequence[Share]) -> PagedAttention:
        return self.paged.extend(shares)


@dataclass(frozen=True)
class Lease:
    """A computed prompt's full blocks, and the answer's first token. error: why there are none."""

    id: str
    first: int = 0
    blocks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    expires: float = 0.0  # time.monotonic(), which all processes of a machine share
    error: str | None = None


class Prefill:
    """Computes prompts that arrive on `connection`, and leases their blocks for `seconds`."""

    def __init__(self, engine: Any, connection: Connection, seconds: float = LEASE) -> None:
        self.engine, self.connection, self.seconds = engine, connection, seconds
        self.clock = time.monotonic
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
        asked = dict(self.engine.requests)
        for name, token in self.engine.step() if asked else ():
            self._lease(asked[name], token)

    def _lease(self, request: Request, token: Token) -> None:
        # They have just become cached: all that the scheduler has published is still there.
        blocks = self.pool.match(BlockTable(self.pool).digest(request.output.prompt_ids))
        for block in blocks:
            self.pool.share(block)
        generations, expires = self.generations[blocks].tolist(), self.clock() + self.seconds
        lease = Lease(request.id, token.id, tuple(blocks), tuple(generations), expires)
        self.leases[request.id] = lease
        self.connection.send(lease)

    def _release(self, name: str) -> None:
        """End a lease: blocks that no other lease or request holds may be taken from now on."""
        if name in self.leases:
            for block in reversed(self.leases.pop(name).blocks):
                self.pool.give_back(block)


class Apart:
    """An engine that decodes, and has its prompts computed at the other end of `connection`.

    It offers what stage 05's engine does, but greedy only: to sample, the random generator's state
    would have to travel with the blocks.
    """

    generate, stream, run = drive.generate, drive.stream, drive.run

    def __init__(self, engine: Any, connection: Connection) -> None:
        self.engine, self.connection, self.clock = engine, connection, time.monotonic
        self.pool, self.cache = engine.scheduler.pool, engine.runner.cache
        self.steps = engine.steps
        self.room = self.pool.available  # blocks
        self.asked: dict[str, Request] = {}  # whose prompts are computed elsewhere
        self.expired = self._named = 0

    @property
    def requests(self) -> dict[str, Request]:
        """The requests that have not ended."""
        return self.asked | self.engine.requests

    def add(self, request: Request) -> Request:
        """Have a request's prompt computed. Raises UserError if the request is invalid."""
        self.engine.check(request)
        most = len(request.prompt_ids) + request.sampling.max_tokens
        if request.sampling.temperature > 0:
            raise UserError("Apart, prefill and decode are greedy: set the temperature to 0.")
        if self.pool.blocks_for(most) > self.room:
            raise UserError(
                f"Prompt and answer of up to {most} tokens need more than the {self.room} blocks "
                "of the decode process: ask for fewer tokens."
            )
        self._named += 1
        request.id = request.id or f"apart-{self._named}"
        try:
            self.connection.send((request.id, request.output.prompt_ids, request.sampling))
        except OSError:
            raise UserError(ENDED) from None
        self.asked[request.id] = request
        return request

    def abort(self, name: str) -> Any:
        if name not in self.asked:
            return self.engine.abort(name)
        request = self.asked.pop(name)  # its lease is given back on arrival
        request.output.finish_reason = "abort"
        return request.output

    def step(self) -> list[tuple[str, Token]]:
        """Take the prompts that were computed elsewhere, then run a pass. Returns new tokens."""
        tokens = []
        try:
            while self.connection.poll(0 if self.engine.requests else PATIENCE):
                tokens += self._take(self.connection.recv())
        except (EOFError, OSError):
            for request in self.asked.values():
                request.output.fail(UserError(ENDED))
            self.asked.clear()
        return tokens + (self.engine.step() if self.engine.requests else [])

    def _take(self, lease: Lease) -> list[tuple[str, Token]]:
        """Copy a prompt's blocks. Returns its answer's first token; the engine computes the
        others."""
        request = self.asked.pop(lease.id, None)
        copied = request is not None and lease.error is None and self._copy(request, lease)
        self.connection.send((lease.id, None, None))
        if request is None:
            return []
        if not copied:
            self.expired += lease.error is None
            request.output.fail(UserError(lease.error or EXPIRED))
            return []
        config, prompt, eos = self.engine.config, request.output.prompt_ids, self.engine.eos_ids
        reason = finish_reason([lease.first], len(prompt), request.sampling, config, eos)
        request.output.append(Token(lease.first, None, reason))
        if reason is None:
            self.engine.add(request)
        return [(request.id, Token(lease.first, None, reason))]

    def _copy(self, request: Request, lease: Lease) -> bool:
        """Copy leased blocks into this engine's prefix cache, where the request will find them.
        Returns whether the copies are what was leased. The request will compute blocks for which
        the cache has no room."""
        digests = BlockTable(self.pool).digest(request.output.prompt_ids)[: len(lease.blocks)]
        held = self.pool.match(digests)
        for block in held:
            self.pool.share(block)  # so that `take` does not evict them
        missing = list(zip(lease.blocks, digests, strict=True))[len(held) :][: self.pool.available]
        own = [self.pool.take() for _ in missing]
        moves = [Move("copy", there, b) for (there, _), b in zip(missing, own, strict=True)]
        self.cache.move(moves)
        valid = self.clock() < lease.expires
        valid &= self.cache.generations[list(lease.blocks)].tolist() == list(lease.generations)
        for block, (_, digest) in zip(own, missing, strict=True):
            if valid:
                self.pool.publish(block, digest)
        for block in reversed(held + own):
            self.pool.give_back(block)
        return valid
