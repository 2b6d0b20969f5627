"""The log on standard error. The event loop waits for no reader of it: a thread writes the lines
(logging.handlers.QueueListener)."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
from logging.handlers import QueueHandler, QueueListener

FORM = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
MOST_LINES = 10_000  # that wait to be written; more are dropped


class Dropping(QueueHandler):
    """A handler that drops a line where the queue is full: standard error may be a pipe that is not
    read."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the queue is full."""


def start(requests: bool) -> None:
    """Log warnings and errors, and if `requests` a line for each request, to standard error."""
    logging.raiseExceptions = False  # a full disk or a closed pipe is no error of the server
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(FORM)
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    listener = QueueListener(lines, writer)
    listener.start()
    atexit.register(listener.stop)
    logging.root.addHandler(Dropping(lines))
    if requests:
        logging.getLogger("staircase.requests").setLevel(logging.INFO)
