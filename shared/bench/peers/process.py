"""An engine in a process of its own, which stays, answers one request at a time, and is watched:
what it answers with, how long it takes, and what other programs took meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from shared import measure, paths
from shared.errors import UserError

from .install import ENGINES, HOME, python

STARTING, ANSWERING = 900.0, 300.0  # seconds: the first start converts the checkpoint
CALM = 0.3  # seconds before a measurement: threads of the engine before it may still spin
OTHERS, TICKS = 0.04, 0.02  # share of a core, and seconds below which the clock cannot tell
LONGEST = 200  # characters of a reason
Run = Callable[[], dict[str, Any]]


class Driver:
    """A process that speaks as `drive.py` does. Use it in a `with`. Its methods raise UserError
    when it has ended, or does not answer in time, which ends it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command, cwd=paths.ROOT, env=environment, encoding="utf-8", **pipes
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        with suppress(OSError), self.process:  # what it has not read is lost
            self._log.close()

    def stop(self) -> None:
        """End it and its children at once: there is nothing that they could lose."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    def ready(self, seconds: float = STARTING) -> dict[str, str]:
        """The versions of what it runs, once it has loaded."""
        found: dict[str, str] = self._reply(seconds)["ready"]
        return found

    def ask(
        self, prompts: list[list[int]], count: int, seconds: float = ANSWERING
    ) -> dict[str, Any]:
        """What it answers; see `drive.py`."""
        with suppress(OSError):  # it has ended: the missing reply tells why
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
            self.process.stdin.flush()
        found = self._reply(seconds)
        lengths = set(map(len, found["tokens"]))
        if lengths != {count} or len(found["tokens"]) != len(prompts):
            self.stop()
            raise UserError(f"it gave answers of {sorted(lengths)} tokens instead of {count}")
        return found

    def _reply(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self.stop()

        clock = threading.Timer(seconds, end)
        clock.start()
        try:
            line = self.process.stdout.readline()  # "" once it has ended
        finally:
            clock.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        if late.is_set():
            raise UserError(f"it did not answer within {seconds:g} s")
        status = self.process.wait()
        raise UserError(self.last_line() or f"it ended with status {status}")

    def last_line(self) -> str:
        """The end of what it has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip().rpartition("\n")[2][:LONGEST]


def started(name: str, folder: Path, dtype: str) -> Driver:
    """An engine of ENGINES that loads the checkpoint in `folder`, installed at the first call."""
    engine, threads = ENGINES[name], torch.get_num_threads()
    command = engine.command(python(engine, HOME), folder, dtype, threads)
    return Driver(command, engine.environment(threads))


class Failures(list[dict[str, str]]):
    """Which engine failed, at what ("dtype"), and the reason."""

    @contextmanager
    def named(self, engine: str, dtype: str) -> Iterator[None]:
        """A UserError in the block is kept and shown, and goes no further."""
        try:
            yield
        except UserError as error:
            self.append({"engine": engine, "dtype": dtype, "reason": str(error)})
            tqdm.write(f"{engine}, {dtype}: {error}", file=sys.stderr)

    def turns(
        self, plan: Any, dtype: str, ways: Mapping[str, tuple[Run, int]], **beside: Run
    ) -> dict[str, list[dict[str, Any]]]:
        """The runs of all engines in turn, each by `calm`, and `beside` them others; without the
        engines that failed. ways: what runs, and its process."""

        def turn(name: str, run: Run, pid: int) -> dict[str, Any] | None:
            if any((one["engine"], one["dtype"]) == (name, dtype) for one in self):
                return None
            with self.named(name, dtype):
                return calm(run, pid, plan.tries)
            return None

        every = beside | {name: partial(turn, name, *way) for name, way in ways.items()}
        found: dict[str, list[Any]] = measure.turns(every, plan.rounds, warmup=0) if every else {}
        return {name: runs for name, runs in found.items() if None not in runs}


def calm(run: Run, pid: int, tries: int) -> dict[str, Any]:
    """What `run` returns, after a pause, with "others": the processors that other programs than
    this one and process `pid` used meanwhile, on average over its "seconds".

    Up to `tries` times while that is too much; the calmest counts.
    """
    found: list[dict[str, Any]] = []
    while len(found) < tries:
        time.sleep(CALM)
        before = busy() - used(pid)
        found.append(run())
        taken = max(0.0, busy() - used(pid) - before)
        found[-1]["others"] = taken / found[-1]["seconds"]
        if taken <= OTHERS * found[-1]["seconds"] + TICKS:
            break
    return min(found, key=lambda one: one["others"])


def busy() -> float:
    """Seconds for which the processors have worked since the machine was started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def used(pid: int) -> float:
    """Seconds of processors that this process, and process `pid` with its children, have used."""
    try:
        other = psutil.Process(pid)
        every = [psutil.Process(), other, *other.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in every)
    except psutil.Error:
        return 0.0  # it has ended, which its next reply tells
