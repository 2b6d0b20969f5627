"""An engine in a long-lived process of its own, which answers one request at a time and is watched:
its answers, how long they take, and what other programs use meanwhile."""

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

from .install import ENGINES, HOME, QUANTIZED, python

STARTING, ANSWERING = 900.0, 300.0  # seconds: the first start converts the checkpoint
CALM = 0.3  # seconds before a measurement: the previous engine's threads may still spin
OTHERS, TICKS = 0.04, 0.02  # share of a core, and seconds below which the clock cannot tell
POLL = 0.2  # seconds between two checks of whether a server is ready
LONGEST = 200  # characters of a reason
Run = Callable[[], dict[str, Any]]


class Driver:
    """A process that speaks as `drive.py` does, or a server that does not speak. Use it in a
    `with`. Its methods raise UserError if it has ended, or if it does not answer in time; then they
    end it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        speaks: bool = True,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        out = subprocess.PIPE if speaks else self._log  # an unread pipe fills up
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": self._log}
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
        """End it and its children at once: they have nothing to lose."""
        for child in children(self.process.pid):
            with suppress(psutil.Error):
                child.kill()
        self.process.kill()
        self.process.wait()

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = STARTING) -> None:
        """Wait until `holds`, which asks a starting server; `what` names it in an error."""
        latest = time.monotonic() + seconds
        while not holds():
            if self.process.poll() is not None or time.monotonic() > latest:
                raise UserError(f"{what} did not start: {self.last_line()}")
            time.sleep(POLL)

    def ready(self, seconds: float = STARTING) -> Any:
        """What it runs, once it has loaded: see `drive.py`."""
        return self._reply(seconds)

    def ask(self, prompts: list[list[int]], count: int, seconds: float = ANSWERING) -> Any:
        """Its reply to a request; see `drive.py`."""
        with suppress(OSError):  # it has ended: the missing reply tells why
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
            self.process.stdin.flush()
        reply = self._reply(seconds)
        lengths = set(map(len, reply["tokens"]))
        if lengths != {count} or len(reply["tokens"]) != len(prompts):
            self.stop()
            raise UserError(f"it gave answers of {sorted(lengths)} tokens instead of {count}")
        return reply

    def _reply(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        started, clock = time.monotonic(), threading.Timer(seconds, self.stop)
        clock.start()
        try:
            line = self.process.stdout.readline()  # "" once it has ended
        finally:
            clock.cancel()
        if line:
            return json.loads(line)
        if time.monotonic() - started >= seconds:
            raise UserError(f"it did not answer within {seconds:g} s")
        status = self.process.wait()
        raise UserError(self.last_line() or f"it ended with status {status}")

    def last_line(self) -> str:
        """The end of what it has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip().rpartition("\n")[2][:LONGEST]


def started(name: str, folder: Path, dtype: str) -> Driver:
    """An engine of ENGINES or QUANTIZED that loads the checkpoint in `folder`, installed at the
    first call."""
    engine, threads = (ENGINES | QUANTIZED)[name], torch.get_num_threads()
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
        self,
        dtype: str,
        ways: Mapping[str, tuple[Run, int]],
        rounds: int,
        tries: int,
        **beside: Run,
    ) -> dict[str, list[dict[str, Any]]]:
        """Run all engines in turn, each by `calm`, with the runs `beside` them, and return what
        they found, without engines that failed. ways: what to run, and its process."""

        def turn(name: str, run: Run, pid: int) -> dict[str, Any] | None:
            if any((failure["engine"], failure["dtype"]) == (name, dtype) for failure in self):
                return None
            with self.named(name, dtype):
                return calm(run, pid, tries)
            return None

        every = beside | {name: partial(turn, name, *way) for name, way in ways.items()}
        results: dict[str, list[Any]] = measure.turns(every, rounds, warmup=0) if every else {}
        return {name: runs for name, runs in results.items() if None not in runs}


def calm(run: Run, pid: int, tries: int) -> dict[str, Any]:
    """What `run` returns, after a pause, with "others": how many processors were used, on average
    over its "seconds", by programs other than this one and process `pid`.

    Runs up to `tries` times while that is too much; the calmest run counts.
    """
    runs: list[dict[str, Any]] = []
    while len(runs) < tries:
        time.sleep(CALM)
        before = busy() - used(pid)
        runs.append(run())
        taken = max(0.0, busy() - used(pid) - before)
        runs[-1]["others"] = taken / runs[-1]["seconds"]
        if taken <= OTHERS * runs[-1]["seconds"] + TICKS:
            break
    return min(runs, key=lambda result: result["others"])


def children(pid: int) -> list[psutil.Process]:
    """All processes that a process, which may have ended, has started."""
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def busy() -> float:
    """Seconds that the processors have worked since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def used(pid: int) -> float:
    """Processor seconds used by this process, and by process `pid` with its children."""
    try:
        every = [psutil.Process(), psutil.Process(pid), *children(pid)]
        return sum(sum(process.cpu_times()[:2]) for process in every)
    except psutil.Error:
        return 0.0  # it has ended, as its next reply will tell
