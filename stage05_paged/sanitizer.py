"""The sanitizer: after every step it proves that the memory is in order, or names the block and the
sequences that broke a rule.

A block that is given back too early, shared by mistake or found under a stale digest causes no
crash. It changes another sequence's tokens, some steps later. So rules are checked where they are
broken, not where the damage shows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from stage04_continuous.plan import Plan
from stage04_continuous.request import Request, State

from .blocks import BlockPool, chain
from .planes import POISON, Planes
from .scheduler import Scheduler

GROUP = 256  # blocks that are read together


class SanitizerError(AssertionError):
    """A broken rule: which one, at which step, in which block, by which sequences."""


class Sanitizer:
    """An observer that checks one engine's scheduler and the memory of its cache.

    Free blocks are filled with NaN, so that a read of one shows. They must still hold NaN later, so
    that a write to one shows too. The content of a block that can be found must not change. What
    the cache's planes are for, it does not know.
    """

    def __init__(self, scheduler: Scheduler, memory: Planes) -> None:
        self.scheduler, self.memory = scheduler, memory
        self.poisoned: set[int] = set()
        # block -> its digest, and a fingerprint of its content
        self.published: dict[int, tuple[bytes, bytes]] = {}
        # Requests of the pass with their blocks, the tokens computed at its end, and the root of
        # their digests: those that end in the pass have no table after it.
        self.passed: list[tuple[Request, list[int], int, bytes]] = []
        self._poison()

    def before(self, plan: Plan) -> None:
        """Before the pass: each block has one writer and no other reader. Raises SanitizerError."""
        pool = self.scheduler.pool
        self.poisoned.difference_update(
            block for block in range(pool.count) if pool.references[block]
        )
        # A block that was evicted for this pass may be filled in it and published under the same
        # digest again.
        self.published = {
            block: known
            for block, known in self.published.items()
            if pool.digests[block] == known[0]
        }
        size = pool.block_size
        tables = self.scheduler.tables
        self.passed = [
            (work.request, list(work.table), work.start + work.count, tables[work.request].root)
            for work in plan.work
        ]
        writers: dict[int, Request] = {}
        for work in plan.work:
            end, room = work.start + work.count, len(work.table) * size
            if end > room:
                self._fail(
                    f"positions {work.start} to {end - 1} are beyond the table's {room}",
                    None,
                    [work.request],
                )
            for block in work.table[work.start // size : -(-end // size)]:
                if block in writers:
                    self._fail("it has two writers", block, [writers[block], work.request])
                writers[block] = work.request
                if pool.references[block] != 1:
                    self._fail(f"written while {pool.references[block]} tables hold it", block)
                if pool.digests[block] is not None:
                    self._fail("written while its old content can be found", block)

    def after(self, plan: Plan) -> None:
        """After the step: every rule of memory holds. Raises SanitizerError."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        tables = {request: table.blocks for request, table in scheduler.tables.items()}
        self._whole(pool, tables, "")
        if scheduler.swap_pool:
            self._whole(scheduler.swap_pool, scheduler.swapped, "swap ")
        for request in scheduler.swapped:
            if request.state is not State.WAITING:
                self._fail("swapped out, but not waiting", None, [request])
        for request, table in scheduler.tables.items():
            running, blocks = request.state is State.RUNNING, table.blocks
            if blocks and not running:
                self._fail("held by a request that does not run", blocks[0], [request])
            if running and request.computed > len(blocks) * pool.block_size:
                self._fail(f"{request.computed} tokens in {len(blocks)} blocks", None, [request])
            self._names(request, blocks, request.computed, table.root)
        for request, blocks, computed, root in self.passed:
            if request not in tables:
                self._names(request, blocks, computed, root)
        self.passed = []
        self._contents()
        self._poison()
        owned = pool.owned + sum(map(len, scheduler.swapped.values()))
        if owned and not tables:
            self._fail(f"{owned} blocks are owned, but there is no request", None)

    def _whole(self, pool: BlockPool, tables: Mapping[Request, Sequence[int]], kind: str) -> None:
        """Every block is exactly one of free, cached and owned, and is counted correctly."""
        held = Counter(block for blocks in tables.values() for block in blocks)
        owned = [block for block in range(pool.count) if pool.references[block]]
        places = Counter([*pool.free, *pool.cached, *owned])
        for block, counted in enumerate(pool.references):
            if places[block] == 1 and counted == held[block]:
                continue
            what = f"{counted} references, but {held[block]} {kind}tables hold it"
            if places[block] != 1:
                what = f"in {places[block]} of the lists of free, cached and owned {kind}blocks"
            holders = [request for request, blocks in tables.items() if block in blocks]
            self._fail(what, block, holders)
        digests = {digest: block for block, digest in enumerate(pool.digests) if digest is not None}
        if digests != pool.by_digest:
            self._fail(f"the {kind}blocks' digests and the blocks by digest differ", None)
        for block in pool.cached:
            if pool.digests[block] is None:
                self._fail(f"a cached {kind}block that cannot be found", block, [])

    def _names(self, request: Request, blocks: Sequence[int], computed: int, digest: bytes) -> None:
        """The digests of a request's full blocks are those of its tokens, from the root on."""
        pool = self.scheduler.pool
        for index, block in enumerate(blocks[: computed // pool.block_size]):
            digest = chain(digest, request.tokens(index * pool.block_size, pool.block_size))
            if pool.digests[block] not in (None, digest):
                self._fail("found under tokens that it does not hold", block, [request])

    def _contents(self) -> None:
        """Blocks that can be found hold what they held when they were published."""
        digests = self.scheduler.pool.digests
        names = {block: digest for block, digest in enumerate(digests) if digest is not None}
        now: dict[int, tuple[bytes, bytes]] = {}
        for group, contents in self._read(list(names)):
            rows = contents.cpu().numpy()
            for block, content in zip(group, rows, strict=True):
                now[block] = names[block], hashlib.blake2b(content, digest_size=16).digest()
                before = self.published.get(block, now[block])
                if before[0] == names[block] and before != now[block]:
                    self._fail("changed since it was published", block)
        self.published = now

    def _poison(self) -> None:
        """Fill newly free blocks with NaN; the other free blocks must still be full of it."""
        free = set(self.scheduler.pool.free)
        for group, contents in self._read(sorted(free & self.poisoned)):
            clean = (contents == POISON).all(1).tolist()
            for block, untouched in zip(group, clean, strict=True):
                if not untouched:
                    self._fail("written while it is free", block)
        if new := sorted(free - self.poisoned):
            self.memory.poison(new)
        self.poisoned = free

    def _read(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The content of `blocks`, (blocks, bytes of each), a group at a time: otherwise
        a large pool would be in memory twice."""
        for first in range(0, len(blocks), GROUP):
            group = blocks[first : first + GROUP]
            yield group, self.memory.read(group)

    def _fail(
        self, what: str, block: int | None, requests: Sequence[Request] | None = None
    ) -> None:
        if requests is None:
            tables = self.scheduler.tables
            requests = [request for request, table in tables.items() if block in table.blocks]
        names = ", ".join(request.id for request in requests) or "none"
        where = "" if block is None else f", block {block}"
        raise SanitizerError(f"step {self.scheduler.step}{where}: {what}; sequences: {names}")
