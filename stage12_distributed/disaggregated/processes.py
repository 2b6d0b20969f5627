"""Prefill and decode in two processes, which exchange leases."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shared import linear, models
from shared.cli import cache_options
from shared.errors import UserError
from stage05_paged.engine import make

from .leases import ENDED, SILENT, Disaggregated, MappedCache, Memory, Prefill

STARTING = 180.0  # seconds that the prefill process has to load its model
ENDING = 5.0  # seconds that it has to end


@dataclass(frozen=True)
class Job:
    """What both processes build their engines from.

    prefill, decode: memory of each process, in whole contexts.
    """

    model: str = "stories"
    random_weights: bool = False
    dtype: str = "float32"
    linear: str = "plain"
    prefill: int = 4
    decode: int = 8
    folder: str = ""  # of the memory
    threads: int = 1
    weights: str = "auto"  # --weights, of both processes
    kv_dtype: str = "auto"  # --kv-dtype, of both: blocks are copied as they are


def build(job: Job, decode: bool) -> Any:
    """Stage 05's engine over a job's memory. Its process uses only the job's threads."""
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    loaded = models.load(job.model, random_weights=job.random_weights, weights=job.weights)
    model = models.load_model(loaded, dtype=dtype)
    linear.optimize(model, job.linear)
    size = 16
    context = -(-model.config.n_positions // size)
    memory = Memory(Path(job.folder), context * job.prefill, context * job.decode)
    cache = partial(MappedCache, memory)
    kv = cache_options(job.kv_dtype)
    return make(model, pool=memory.pool(decode, size), block_size=size, make_cache=cache, **kv)


def prefill(job: Job, connection: Connection) -> None:
    """Run the prefill process until the other one closes the connection."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        side = Prefill(build(job, decode=False), connection)
        connection.send(None)  # ready
        while True:
            side.turn()


@contextlib.contextmanager
def disaggregated(job: Job) -> Iterator[Any]:
    """An engine that decodes here, and has its prompts computed in a process of their own. Raises
    UserError if that process does not start."""
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as folder:
        job = replace(job, folder=folder)
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=prefill, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()  # so that our end notices when the other process ends
        try:
            engine = Disaggregated(build(job, decode=True), ours)
            try:
                if not ours.poll(STARTING):
                    raise UserError(SILENT.format(STARTING))
                ours.recv()
            except EOFError:
                raise UserError(ENDED) from None
            yield engine
        finally:
            ours.close()
            process.join(ENDING)
            process.kill()
            process.join()
