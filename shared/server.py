"""Our server in its own process, started like any other program, for clients over HTTP."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .paths import ROOT

MODULE = "stage06_serving"
READY = "Staircase serves "
STARTING = 180.0  # seconds until the server must be ready: it loads a model
STOPPING = 15.0  # seconds until a server that has been asked to end is killed


@dataclass
class OwnServer:
    """A server process; `url` is known once it is ready."""

    process: subprocess.Popen[bytes]
    log: Path  # its standard error
    url: str = ""

    def stderr(self) -> str:
        """What the server has written to standard error."""
        return self.log.read_bytes().decode(errors="replace")

    def wait(self) -> None:
        """Wait until the server is ready. Raises UserError with its last line if it never is."""
        deadline = time.monotonic() + STARTING
        while time.monotonic() < deadline and self.process.poll() is None:
            if ready := re.search(rf"^{READY}.*?(\S+)\n", self.stderr(), re.MULTILINE):
                self.url = ready[1]
                return
            time.sleep(0.05)
        last = self.stderr().strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"The server did not start: {last}")


@contextmanager
def own_server(
    arguments: Sequence[str] = (), quiet: bool = False, module: str = MODULE, wait: bool = True
) -> Iterator[OwnServer]:
    """Our server on a free port, for as long as the block lasts. Its standard error is shown at the
    end, unless it is `quiet`. module: what to run in place of the server. wait: until it is ready;
    UserError with its last line if it does not start."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "stderr"
        command = [sys.executable, "-m", module, "--port", "0", *arguments]
        with log.open("wb") as file:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            process = subprocess.Popen(command, cwd=ROOT, **pipes)
        server = OwnServer(process, log)
        try:
            if wait:
                server.wait()
            yield server
        finally:
            stop(process)
            if server.url and not quiet:
                print(server.stderr(), end="", file=sys.stderr)


def free_port() -> int:
    """A port that no program uses now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
