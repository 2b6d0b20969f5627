"""A gang: processes that compute one model together, and the runner that leads them.

Rank 0 is the engine's own process. It alone schedules and samples, so no decision can differ
between ranks. Before each pass it broadcasts one tensor with everything that determines the pass
(moves, ids, shares, rows, adapters: integers, as JSON), and every rank runs stage 04's runner on
its own part of the model and of the cache. Nothing is pickled after the start.

A rank may die or hang. Then the pass fails, all keys and values are lost, all requests end with an
error, and the gang is started again; `up` is false until it runs.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared import linear
from shared.errors import UserError
from stage01_forward.generation import Logprobs
from stage01_forward.scoring import prompt_logits, prompt_logprobs
from stage04_continuous.engine import Engine
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.runner import Runner
from stage05_paged.blocks import Move
from stage05_paged.cache import PagedCache, Share
from stage05_paged.engine import make as make_paged
from stage06_serving.async_engine import LOST, EngineDead
from stage06_serving.engines import Paged

from .lora import Adapters, Ordered
from .parallel import Peers, digest, shard

START = 180.0  # seconds for a rank to import PyTorch and load its model
TIMEOUT = 4.0  # seconds that a sum waits for a rank before the gang gives it up
RETRY = 2.0  # seconds between two attempts to start the gang again
ROOM = 4096  # bytes of an order that are broadcast at once; few orders are longer
LENGTH = 8  # bytes of the length that precedes an order
CACHE, PASS, SCORE = "cache", "pass", "score"  # kinds of orders

log = logging.getLogger("staircase")


@dataclass(frozen=True)
class Setup:
    """How every rank makes its part of the model.

    load: returns the whole model with plain layers. New processes receive it, so it must be a
        module's function, or a `partial` of one.
    timeout: seconds that a rank waits for the others within a pass, and rank 0 to begin one.
    linear: as for `shared.linear.optimize`, which sees the parts.
    adapters: the folder with a subfolder for each adapter; empty for none.
    """

    load: Callable[[], Any]
    ranks: int = 2
    timeout: float = TIMEOUT
    linear: str = "plain"
    adapters: str = ""


def take_part(setup: Setup, model: Any, rank: int) -> tuple[Peers, bytes, str]:
    """Reduce the whole `model` to the part of `rank`. Returns its peers, the bytes that must be
    equal on all ranks, and the kind of linear layers."""
    peers, whole, config = Peers(rank, setup.ranks), digest(model), model.config
    cuts, model.adapters = shard(model, peers), None
    if setup.adapters:
        model.adapters = Adapters(model, config, cuts)
        model.adapters.load_all(Path(setup.adapters))
        whole = b"".join([whole, *model.adapters.numbers])
    return peers, whole, linear.optimize(model, setup.linear)


def runner_of(model: Any, cache: PagedCache) -> Runner:
    """The runner of one rank's passes."""
    return Runner(model, Ordered(cache, model.adapters.batch) if model.adapters else cache)


def take_no_adapter(model: Any) -> None:
    """Before a pass without a cache, clear the rows that take an adapter: they are the last
    pass's."""
    if model.adapters:
        model.adapters.batch.groups = []


# ---- orders -------------------------------------------------------------------------------------


def give(peers: Peers, kind: str, *arguments: Any) -> None:
    """Broadcast an order from rank 0: integers, and lists of them."""
    data = json.dumps([kind, *arguments]).encode()
    sent = bytearray((len(data).to_bytes(LENGTH, "big") + data).ljust(ROOM))
    order = torch.frombuffer(sent, dtype=torch.uint8)
    peers.order(order[:ROOM])
    if len(order) > ROOM:
        peers.order(order[ROOM:])


def receive(peers: Peers) -> list[Any]:
    """Receive the next order, on another rank: its kind and its arguments."""
    order = peers.order(torch.empty(ROOM, dtype=torch.uint8)).numpy().tobytes()
    end = LENGTH + int.from_bytes(order[:LENGTH], "big")
    if end > ROOM:
        order += peers.order(torch.empty(end - ROOM, dtype=torch.uint8)).numpy().tobytes()
    found: list[Any] = json.loads(order[LENGTH:end])
    return found


