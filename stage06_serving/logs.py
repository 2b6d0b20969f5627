"""The log on standard error: problems, at most one line a second of each kind, and requests if
wanted."""

from __future__ import annotations

import logging
import time
from collections import Counter

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


def start(requests: bool) -> None:
    """Log warnings and errors, and if `requests` a line for each request, to standard error."""
    handler = logging.StreamHandler()
    handler.addFilter(Sparing())
    logging.basicConfig(level=logging.WARNING, format=FORM, handlers=[handler])
    if requests:
        logging.getLogger("staircase.requests").setLevel(logging.INFO)
