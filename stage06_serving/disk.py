"""A prefix cache that survives a restart: files of full blocks behind stage 05's pool of blocks.

The engine's thread never touches the disk. The scheduler offers each block that it publishes, and
the writer's thread copies it from the pool into a file, or drops it if too many wait. When a
request comes first in line and its next blocks are on the disk, it waits for them while other
requests run: how long a disk takes is unknown, so no number of bytes a step would bound the stall.
The reader's thread reads a PORTION; between two steps, the engine's thread copies it into blocks of
the pool, where the scheduler finds them like any others.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import shutil
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from stage04_continuous.plan import Plan
from stage04_continuous.request import Request, State
from stage05_paged.memory import parse_memory

from .blockfiles import VERSION, BlockFiles
from .scoring import has_own_salt

if TYPE_CHECKING:  # the settings are checked before PyTorch is imported
    from shared.cli import Loaded

log = logging.getLogger(__name__)
MOST_WAITING = 4096  # blocks to write; they wait in the pool, so they take no memory
PORTION = 2**25  # bytes that the engine's thread copies between two steps
PAUSE = 0.01  # seconds that an engine with nothing else to do waits for the reader
PATIENCE = 2.0  # seconds for a portion; after that the disk stands still, and prompts are computed
RESCAN = 30.0  # seconds until files of other servers in the folder are seen
OLDER = 1e-3  # seconds that a file looks older than the one before it in its sequence


def space_of(loaded: Loaded, cache: Any) -> bytes:
    """A digest of what keys and values depend on besides the tokens and the salt: the files with
    the weights, shape and options of the model, number formats, and how `cache` lays out a
    block."""
    import torch

    digest = hashlib.sha256(VERSION)
    for path in loaded.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    source = "files" if loaded.files else f"torch {torch.__version__}"
    source += f" {loaded.weights}"
    planes = [(tuple(plane.shape[1:]), plane.dtype) for plane in cache.memory.planes]
    layout = (type(cache).__qualname__, cache.block_size, planes, sys.byteorder)
    digest.update(f"{source} {replace(loaded.config, name='')} {loaded.dtype} {layout}".encode())
    return digest.digest()


def attach(engine: Any, folder: Path, size: str, loaded: Loaded) -> DiskStore:
    """Keep the blocks of stage 05's engine, or of one with the same kind of scheduler and cache, in
    `folder`. size: at most, as for `parse_memory`, in percent of the disk.

    Raises UserError if `size` is less than one file.
    """
    cap = parse_memory(size, shutil.disk_usage(folder).total if "%" in size else sys.maxsize)
    scheduler, cache = engine.scheduler, engine.runner.cache
    sizes = 8 * cache.block_size, cache.memory.bytes_per_block
    files = BlockFiles(folder, cap, space_of(loaded, cache), *sizes)
    scheduler.store = store = DiskStore(files, scheduler.pool, cache.memory)
    engine.observers.append(store)
    return store


@dataclass(eq=False)
class Entry:
    """A full block with its token ids, last used at `used`. `block`: in the pool, if it is there;
    None: it is to be read, or removed."""

    digest: bytes
    ids: bytes = b""
    used: float = 0.0
    block: int | None = None


@dataclass(eq=False)
class Read:
    """Blocks on their way to the pool, for a request that waits for them."""

    request: Request
    before: list[bytes]  # digests of the blocks before them, in the pool
    wanted: list[Entry]
    contents: list[memoryview] = field(default_factory=list)  # of the first `wanted`
    ready: bool = False  # the reader has ended
    failed: bool = False  # because of a block that it cannot have
    since: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return not self.ready and time.monotonic() - self.since > PATIENCE


class DiskStore:
    """The BlockStore in `files`, of blocks of `pool`, whose content is in `memory`; an observer of
    the engine. Several servers may share the folder: then it can exceed its cap by what the others
    have written within RESCAN seconds."""

    def __init__(self, files: BlockFiles, pool: Any, memory: Any) -> None:
        self.files, self.counts, self.pool, self.memory = files, files.counts, pool, memory
        self._newest: dict[int, Entry] = {}  # the newest offer of each block
        self._offers: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Read] = queue.SimpleQueue()
        self._news = threading.Event()  # the reader has ended a portion
        self._read: Read | None = None  # the only one
        self._lookups: WeakKeyDictionary[Request, float] = WeakKeyDictionary()  # when looked up
        self._noted: set[bytes] = set()  # digests of blocks whose use was noted since the last scan
        self._works = True  # the last write
        for work in (self._write_all, self._read_all):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    # ---- on the engine's thread -----------------------------------------------------------------

    def _entry(self, request: Request, index: int, digest: bytes, block: int | None) -> Entry:
        size = self.pool.block_size
        ids = array("q", request.tokens(index * size, size)).tobytes()
        # No lookup reaches the end of a chain without its beginning: the end must go first.
        used = self._lookups.get(request, time.time()) - index * OLDER
        return Entry(digest, ids, used, block)

    def offer(self, request: Request, index: int, block: int, digest: bytes) -> None:
        if has_own_salt(request) or self.pool.by_digest.get(digest) != block:
            return
        self._newest[block] = entry = self._entry(request, index, digest, block)
        if self._offers.qsize() < MOST_WAITING:
            self._offers.put(entry)
        else:
            self.counts.dropped += 1

    def forget(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._offers.put(Entry(digest))

    def loading(self, request: Request, digests: Sequence[bytes], known: int) -> bool:
        read = self._read
        if read is not None and read.request is request:
            return not read.late
        if request in self._lookups:
            return False
        if known < len(digests) and digests[known] in self.files:
            if read is not None:
                return not read.late  # one after the other
            if self.pool.blocks_for(request.token_count) - known > self.pool.available:
                return False  # it cannot be admitted now, and asks again
        self._lookups[request] = time.time()
        for index, digest in enumerate(digests[:known]):
            if digest not in self._noted:  # used in memory: its file must not become the oldest
                self._noted.add(digest)
                self.offer(request, index, self.pool.by_digest[digest], digest)
        self.counts.queries += (len(digests) - known) * self.pool.block_size
        wanted: list[Entry] = []
        for index in range(known, len(digests)):
            if digests[index] not in self.files:
                break
            wanted.append(self._entry(request, index, digests[index], None))
        if wanted:
            self._begin(Read(request, list(digests[:known]), wanted))
        return bool(wanted)

    def _begin(self, read: Read) -> None:
        self._read = read
        self._reads.put(read)

    def before(self, plan: Plan) -> None:
        """Blocks are filled after a step: before it, the moves of its plan still need some."""

    def after(self, plan: Plan) -> None:
        """Copy what was read into the pool."""
        read = self._read
        if read is None:
            return
        if not plan:
            self._news.wait(PAUSE)
        self._news.clear()
        if not read.ready:
            return
        self._publish(read)
        self._read = None
        done = len(read.contents)
        if done < len(read.wanted) and not read.failed and read.request.state is State.WAITING:
            before = read.before + [entry.digest for entry in read.wanted[:done]]
            self._begin(Read(read.request, before, read.wanted[done:]))

    def _publish(self, read: Read) -> None:
        """Put what was read into blocks that no table holds, so that a lookup finds them."""
        pool = self.pool
        chain = pool.match(read.before)  # must not be evicted for what follows it
        for block in chain:
            pool.share(block)
        for entry, content in zip(read.wanted, read.contents, strict=False):
            block = pool.by_digest.get(entry.digest)
            if block is not None:  # computed meanwhile
                pool.share(block)
            elif pool.available:
                block = pool.take()
                self._newest.pop(block, None)  # what was offered is gone
                self.memory.write(block, content)
                pool.publish(block, entry.digest)
                self.counts.hits += pool.block_size
            else:
                break
            chain.append(block)
        for block in reversed(chain):  # the end is evicted before the beginning
            pool.give_back(block)

    # ---- the reader's thread --------------------------------------------------------------------

    def _read_all(self) -> None:
        while True:
            read = self._reads.get()
            for entry in read.wanted[: max(1, PORTION // self.files.file_bytes)]:
                content = self.files.read(entry.digest, entry.ids, entry.used)
                if content is None:
                    read.failed = True
                    break
                read.contents.append(content)
            read.ready = True
            self._news.set()

    # ---- the writer's thread --------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            try:
                if time.monotonic() - self.files.scanned > RESCAN:
                    self._noted = set()
                    self.files.scan()
                entry = self._offers.get(timeout=RESCAN)
                if entry.block is None:
                    self.files.remove(entry.digest)
                elif entry.digest in self.files:
                    self.files.use(entry.digest, entry.used)
                else:
                    self._write(entry, entry.block)
            except queue.Empty:
                continue
            except OSError as error:
                self.counts.dropped += 1
                if self._works:
                    log.warning(
                        "The prefix cache in %s cannot be written (%s): blocks are dropped until "
                        "it can.",
                        *(self.files.folder, error.strerror),
                    )
                self._works = False

    def _write(self, entry: Entry, block: int) -> None:
        parts = [] if self._is_stale(entry, block) else self._copy(block)
        if self._is_stale(entry, block):  # perhaps while it was copied
            self.counts.dropped += 1
            return
        self.files.write(entry.digest, entry.ids, entry.used, parts)
        self._works = True

    def _is_stale(self, entry: Entry, block: int) -> bool:
        """Whether the block may hold something else by now. A published block never changes, and
        one that is published again is offered again."""
        return self._newest.get(block) is not entry or self.pool.digests[block] != entry.digest

    def _copy(self, block: int) -> list[memoryview]:
        """The content of a block, by NumPy: PyTorch would start a second team of threads."""
        import torch

        rows = (plane[block].view(torch.uint8).cpu().numpy() for plane in self.memory.planes)
        return [np.array(row, order="C").reshape(-1).data for row in rows]