def work(rank: int, setup: Setup, threads: int, file: str, pipe: connection.Connection) -> None:
    """Run a rank other than 0, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: rank 0 decides
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model = setup.load()
    device = model.device
    peers, whole, _ = take_part(setup, model, rank)
    try:
        pipe.send_bytes(whole)
        pipe.recv_bytes()  # all have come this far, and agree
    except (EOFError, OSError):
        return  # rank 0 has gone
    peers.connect(file, setup.timeout, device)
    peers.passing = True
    runner: Any = None
    while True:
        try:
            kind, *arguments = receive(peers)
        except RuntimeError:  # rank 0 has gone, or another rank
            shutil.rmtree(Path(file).parent, ignore_errors=True)  # a signal leaves it behind
            return
        if kind == CACHE:
            blocks, size, swap_blocks, name = arguments
            dtype = getattr(torch, name)
            cache = PagedCache(model.config, blocks, size, swap_blocks, dtype, device)
            runner = runner_of(model, cache)
            continue
        if kind == SCORE:
            take_no_adapter(model)
            for _ in prompt_logits(model, *arguments):
                pass  # rank 0 has them
            continue
        moves, ids, shares, rows, adapters = arguments
        if model.adapters:
            model.adapters.batch.adapters = adapters
        runner.move([Move(*move) for move in moves])
        runner.run(ids, shares, rows)


# ---- rank 0 -------------------------------------------------------------------------------------


class Gang:
    """Rank 0's part of a model, as `model`, and the processes with the other parts. The gang starts
    them at once, and starts all of them again whenever one ends.

    model: what `setup.load` would return; None calls it. The gang takes the model over.
    Raises UserError if a rank cannot start, or has another model than rank 0.
    """

    def __init__(self, setup: Setup, model: Any = None) -> None:
        self.model = setup.load() if model is None else model
        self.device = self.model.device
        self.up, self.epoch = False, 0  # epoch: starts so far
        self.workers: list[Any] = []
        self._condition = threading.Condition()  # held during a pass
        self._closed = False
        self.cache: Any = None  # rank 0's
        self._folder: Any = None
        self.peers, self.digest, self.linear = take_part(setup, self.model, 0)
        # Only rank 0 measures which kind is fastest: ranks that measured together would slow each
        # other.
        self.setup = replace(setup, linear=self.linear.split()[0])
        self.model.gang = self
        self._watcher = threading.Thread(target=self._watch, name="gang", daemon=True)
        self._start()
        atexit.register(self.close)  # before multiprocessing ends the workers
        if setup.ranks > 1:
            self._watcher.start()

    @contextmanager
    def passing(self, epoch: int | None = None) -> Iterator[None]:
        """Wait until all ranks are up, and prevent restarts within the block. An error in the block
        ends the other ranks, which may wait for each other in vain. Raises RuntimeError at once if
        the ranks of `epoch` have ended."""
        with self._condition:
            if epoch is None:
                self._condition.wait_for(lambda: self.up or self._closed)
            if not self.up or epoch not in (None, self.epoch):
                raise RuntimeError("A rank has ended: its keys and values are lost.")
            self.peers.passing = True
            try:
                yield
            except BaseException:
                self.up = self.setup.ranks == 1
                self._kill()
                raise
            finally:
                self.peers.passing = False

    def hold(self, cache: PagedCache) -> None:
        """Give every rank a cache like rank 0's `cache`, in place of its previous one."""
        self.cache = cache
        with self.passing():
            self._order_cache()

    def _order_cache(self) -> None:
        cache = self.cache
        sizes = cache.blocks, cache.block_size, cache.swapped.shape[3]
        give(self.peers, CACHE, *sizes, str(cache.kv.dtype).removeprefix("torch."))

    def close(self) -> None:
        """End the other ranks for good."""
        self._closed = True
        atexit.unregister(self.close)
        self._kill()
        with self._condition:
            self._condition.notify_all()
        if self._watcher.is_alive():
            self._watcher.join(START)
        else:
            self._end()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        file, threads, pipes = f"{self._folder.name}/store", torch.get_num_threads(), []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(1, self.setup.ranks):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                arguments = (rank, self.setup, threads, file, theirs)
                self.workers.append(context.Process(target=work, args=arguments, daemon=True))
                self.workers[-1].start()
                theirs.close()
            for rank, pipe in enumerate(pipes, 1):
                self._agree(rank, pipe)
            for pipe in pipes:
                pipe.send_bytes(b"connect")
            if self.setup.ranks > 1:
                self.peers.connect(file, self.setup.timeout, self.device)
                if self.cache is not None:
                    self._order_cache()
        except BaseException:
            self._end()
            raise
        finally:
            for pipe in pipes:
                pipe.close()
        with self._condition:
            self.up, self.epoch = True, self.epoch + 1
            self._condition.notify_all()

    def _agree(self, rank: int, pipe: connection.Connection) -> None:
        """Wait until a rank has loaded the same model. Raises UserError."""
        try:
            if not pipe.poll(START):
                raise UserError(f"Rank {rank} has not loaded its model within {START:g} s.")
            whole = pipe.recv_bytes()
        except (EOFError, OSError):
            raise UserError(
                f"Rank {rank} ended before it had loaded its model: see its message above."
            ) from None
        if whole != self.digest:
            raise UserError(
                f"Rank {rank} has another model than rank 0: give all ranks the same config.json "
                "and the same weights."
            )

    def _watch(self) -> None:
        """Start the gang again whenever a rank ends."""
        while True:
            connection.wait([worker.sentinel for worker in self.workers])
            with self._condition:  # no pass is under way, and none begins
                self.up = False
            self._end()
            while not self._closed and not self.up:
                log.error("a rank has ended: restarting all ranks")
                try:
                    self._start()
                except Exception as error:
                    log.error("the ranks cannot start", exc_info=error)
                    with self._condition:
                        self._condition.wait(RETRY)
            if self._closed:
                self._end()
                return

    def _kill(self) -> None:
        for worker in list(self.workers):
            worker.kill()

    def _end(self) -> None:
        self._kill()
        for worker in self.workers:
            worker.join()
        self.workers.clear()
        self.peers.disconnect()
        self._folder.cleanup()


