"""An engine in a long-lived process of its own, which answers one request at a time and is watched:
its answers, how long they take, and what other programs use meanwhile."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from shared import paths
from shared.errors import UserError

from .install import Engine

STARTING, ANSWERING = 900.0, 300.0  # seconds: the first start converts the checkpoint
LONGEST = 200  # characters of a reason


class Driver:
    """A process that speaks as `drive.py` does. Use it in a `with`. Its methods raise UserError if
    it has ended, or if it does not answer in time; then they end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
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
        """End it and its children at once: they have nothing to lose."""
        for child in children(self.process.pid):
            with suppress(psutil.Error):
                child.kill()
        self.process.kill()
        self.process.wait()

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
        raise UserError(self.reason() or f"it ended with status {status}")

    def reason(self) -> str:
        """Of its end: the last error that it has written. Libraries log much else there, before and
        after it."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [
            line for line in lines if re.search(r"error|cannot|could not|does not", line, re.I)
        ]
        return (errors or lines or [""])[-1].strip()[:LONGEST]


def started(engine: Engine, folder: Path, dtype: str, weights: str) -> Driver:
    """An engine that loads the checkpoint in `folder`."""
    threads = torch.get_num_threads()
    command = engine.command(folder, dtype, weights, threads)
    return Driver(command, engine.environment(threads))


def children(pid: int) -> list[psutil.Process]:
    """All processes that a process, which may have ended, has started."""
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []
