"""Connections: clients that never finish, are too many, or reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys

from fastapi import FastAPI

from stage06_serving import __main__ as program
from stage06_serving import connection, guard
from stage06_serving.guard import Guard
from stage06_serving.inside import listening

from .asking import HANG, JSON, status_of, written

LINGER = "hh" if sys.platform == "win32" else "ii"


@contextlib.asynccontextmanager
async def beside():
    """(connect, begun) of a real server in this process; a request to /wait sets `begun`."""
    app, begun, over = FastAPI(), asyncio.Event(), asyncio.Event()
    app.add_middleware(Guard)

    @app.get("/")
    async def root() -> str:
        return "well"

    @app.get("/wait")
    async def wait() -> None:
        begun.set()
        await over.wait()

    async with asyncio.timeout(HANG), listening(app) as url, contextlib.AsyncExitStack() as stack:

        async def connect(data=b""):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(data)
            return reader, writer

        stack.callback(over.set)
        yield connect, begun


async def test_headers_and_bodies_have_a_time_limit(monkeypatch):
    """Both before a connection's first request and between two requests."""
    monkeypatch.setattr(connection, "SLOWEST_HEADERS", 0.3)
    monkeypatch.setattr(guard, "SLOWEST_BODY", 0.3)
    async with beside() as (connect, begun):
        silent, _ = await connect()
        half, _ = await connect(written("/")[:20])
        body, _ = await connect(written("/", JSON, "Content-Length: 9", method="POST") + b"{")
        second, writer = await connect(written("/"))
        assert (await second.readuntil(b'"well"')).startswith(b"HTTP/1.1 200")
        writer.write(written("/")[:20])
        assert await silent.read() == b""  # until the server closes
        for reader in (half, second, body):
            answer = await reader.read()
            assert status_of(answer) == 408 and b"RequestTimeoutError" in answer


async def test_the_connection_that_waits_longest_makes_room(monkeypatch, caplog):
    """Requests being answered are not interrupted."""
    monkeypatch.setattr(program, "most_connections", lambda: 2)
    async with beside() as (connect, begun):
        oldest, _ = await connect(written("/")[:20])
        busy, _ = await connect(written("/wait"))
        await begun.wait()
        third, writer = await connect(written("/"))
        assert await third.readuntil(b'"well"')
        assert await oldest.read() == b""
        writer.write(written("/wait"))  # now both are busy
        begun.clear()
        await begun.wait()
        refused, _ = await connect(written("/"))
        answer = await refused.read()
        assert status_of(answer) == 503 and b"too many connections" in answer
        assert "data_received" not in caplog.text  # its request: h11 would fail, and reset it
        assert not busy.at_eof() and not third.at_eof()


async def test_a_client_that_resets_as_it_is_refused_is_no_error(monkeypatch, caplog):
    """The reset comes after the last byte of the answer, before the server closes its side."""
    complete, reset = connection.Connection.on_response_complete, asyncio.Event()

    def after_reset(self):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(LINGER, 1, 0))
        client.close()
        complete(self)
        reset.set()

    monkeypatch.setattr(connection.Connection, "on_response_complete", after_reset)
    async with beside() as (connect, _):
        _, writer = await connect()
        client = socket.create_connection(writer.get_extra_info("peername"))
        client.sendall(written("/", "Content-Length: 9", method="POST"))  # not JSON: refused
        await reset.wait()
    assert not caplog.text
