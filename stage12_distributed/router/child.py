"""A server that ends with the process that started it, however its parent ends: `python -m
stage12_distributed.router.child MODULE OPTION...`.

Its standard input is a pipe from the parent. The pipe closes when the parent stops the server, and
also when the parent dies and can send no signal. Windows has no such signal anyway.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module

from shared import cli


def watch() -> None:
    """Stop the server in order once the pipe is closed. `sys.stdin` is not used: no thread may hold
    its lock when Python ends."""
    while os.read(0, 4096):
        pass
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, daemon=True).start()
    server = import_module(sys.argv.pop(1))  # here: a rank's process imports this file, too
    cli.run(server.main)
