"""The log on standard error: problems, and if wanted a line for each request. The event loop waits
for no reader of it: a thread writes the lines (logging.handlers.QueueListener)."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
from logging.handlers import QueueHandler, QueueListener

FORM = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
MOST_LINES = 10_000  # that wait to be written; more are dropped
SHOWN = "staircase.shown"


class Dropping(QueueHandler):
    """A handler that drops a line where the queue is full: standard error may be a pipe that is not
    read."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the queue is full."""


class Lines(logging.Formatter):
    """Formats as FORM does, but lines of `show` stay as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == SHOWN else FORM.format(record)


def start(requests: bool) -> None:
    """Log warnings and errors, and if `requests` a line for each request, to standard error."""
    logging.raiseExceptions = False  # a full disk or a closed pipe is no error of the server
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(Lines())
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    listener = QueueListener(lines, writer)
    listener.start()
    atexit.register(listener.stop)
    logging.root.addHandler(Dropping(lines))
    logging.getLogger(SHOWN).setLevel(logging.INFO)
    if requests:
        logging.getLogger("staircase.requests").setLevel(logging.INFO)


def show(line: str) -> None:
    """Write a line as it is to standard error, in the log's way."""
    logging.getLogger(SHOWN).info("%s", line)
