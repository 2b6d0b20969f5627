"""Run tests in a process of its own, within limits, and read what it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

INSIDE = Path(__file__).with_name("inside.py")
MOST_OUTPUT, MOST_RESULTS = 10 * 2**20, 4 * 2**20  # bytes that are read at most
POLL = 0.05  # seconds


@dataclass(frozen=True)
class Limits:
    """seconds: of wall-clock time. memory: MiB of all its processes, of which there are at most
    `processes`."""

    seconds: float = 60.0
    memory: int = 4096
    processes: int = 64


@dataclass
class Run:
    """outcomes: by test id, ("passed", "") or ("failed", "row 1, column 1 is 6, not 0").

    ended: why the process came to no end of its own; "" if it did. output: the last of what it
    printed.
    """

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    status: int | None = None
    ended: str = ""
    output: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> list[tuple[str, str]]:
        """The tests that did not pass, each with the reason."""
        return [
            (test, why) for test, (outcome, why) in self.outcomes.items() if outcome != "passed"
        ]


def run(
    command: Sequence[str],
    job: Mapping[str, Any],
    limits: Limits,
    stop: Callable[[], None] | None = None,
    echo: bool = False,
    **options: Any,
) -> Run:
    """Start `command` with a job for inside.py as its last argument. stop: ends what is not a child
    of it. echo: the output goes to the terminal. options: of Popen."""
    started, result = time.monotonic(), Run()
    process = subprocess.Popen(
        [*command, json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if echo else subprocess.PIPE,
        start_new_session=not echo,
        **options,
    )
    pipes = [
        (process.stdout, MOST_RESULTS, bytearray()),
        (process.stderr, MOST_OUTPUT, bytearray()),
    ]
    full = threading.Event()
    readers = [threading.Thread(target=_read, args=(*pipe, full)) for pipe in pipes if pipe[0]]
    for reader in readers:
        reader.start()
    try:
        while process.poll() is None and not result.ended:
            result.ended = _exceeded(process.pid, started, limits, full)
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
    finally:
        _end(process, own_session=not echo)
        if stop is not None and result.ended:
            stop()
        for reader in readers:
            reader.join(5)
    if full.is_set():
        result.ended = f"it printed more than {MOST_OUTPUT >> 20} MB"
    for line in pipes[0][2].decode(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if "status" in entry:
                result.status = entry["status"]
            else:
                result.outcomes[str(entry["id"])] = str(entry["outcome"]), str(entry["why"])
    result.output = bytes(pipes[1][2][-4000:]).decode(errors="replace")
    result.seconds = time.monotonic() - started
    if not result.ended and result.status is None:
        code = process.returncode
        result.ended = (
            f"its process ended by {signal.Signals(-code).name}"
            if code < 0
            else (f"its process ended with status {code} before its tests did")
        )
    return result


def _read(pipe: IO[bytes], most: int, kept: bytearray, full: threading.Event) -> None:
    read, count = pipe.fileno(), 0
    while piece := os.read(read, 2**16):
        count += len(piece)
        kept += piece
        if most == MOST_OUTPUT:
            del kept[:-4000]
        if count > most:
            full.set()
            return


def _exceeded(pid: int, started: float, limits: Limits, full: threading.Event) -> str:
    """Which limit the processes under `pid` exceed; "" if none."""
    if full.is_set():
        return "full"
    if time.monotonic() - started > limits.seconds:
        return f"it took more than {limits.seconds:.0f} s: an endless loop?"
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return ""
    if len(family) > limits.processes:
        return f"it started more than {limits.processes} processes"
    memory = 0
    for process in family:
        with suppress(psutil.Error):
            memory += process.memory_info().rss
    return (
        f"it took more than {limits.memory} MiB of memory" if memory >> 20 > limits.memory else ""
    )


def _end(process: subprocess.Popen[bytes], own_session: bool) -> None:
    """Kill a process and its descendants, also those in sessions of their own."""
    for _ in range(100):  # a process may start others meanwhile
        family = []
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            with suppress(psutil.Error):
                child.kill()
        if own_session:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if not family:
            break
    if process.poll() is None:
        process.kill()
    process.wait()


def here(job: Mapping[str, Any], seconds: float, echo: bool = False, **options: Any) -> Run:
    """Run one's own code, in the tree as it stands."""
    return run(
        [sys.executable, str(INSIDE)], job, Limits(seconds, 2**20, 2**16), None, echo, **options
    )