class GangRunner:
    """Runs passes on all ranks, with rank 0's part of the model and of the cache.

    When all keys and values are lost, `on_loss` is called, and the pass raises RuntimeError.
    """

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self.gang, self.cache, self.config = model.gang, cache, model.config
        self.on_loss: Callable[[], object] = lambda: None
        self._runner = runner_of(model, cache)
        self._moves: list[Move] = []  # not done by the other ranks yet
        self._epoch: int | None = None  # of the ranks with keys and values; None: no rank has any
        self.gang.hold(cache)

    def move(self, moves: Sequence[Move]) -> None:
        self.cache.move(moves)
        self._moves += moves

    def run(self, ids: Sequence[int], shares: Sequence[Share], rows: Sequence[int]) -> Tensor:
        """As stage 04's Runner. Raises RuntimeError if a rank dies or hangs, or has done so since
        the last pass."""
        if self.gang.cache is not self.cache:
            raise ValueError("another engine on these ranks has replaced their caches")
        try:
            with self.gang.passing(self._epoch):
                self._epoch, moves, self._moves = self.gang.epoch, self._moves, []
                loaded = self.gang.model.adapters
                adapters = loaded.batch.adapters if loaded else ()
                moved = [(move.kind, move.source, move.target) for move in moves]
                give(self.gang.peers, PASS, moved, ids, shares, list(rows), adapters)
                return self._runner.run(ids, shares, rows)
        except Exception as error:
            self._lose()
            raise RuntimeError("A rank died or hung: all of them are restarting.") from error

    def score(self, ids: Sequence[int], top: int) -> list[Logprobs | None]:
        """Stage 01's `prompt_logprobs` of the model without an adapter. Raises RuntimeError as
        `run` does; then the next pass fails too."""
        with self.gang.passing(self._epoch):
            give(self.gang.peers, SCORE, list(ids))
            take_no_adapter(self.gang.model)
            return prompt_logprobs(self.gang.model, ids, top)

    def renew(self) -> None:
        """Accept the loss of a rank since the last pass, so that no pass fails because of it. Only
        while no request has keys and values."""
        if not self.gang.up or self._epoch != self.gang.epoch:
            self._lose()

    def _lose(self) -> None:
        self._epoch = None
        self._moves.clear()
        self.on_loss()


def forget(engine: Engine) -> None:
    """End all requests of `engine` with an error, and empty its prefix cache."""
    engine.plan = Plan()  # not only those of the pass: no memory can be trusted
    engine.fail(UserError(LOST))
    pool = engine.scheduler.pool
    for block in [pool.take() for _ in range(pool.available)]:
        pool.give_back(block)


def make(model: Any, contexts: int | None = None, **options: Any) -> Engine:
    """Stage 05's engine on all ranks of a gang. model: rank 0's part; options: those of stage
    05."""
    engine = make_paged(model, contexts, make_runner=GangRunner, **options)
    if model.adapters:
        engine.observers.append(model.adapters)
    runner: Any = engine.runner
    runner.on_loss = partial(forget, engine)
    return engine


class Served(Paged):
    """The engine that `make` makes, for stage 06's server."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine.runner
        super().__init__(engine)

    @property
    def variants(self) -> Mapping[str, bytes]:
        adapters = self._runner.gang.model.adapters
        return adapters.names if adapters else {}

    @property
    def health(self) -> str:
        return "ok" if self._runner.gang.up else "restarting"

    def score(self, model: Any, ids: Sequence[int], top: int) -> list[Logprobs | None]:
        self._renew()
        try:
            return self._runner.score(ids, top)
        except RuntimeError as error:
            raise EngineDead(LOST) from error

    def add(self, request: Request) -> Request:
        self._renew()
        return super().add(request)

    def _renew(self) -> None:
        if not self.requests:  # a rank that ended meanwhile costs no request
            self._runner.renew()
