"""A server of stage 06 that ends with the process that started it, however its parent ends.

Its standard input is a pipe from the parent. The pipe closes when the parent stops the server, and
also when the parent dies and can send no signal. Windows has no such signal anyway.
"""

from __future__ import annotations

import os
import signal
import threading

from shared import cli
from stage06_serving import __main__ as server


def watch() -> None:
    """Stop the server in order once the pipe is closed. `sys.stdin` is not used: no thread may hold
    its lock when Python ends."""
    while os.read(0, 4096):
        pass
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, daemon=True).start()
    cli.run(server.main)
