"""Servers as processes: each on a free port, its log shown, ended in order."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

from shared.errors import UserError
from shared.paths import ROOT
from shared.server import READY, STOPPING
from stage06_serving import logs

LONGEST_LINE = 2**20  # bytes of a log
ERROR = "error: "  # begins the sentence with which a program ends
SERVER = "stage06_serving.__main__"


async def launch(
    name: str, arguments: Sequence[str], host: str = "127.0.0.1", module: str = SERVER
) -> tuple[Process, asyncio.Task[None], asyncio.Future[str]]:
    """Start a server, `module`, on a free port. Returns its process, the task that shows its log,
    and its address to be, which raises UserError with the server's last line if it does not
    start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.child", module),
        *(*arguments, "--host", host, "--port", "0"),
        cwd=ROOT,
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=PIPE,
        limit=LONGEST_LINE,
        start_new_session=True,  # Ctrl-C is for the router, which ends its servers in order
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return process, asyncio.create_task(_show(name, process, url)), url


async def close(process: Process, patience: float = STOPPING) -> None:
    """End a server in order, or kill it after `patience` seconds."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(patience):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _show(name: str, process: Process, url: asyncio.Future[str]) -> None:
    """Copy a server's log to ours, each line after its name, and set `url` from it. The
    error that ends its start is only in `url`: who waits for it shows it."""
    assert process.stderr is not None
    why, last = "", "try python -m stage06_serving to see why."
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # too long
            continue
        if not line:
            break
        text = line.decode(errors="replace").rstrip()
        if text.startswith(ERROR) and not url.done():
            why = text.removeprefix(ERROR)
            continue
        last = text.strip() or last
        logs.show(f"[{name}] {text}")
        if text.startswith(READY) and not url.done():
            url.set_result(text.split()[-1])
    if not url.done():
        url.set_exception(UserError(f"{name} did not start: {why or last}"))
