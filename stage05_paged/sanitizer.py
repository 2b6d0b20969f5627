"""The sanitizer: after every step it proves that the memory is in order, and names the block and the sequences if it is not.

A block that is given back too early, shared by mistake or found under a stale name does not crash. It gives another token,
some steps later, to somebody else. So the rules are checked where they are broken and not where it shows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stage04_continuous.request import Request, State

from .blocks import BlockPool, chain
from .cache import PagedCache
from .scheduler import Scheduler, Work

GROUP = 256  # blocks that are copied together to be looked at


class SanitizerError(AssertionError):
    """A rule was broken: which one, at which step, in which block, and whose it is."""


class Sanitizer:
    """Watches one engine's scheduler and cache. Call `before` when the moves of a step are done, and `after` at its end.

    Blocks that are free are filled with NaN, so that whoever reads one shows it; and they must stay so, so that whoever writes to
    one shows too. The content of a block that can be found must stay as it was when it was published.
    """

    def __init__(self, scheduler: Scheduler, cache: PagedCache) -> None:
        self.scheduler, self.cache = scheduler, cache
        self.poisoned: set[int] = set()
        self.published: dict[
            int, tuple[bytes, bytes]
        ] = {}  # block -> its digest, and a fingerprint of its content
        # Who is in the pass, with salt, blocks, and tokens computed at its end: whoever ends in it has no table after it.
        self.passed: list[tuple[Request, bytes, list[int], int]] = []
        self._poison()

    def before(self, work: Sequence[Work]) -> None:
        """Before the pass: nobody writes where somebody else reads or writes. Raises SanitizerError."""
        pool = self.scheduler.pool
        self.poisoned.difference_update(
            block for block in range(pool.count) if pool.references[block]
        )
        # What was evicted for this pass may be filled and published again by it, in the same block and under the same name.
        self.published = {
            block: known
            for block, known in self.published.items()
            if pool.digests[block] == known[0]
        }
        tables, size = self.scheduler.tables, pool.block_size
        self.passed = [
            (each.request, tables[each.request].salt, list(each.blocks), each.start + each.count)
            for each in work
        ]
        writers: dict[int, Request] = {}
        for each in work:
            end, room = each.start + each.count, len(each.blocks) * size
            if end > room:
                self._fail(
                    f"positions {each.start} to {end - 1} are beyond the table's {room}",
                    None,
                    [each.request],
                )
            for block in each.blocks[each.start // size : -(-end // size)]:
                if block in writers:
                    self._fail("it has two writers", block, [writers[block], each.request])
                writers[block] = each.request
                if pool.references[block] != 1:
                    self._fail(f"it is written and {pool.references[block]} tables hold it", block)
                if pool.digests[block] is not None:
                    self._fail("it is written and can be found under what it held before", block)

    def after(self) -> None:
        """After the step: every rule of the module's list. Raises SanitizerError."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        self._whole(
            pool, {request: table.blocks for request, table in scheduler.tables.items()}, ""
        )
        if scheduler.swap_pool:
            self._whole(scheduler.swap_pool, scheduler.swapped, "swap ")
        for request in scheduler.swapped:
            if request.state is not State.WAITING:
                self._fail("it is swapped out, and does not wait", None, [request])
        for request, table in scheduler.tables.items():
            if request.state is not State.RUNNING and table.blocks:
                self._fail("a request that does not run holds it", table.blocks[0], [request])
            if (
                request.state is State.RUNNING
                and request.computed > len(table.blocks) * pool.block_size
            ):
                self._fail(
                    f"{request.computed} tokens are said to be in {len(table.blocks)} blocks",
                    None,
                    [request],
                )
            self._names(request, table.salt, table.blocks, request.computed)
        for request, salt, blocks, computed in self.passed:
            if request not in scheduler.tables:
                self._names(request, salt, blocks, computed)
        self.passed = []
        self._contents()
        self._poison()
        owned = pool.owned + sum(map(len, scheduler.swapped.values()))
        if not scheduler.tables and owned:
            self._fail(f"{owned} blocks are owned, and there is no request", None)

    def _whole(self, pool: BlockPool, tables: Mapping[Request, Sequence[int]], kind: str) -> None:
        """Free, cached and owned blocks make the whole, each in one place, and are counted right."""
        held = Counter(block for blocks in tables.values() for block in blocks)
        places = Counter(
            [
                *pool.free,
                *pool.cached,
                *(block for block in range(pool.count) if pool.references[block]),
            ]
        )
        for block, counted in enumerate(pool.references):
            if places[block] == 1 and counted == held[block]:
                continue
            what = f"{counted} references are counted and {held[block]} {kind}tables hold it"
            if places[block] != 1:
                what = (
                    f"it is in {places[block]} of the lists of free, cached and owned {kind}blocks"
                )
            self._fail(
                what, block, [request for request, blocks in tables.items() if block in blocks]
            )
        if pool.shared != sum(count > 1 for count in pool.references):
            self._fail(f"{pool.shared} {kind}blocks are counted as shared", None)
        if {
            digest: block for block, digest in enumerate(pool.digests) if digest is not None
        } != pool.found:
            self._fail(f"the names of the {kind}blocks and the blocks by name differ", None)
        for block in pool.cached:
            if pool.digests[block] is None:
                self._fail(f"it is a cached {kind}block and cannot be found", block, [])

    def _names(self, request: Request, salt: bytes, blocks: Sequence[int], computed: int) -> None:
        """What the full blocks of a request are found by stands for that request's tokens."""
        pool, digest = self.scheduler.pool, hashlib.sha256(salt).digest()
        for index, block in enumerate(blocks[: computed // pool.block_size]):
            digest = chain(digest, request.tokens(index * pool.block_size, pool.block_size))
            if pool.digests[block] not in (None, digest):
                self._fail("it is found under other tokens than those it holds", block, [request])

    def _contents(self) -> None:
        """What can be found is what was published."""
        names = {
            block: digest
            for block, digest in enumerate(self.scheduler.pool.digests)
            if digest is not None
        }
        now: dict[int, tuple[bytes, bytes]] = {}
        for group, contents in self._read(list(names)):
            for block, content in zip(group, contents.view(torch.uint8).cpu().numpy(), strict=True):
                now[block] = names[block], hashlib.blake2b(content, digest_size=16).digest()
                before = self.published.get(block, now[block])
                if before[0] == names[block] and before != now[block]:
                    self._fail("its content has changed since it was published", block)
        self.published = now

    def _poison(self) -> None:
        """Fill new free blocks with NaN; nobody has written to the others."""
        free = set(self.scheduler.pool.free)
        for group, contents in self._read(sorted(free & self.poisoned)):
            for block, untouched in zip(group, contents.isnan().all(1).tolist(), strict=True):
                if not untouched:
                    self._fail("it is free, and somebody has written to it", block)
        if new := sorted(free - self.poisoned):
            self.cache.kv.index_fill_(3, torch.tensor(new, device=self.cache.kv.device), torch.nan)
        self.poisoned = free

    def _read(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """What is in `blocks`, (blocks, numbers of each): a group of them at a time, or a large pool would be in memory twice."""
        for first in range(0, len(blocks), GROUP):
            group = blocks[first : first + GROUP]
            chosen = self.cache.kv.index_select(3, torch.tensor(group, device=self.cache.kv.device))
            yield group, chosen.movedim(3, 0).flatten(1)

    def _fail(
        self, what: str, block: int | None, requests: Sequence[Request] | None = None
    ) -> None:
        if requests is None:
            requests = [
                request for request, table in self.scheduler.tables.items() if block in table.blocks
            ]
        names = ", ".join(each.id for each in requests) or "nobody"
        where = "" if block is None else f", block {block}"
        raise SanitizerError(f"step {self.scheduler.step}{where}: {what}; sequences: {names}")
