"""An engine in a process of its own, which is stopped while it is not asked: it takes no processor
from the engine that is measured."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from shared import paths
from shared.errors import UserError

STARTING, ANSWERING = 900.0, 300.0  # seconds: the first start converts the checkpoint
LONGEST = 200  # characters of a reason


class Driver:
    """A process that speaks as `drivers.py` does; use it in a `with`. Its methods raise UserError
    if it has ended, or if it does not answer in time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=paths.ROOT, env=environment, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.each("kill")
        with self.process:
            self._log.close()

    def each(self, signal: str) -> None:
        """Send it and its children a signal: "suspend", "resume" or "kill"."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for part in (*process.children(recursive=True), process):
                with suppress(psutil.Error):
                    getattr(part, signal)()

    def ready(self) -> None:
        """Wait until it has loaded."""
        self._reply(STARTING)

    def ask(self, prompts: list[list[int]], count: int) -> Any:
        """Its reply to a request; see `drivers.py`."""
        self.each("resume")
        with suppress(OSError):  # it has ended: the missing reply says why
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
            self.process.stdin.flush()
        reply = self._reply(ANSWERING)
        lengths = [len(ids) for ids in reply["tokens"]]
        if lengths != [count] * len(prompts):
            raise UserError(f"it gave answers of {set(lengths)} tokens instead of {count}")
        return reply

    def _reply(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        started, clock = time.monotonic(), threading.Timer(seconds, self.each, ("kill",))
        clock.start()
        line = self.process.stdout.readline()  # "" once it has ended
        clock.cancel()
        if line:
            self.each("suspend")
            return json.loads(line)
        if time.monotonic() - started >= seconds:
            raise UserError(f"it did not answer within {seconds:g} s")
        status = self.process.wait()
        self._log.seek(0)  # where libraries write much else, before and after their last error
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if re.search(r"error|cannot|could not", line, re.I)]
        last = (errors or [f"it ended with status {status}"])[-1]  # -4: an illegal instruction
        raise UserError(last.strip()[:LONGEST])
