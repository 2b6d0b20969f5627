"""The log on standard error: a thread writes the lines, and the event loop waits for no reader."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
from logging.handlers import QueueHandler, QueueListener

MOST_LINES = 10_000  # that wait to be written; more are dropped


def start(requests: bool) -> None:
    """Log warnings and errors, and if `requests` uvicorn's line for each request."""
    logging.raiseExceptions = False  # a full queue or disk, or a closed pipe, is no error
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    listener = QueueListener(lines, writer)
    listener.start()
    atexit.register(listener.stop)
    logging.root.addHandler(QueueHandler(lines))
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if requests else logging.WARNING)
