"""Stage 06 on the command line: `python -m stage06_serving` starts the server."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from shared import cli
from shared.errors import UserError
from stage05_paged.memory import size

from . import logs
from .async_engine import EngineThread
from .loading import Served, make_engine
from .settings import Settings, parse

if TYPE_CHECKING:  # the settings are checked, and the port is taken, before it is imported
    from fastapi import FastAPI

log = logging.getLogger(__name__)
SWITCH = 0.0002  # seconds until the engine's thread, which runs little Python, gets the lock
BACKLOG = 1024  # connections that wait to be accepted
CLOSE = 2  # seconds for connections to close once their answers have ended
MOST_CONNECTIONS = 4096  # and requests at a time; uvicorn answers more with 503


class Server(uvicorn.Server):
    """uvicorn with a drain: at shutdown, requests in flight may end, and the rest get an error."""

    def __init__(self, app: FastAPI, grace: float) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # see logs.py
            ws="none",
            lifespan="on",
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE,
        )
        super().__init__(config)
        self.app, self.grace = app, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit |= self.should_exit  # at the second signal, whichever it is
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine = self.app.state.engine
        if engine.awaited and self.grace:
            log.warning(
                "Waiting up to %g s for %d sequences in flight: Ctrl-C again ends them at once.",
                *(self.grace, engine.awaited),
            )
        await engine.drain(self.grace, lambda: self.force_exit)
        self.force_exit = False  # all answers have ended: let the application end in order
        await super().shutdown(sockets)


def plan(settings: Settings, served: Served, address: str) -> str:
    """The text at the start: address, model, memory, and a command to try."""
    selection, pool = served.selection, served.engine.scheduler.pool
    loaded, config = selection.loaded, selection.loaded.config
    memory = size(pool.count * pool.block_size * config.kv_bytes_per_token(loaded.kv_dtype))
    sampling = ", ".join(f"{name} {value:g}" for name, value in served.defaults.items())
    key = ' -H "Authorization: Bearer $STAIRCASE_API_KEY"' if settings.keys else ""
    return (
        f"Staircase serves {config.name} at {address}\n"
        f"  model    {config.name}, context of {config.n_positions:,} tokens\n"
        f"  engine   {selection.name}, {loaded.machine}\n"
        + (f"  faster   {selection.reason}\n" if selection.reason else "")
        + f"  memory   {memory} in {pool.count} blocks of {pool.block_size} tokens; at most "
        f"{settings.max_num_seqs} sequences at a time, {settings.max_queue} more in the queue\n"
        f"  sampling {sampling}, unless a request says otherwise\n"
        f"  page     {address}/\n"
        f"  try      curl -N {address}/v1/completions{key} -H 'Content-Type: application/json' "
        f"""-d '{{"prompt": "Once upon a time", "max_tokens": 40, "stream": true}}'"""
    )


def main(argv: list[str] | None = None) -> int:
    settings = parse(argv)
    logs.start(settings.log_requests)
    # The port is taken before the model is loaded, which takes longer.
    with bind(settings.host, settings.port) as place:
        if settings.open_to_all:
            say(
                f"WARNING: --host {settings.host} opens the server to every machine that can reach "
                "this one, without an API key: set STAIRCASE_API_KEY, or listen on 127.0.0.1 "
                "behind a proxy."
            )
        say(f"Loading {settings.model}")
        serve(settings, place)
    return 0


def serve(settings: Settings, place: socket.socket) -> None:
    """Load the model, and answer until a signal ends the process."""
    thread = EngineThread()
    served = thread.run(lambda: make_engine(settings)).result()
    from .app import create_app

    server = Server(create_app(served, settings, thread), settings.grace)
    keep_objects()
    sys.setswitchinterval(SWITCH)
    place.listen(BACKLOG)
    say(plan(settings, served, address_of(place)))
    asyncio.run(server.serve(sockets=[place]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep_objects() -> None:
    """Hide all objects so far, such as the libraries', from the garbage collector, and let it look
    less often: each time it would visit them all, and stop the event loop for a third of a
    second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on, once the model is loaded. Raises UserError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Events are small, and must not wait until the client confirms the one before (Nagle).
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        place.close()
        raise UserError(
            f"The server cannot listen on {host}, port {port} ({error.strerror}): choose an "
            "address of this machine with --host, and a free --port."
        ) from None
    return place


def address_of(place: socket.socket) -> str:
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


if __name__ == "__main__":
    # Python's own handler would end the interpreter under a thread that computes, and abort. The
    # server shuts down first, and then lets the signal end the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli.run(main)
