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
MOST_RESULTS, MOST_OUTPUT, KEPT = 4 * 2**20, 10 * 2**20, 4000  # bytes
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


def here(job: Mapping[str, Any], root: Path, seconds: float) -> Run:
    """Run one's own code in the tree `root`; its output goes to the terminal."""
    command, limits = [sys.executable, str(INSIDE)], Limits(seconds, 2**20, 2**16)
    return run(command, job, limits, stderr=None, cwd=root)


def run(
    command: Sequence[str],
    job: Mapping[str, Any],
    limits: Limits,
    stop: Callable[[], object] = lambda: None,
    **options: Any,
) -> Run:
    """Start `command` with a job for inside.py as its last argument. stop: ends what is not a child
    of it. options: of Popen."""
    started, result, full = time.monotonic(), Run(), threading.Event()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1, **options}
    process = subprocess.Popen([*command, json.dumps(job)], start_new_session=True, **pipes)
    results, output = bytearray(), bytearray()
    readers = [threading.Thread(target=_read, args=(process.stdout, MOST_RESULTS, results, full))]
    if process.stderr is not None:
        args = process.stderr, MOST_OUTPUT, output, full
        readers.append(threading.Thread(target=_read, args=args))
    for reader in readers:
        reader.start()
    try:
        while process.poll() is None and not result.ended:
            result.ended = _exceeded(process.pid, started, limits, full)
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
    finally:
        if result.ended:
            stop()
        _end(process)
        for reader in readers:
            reader.join(5)
    if full.is_set():
        result.ended = f"it printed more than {MOST_OUTPUT >> 20} MB"
    for line in results.decode(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if "status" in entry:
                result.status = entry["status"]
            else:
                result.outcomes[str(entry["id"])] = str(entry["outcome"]), str(entry["why"])
    result.output = output.decode(errors="replace")
    result.seconds = time.monotonic() - started
    if not result.ended and result.status is None:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"with status {code}"
        result.ended = f"its process ended {how} before its tests did"
    return result


def _read(pipe: IO[bytes], most: int, kept: bytearray, full: threading.Event) -> None:
    count = 0
    with pipe:
        while piece := os.read(pipe.fileno(), 2**16):
            count += len(piece)
            kept += piece
            if most == MOST_OUTPUT:
                del kept[:-KEPT]
            if count > most:
                return full.set()
    return None


def _exceeded(pid: int, started: float, limits: Limits, full: threading.Event) -> str:
    """Which limit the processes under `pid` exceed; "" if none."""
    if full.is_set():
        return "full"
    if time.monotonic() - started > limits.seconds:
        return f"it took more than {limits.seconds:.0f} s: an endless loop?"
    memory, family = 0, []
    with suppress(psutil.Error):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        with suppress(psutil.Error):
            memory += process.memory_info().rss
    if len(family) > limits.processes:
        return f"it started more than {limits.processes} processes"
    return (
        f"it took more than {limits.memory} MiB of memory" if memory >> 20 > limits.memory else ""
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, also those in sessions of their own."""
    family = [None]
    while family:  # they may start others meanwhile
        family = []
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            with suppress(psutil.Error):
                child.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
