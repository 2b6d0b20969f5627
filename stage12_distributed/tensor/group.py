"""A rank group: processes that compute one model together, and the runner that leads them.

Rank 0 is the engine's own process. It alone schedules and samples, so no decision can differ
between ranks. Before each pass it broadcasts one command with everything that determines the pass
(moves, ids, shares, rows, adapters: integers), and every rank runs stage 04's runner on its own
part of the model and of the cache.

A rank may die or stand still. Then all keys and values are lost, and the group ends for good: every
pass raises RankLost. What has started rank 0's process has to start it again, with all ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared import linear
from shared.errors import UserError
from stage04_continuous.engine import Engine
from stage04_continuous.runner import Runner
from stage05_paged.blocks import Move
from stage05_paged.cache import BlockCache, PagedCache, Share
from stage05_paged.engine import make as make_paged

from ..lora import Adapters, Ordered
from .collectives import TIMEOUT, Collectives
from .shard import shard

START = 180.0  # seconds for a rank to import PyTorch and load its model
CACHE, PASS = "cache", "pass"  # kinds of commands
LOST = "A rank of the model has ended: all keys and values are lost."


class RankLost(RuntimeError):
    """A rank has died or stands still: no pass is possible any more."""


@dataclass(frozen=True)
class Setup:
    """How every rank makes its part of the model.

    load: returns the whole model with plain layers. New processes receive it, so it must be a
        module's function, or a `partial` of one.
    timeout: seconds that a rank waits for the others within a pass.
    linear: as for `shared.linear.optimize`, which sees the parts.
    adapters: the folder with a subfolder for each adapter; empty for none.
    """

    load: Callable[[], Any]
    ranks: int = 2
    timeout: float = TIMEOUT
    linear: str = "plain"
    adapters: str = ""


def take_part(setup: Setup, model: Any, rank: int) -> Collectives:
    """Reduce the whole `model` to the part of `rank`. Returns its collective calls."""
    collectives, config = Collectives(rank, setup.ranks), model.config
    layers, model.adapters = shard(model, collectives), None
    if setup.adapters:
        model.adapters = Adapters(model, config, layers)
        model.adapters.load_all(Path(setup.adapters))
    linear.optimize(model, setup.linear)
    return collectives


def runner_of(model: Any, cache: BlockCache) -> Runner:
    """The runner of one rank's passes."""
    return Runner(model, Ordered(cache, model.adapters.batch) if model.adapters else cache)


def work(rank: int, setup: Setup, threads: int, file: str, pipe: connection.Connection) -> None:
    """Run a rank other than 0, in a process of its own, until rank 0 has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: rank 0 decides
    torch.set_num_threads(threads)
    model = setup.load()
    collectives = take_part(setup, model, rank)
    try:
        pipe.send_bytes(b"loaded")
        pipe.recv_bytes()  # all have come this far
        collectives.connect(file, setup.timeout)
        obey(collectives, model)
    except (EOFError, OSError, RuntimeError):  # rank 0 has gone, or another rank
        pass


def obey(collectives: Collectives, model: Any) -> None:
    """Run the commands of rank 0. Raises RuntimeError once a rank has gone."""
    runner: Any = None
    while True:
        kind, *arguments = collectives.receive_command()
        if kind == CACHE:
            blocks, size, swapped, name = arguments
            memory = blocks, size, swapped, getattr(torch, name), model.device
            runner = runner_of(model, PagedCache(model.config, *memory))
        else:
            moves, ids, shares, rows, adapters = arguments
            if model.adapters:
                model.adapters.batch.adapters = adapters
            runner.move([Move(*move) for move in moves])
            runner.run(ids, shares, rows)


class RankGroup:
    """Rank 0's part of a model, as `model`, and the processes with the other parts.

    model: what `setup.load` would return; None calls it. The group takes the model over.
    Raises UserError if a rank cannot start.
    """

    def __init__(self, setup: Setup, model: Any = None) -> None:
        self.model = setup.load() if model is None else model
        self.up = False  # the ranks have met, and none has ended
        self.workers: list[Any] = []
        self._folder: Any = None
        self.setup, self.collectives = setup, take_part(setup, self.model, 0)
        self.model.ranks = self
        atexit.register(self.close)  # before multiprocessing ends the workers
        try:
            if setup.ranks > 1:
                self._start()
        except BaseException:
            self.close()
            raise
        self.up = True

    @contextmanager
    def passing(self) -> Iterator[Callable[..., None]]:
        """A pass of all ranks; yields the function that sends its command. An error in the block
        ends the group: the other ranks may wait for each other in vain. Raises RankLost."""
        if not self.up:
            raise RankLost(LOST)
        try:
            yield self.collectives.send_command
        except Exception as error:
            if self.setup.ranks == 1:
                raise
            self.close()
            raise RankLost(LOST) from error

    def hold(self, cache: BlockCache) -> None:
        """Give every rank a cache like rank 0's `cache`, in place of its previous one."""
        sizes = cache.blocks, cache.block_size, len(cache.memory.swapped[0])
        with self.passing() as send_command:
            send_command(CACHE, *sizes, str(cache.dtype).removeprefix("torch."))

    def close(self) -> None:
        """End the other ranks."""
        atexit.unregister(self.close)
        self.up = False
        for worker in self.workers:
            worker.kill()
            worker.join()
        if self._folder:
            self.collectives.disconnect()
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        file, threads, pipes = f"{self._folder.name}/store", torch.get_num_threads(), []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(1, self.setup.ranks):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                arguments = (rank, self.setup, threads, file, theirs)
                worker = context.Process(target=work, args=arguments, daemon=True)
                worker.start()
                self.workers.append(worker)
                theirs.close()
            for rank, pipe in enumerate(pipes, 1):
                try:
                    if not pipe.poll(START):
                        raise UserError(f"Rank {rank} has not loaded its model in {START:g} s.")
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    raise UserError(
                        f"Rank {rank} ended before it had loaded its model: see its message above."
                    ) from None
            for pipe in pipes:
                pipe.send_bytes(b"connect")
            self.collectives.connect(file, self.setup.timeout)
        finally:
            for pipe in pipes:
                pipe.close()


class RankRunner:
    """Runs passes on all ranks, with rank 0's part of the model and of the cache."""

    def __init__(self, model: Any, cache: BlockCache) -> None:
        self.ranks: RankGroup = model.ranks
        self.cache, self.config = cache, model.config
        self._runner = runner_of(model, cache)
        self._moves: list[Move] = []  # not done by the other ranks yet
        self.ranks.hold(cache)

    def move(self, moves: Sequence[Move]) -> None:
        self.cache.move(moves)
        self._moves += moves

    def run(self, ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor:
        """As stage 04's Runner. Raises RankLost if a rank dies or stands still, or has done so."""
        with self.ranks.passing() as send_command:
            moves = [(move.kind, move.source, move.target) for move in self._moves]
            self._moves.clear()
            adapters = self.ranks.model.adapters
            numbers = adapters.batch.adapters if adapters else ()
            send_command(PASS, moves, ids, shares, list(rows), numbers)
            return self._runner.run(ids, shares, rows)


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 05's engine on all ranks of a group. model: rank 0's part; options: those of stage
    05."""
    engine = make_paged(model, contexts, make_runner=RankRunner, **options)
    if model.adapters:
        model.adapters.tables = engine.scheduler.tables
        engine.observers.append(model.adapters)
    return engine
