"""Our server as a process of its own, started by its name as any other program: for whoever speaks HTTP to it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from .errors import UserError
from .stages import ROOT

MODULE = "stage06_serving"
READY = "Staircase serves "
STOPPING = 15.0  # seconds for it to end by itself


@dataclass(frozen=True)
class OwnServer:
    url: str
    pid: int


@contextmanager
def own_server(arguments: Sequence[str] = (), quiet: bool = False) -> Iterator[OwnServer]:
    """Our server on a free port, for as long as the block lasts. What it says goes to standard error, unless it is to be `quiet`.

    Raises UserError, with its last words, if it does not start.
    """
    command = [sys.executable, "-m", MODULE, "--port", "0", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stderr is not None
        said: deque[str] = deque(maxlen=20)

        def listen() -> None:
            """The pipe must be emptied, or a talkative server would stand still."""
            assert process.stderr is not None
            if quiet:
                deque(process.stderr, maxlen=0)
            else:
                for line in process.stderr:
                    tqdm.write(line, file=sys.stderr, end="")  # above whatever bar is being drawn

        listener = threading.Thread(target=listen, daemon=True)
        try:
            for line in process.stderr:
                said.append(line)
                if line.startswith(READY):
                    break
            else:
                raise UserError(f"The server did not start: {_last(said)}")
            listener.start()
            yield OwnServer(said[-1].split()[-1], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                process.kill()
            if listener.is_alive():
                listener.join()


def _last(said: Sequence[str]) -> str:
    """The line that says why, without what `cli` puts before it."""
    lines = [line.strip() for line in said if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"try python -m {MODULE} to see why."
