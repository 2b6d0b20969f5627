"""The log on standard error: problems, at most one line a second of each kind, and requests if
wanted. It waits for no reader."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import Counter
from typing import TextIO

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_LINES = 10_000  # that wait to be written
FLUSH = 1.0  # seconds in which the last lines are written, at the end


class Sparing(logging.Filter):
    """Passes one warning or error a second of each kind, and counts the rest: a flood of clients
    must not become a flood of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[tuple[str, str], float] = {}  # by logger and text without its values
        self.dropped: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, str(record.msg)[:80]), time.monotonic()
        if now - self.last.get(kind, -1.0) < 1:
            self.dropped[kind] += 1
            return False
        self.last[kind] = now
        if dropped := self.dropped.pop(kind, 0):
            record.msg = f"{record.msg} (and {dropped} more of this kind)"
        return True


class Queued(logging.Handler):
    """Writes lines on a thread of its own: standard error may be a pipe that is not read, and a
    write would stop the event loop. Lines beyond MOST_LINES are dropped and counted."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = sys.stderr if stream is None else stream
        self.dropped = 0
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record))

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait for the lines so far, at most FLUSH seconds."""
        deadline = time.monotonic() + FLUSH
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if self.dropped and self._lines.empty():
                line += f"\n({self.dropped} lines were dropped: the log was not read in time)"
                self.dropped = 0
            with contextlib.suppress(OSError, ValueError):  # closed
                self.stream.write(line + "\n")
                self.stream.flush()
            self._lines.task_done()


def show(line: str) -> None:
    """Write a line as it is to standard error, in the log's way."""
    for handler in logging.root.handlers:
        if isinstance(handler, Queued):
            return handler.write(line)
    print(line, file=sys.stderr, flush=True)


def start(requests: bool) -> None:
    """Log warnings and errors, and if `requests` a line for each request, to standard error."""
    handler = Queued()
    handler.addFilter(Sparing())
    logging.basicConfig(level=logging.WARNING, format=FORM, handlers=[handler])
    if requests:
        logging.getLogger("staircase.requests").setLevel(logging.INFO)
