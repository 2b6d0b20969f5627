"""Prefill and decode in two processes: `python -m stage12_distributed apart`.

leases.py has the mechanism. This file has the two processes and the experiment: some streams decode
while long prompts arrive, on one engine with all threads, and on two with half the threads each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from shared import cli, linear
from shared.errors import UserError
from stage01_forward import families
from stage04_continuous.request import Request
from stage05_paged.make import make

from .leases import ENDED, Apart, MappedCache, Memory, Prefill
from .passes import VOCABULARY, greedy

TOGETHER, APART = "together", "apart"
ENDING = 5.0  # seconds that the prefill process has to end
ABOUT = (
    "Prefill and decode in two processes over one memory, against one engine that does both: how "
    "long streams wait between tokens while long prompts arrive, and what that costs."
)
EXAMPLE = "  python -m stage12_distributed apart --model gpt2 --random-weights"


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


def build(job: Job, decode: bool) -> Any:
    """Stage 05's engine over a job's memory. Its process uses only the job's threads."""
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    weights = families.load(job.model, random_weights=job.random_weights)
    model = families.load_model(weights, dtype=dtype)
    linear.optimize(model, job.linear)
    size = 16
    context = -(-model.config.n_positions // size)
    memory = Memory(Path(job.folder), context * job.prefill, context * job.decode)
    cache = partial(MappedCache, memory)
    return make(model, pool=memory.pool(decode, size), block_size=size, make_cache=cache)


def prefill(job: Job, connection: Connection) -> None:
    """Run the prefill process until the other one closes the connection."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        side = Prefill(build(job, decode=False), connection)
        connection.send(None)  # ready
        while True:
            side.turn()


@contextlib.contextmanager
def apart(job: Job) -> Iterator[Any]:
    """An engine that decodes here, and has its prompts computed in a process of their own.

    Raises UserError if that process does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as folder:
        job = replace(job, folder=folder)
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=prefill, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()  # so that our end notices when the other process ends
        try:
            engine = Apart(build(job, decode=True), ours)
            try:
                ours.recv()
            except EOFError:
                raise UserError(ENDED) from None
            yield engine
        finally:
            ours.close()
            process.join(ENDING)
            process.kill()
            process.join()


# ---- the experiment -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """`streams` requests that decode, and `long` prompts that arrive one after the other. All other
    fields are numbers of tokens."""

    streams: int = 4
    prompt: int = 32
    answer: int = 96
    long: int = 4
    long_prompt: int = 512
    long_answer: int = 4

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of the streams, then the long ones."""
        chance, lengths = random.Random(0), [self.prompt] * self.streams
        lengths += [self.long_prompt] * self.long
        return [chance.choices(range(VOCABULARY), k=length) for length in lengths]


def run(engine: Any, load: Load) -> dict[str, Any]:
    """Run a load. Returns its seconds, the seconds between two tokens of a stream ("itl"), and the
    tokens of each request ("ids")."""
    prompts = load.prompts
    long = iter(prompts[load.streams :])
    engine.generate([[1] * 40], greedy(2))  # warms up
    times: dict[str, list[float]] = {}
    requests, started = [], time.perf_counter()

    def add(prompt: Sequence[int], tokens: int) -> str:
        requests.append(engine.add(Request(prompt, greedy(tokens))))
        return str(requests[-1].id)

    for prompt in prompts[: load.streams]:
        times[add(prompt, load.answer)] = []
    arriving = add(next(long), load.long_answer) if load.long else ""
    while engine.requests:
        for name, token in engine.step():
            if name in times:
                times[name].append(time.perf_counter())
            elif name == arriving and token.finish_reason:
                with contextlib.suppress(StopIteration):
                    arriving = add(next(long), load.long_answer)
    return {
        "seconds": time.perf_counter() - started,
        "itl": [b - a for own in times.values() for a, b in pairwise(own)],
        "ids": [request.output.token_ids for request in requests],
    }


def compare(job: Job, load: Load, threads: int) -> dict[str, dict[str, Any]]:
    """Run the load on one engine with all `threads`, and apart with half of them on each side."""
    half = replace(job, threads=max(1, threads // 2))
    with apart(half) as engine:
        model = engine.engine.runner.model
        found = {APART: run(engine, load)}
    torch.set_num_threads(threads)
    return {TOGETHER: run(make(model, contexts=job.decode), load), **found}


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed apart", ABOUT, EXAMPLE)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    dtype = str(cli.choose_dtype(options.dtype, torch.device("cpu"))).removeprefix("torch.")
    job = Job(options.model, options.random_weights, dtype)
    found = compare(job, Load(), options.threads or torch.get_num_threads())
    print(f"{'':10} {'ITL p50':>10} {'ITL p99':>10} {'tok/s':>10}")
    for name, one in found.items():
        low, high = (1e3 * float(np.percentile(one["itl"], percent)) for percent in (50, 99))
        rate = sum(map(len, one["ids"])) / one["seconds"]
        print(f"{name:10} {low:7.1f} ms {high:7.1f} ms {rate:10.1f}")
    same = found[TOGETHER]["ids"] == found[APART]["ids"]
    print(f"{'The same' if same else 'Different'} tokens in both.")
    return 0


if __name__ == "__main__":
    cli.run(main)
