"""A server of stage 06 that ends with the process that started it, however that one ends.

Its standard input is a pipe from there. The pipe closes when that process stops the server, and
when it dies; a signal would need its help. Windows has no such signal anyway.
"""

from __future__ import annotations

import os
import signal
import threading

from shared import cli
from stage06_serving import __main__ as server


def watch() -> None:
    """Stop the server in order once the pipe is closed. Not through `sys.stdin`, whose lock a
    thread must not hold when Python ends."""
    while os.read(0, 4096):
        pass
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, daemon=True).start()
    cli.run(server.main)
