"""Connections: clients that never finish, are too many, or reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from stage06_serving import __main__ as program
from stage06_serving import connection
from stage06_serving.guard import Guard
from stage06_serving.inside import listening

from .asking import HANG, JSON, status_of, written
from .tools import until

BIG = 2**24  # bytes: more than two systems keep on the way
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

    @app.get("/until-left")
    async def until_left(request: Request) -> None:
        begun.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        over.set()

    @app.get("/slow")
    async def slow() -> str:
        begun.set()
        await asyncio.sleep(0.3)
        return "well"

    @app.get("/big")
    async def big() -> Response:
        return Response(b"a" * BIG)

    async with asyncio.timeout(HANG), listening(app) as url, contextlib.AsyncExitStack() as stack:

        async def connect(data=b"", **options):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
            stack.callback(writer.close)
            writer.write(data)
            return reader, writer

        stack.callback(over.set)
        yield connect, begun


async def test_headers_and_bodies_have_a_time_limit(monkeypatch):
    """Both before a connection's first request and between two requests."""
    monkeypatch.setattr(connection, "SLOWEST_HEADERS", 0.3)
    monkeypatch.setattr(connection, "SLOWEST_BODY", 0.3)
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
        assert "data_received" not in caplog.text  # an error would reset it
        assert not busy.at_eof() and not third.at_eof()


async def test_requests_that_come_too_early_are_answered_in_turn():
    """However the bytes are cut."""
    requests = written("/slow") + b"\r\n" + written("/") + written("/nowhere") + written("/")
    async with beside() as (connect, _):
        for size in (1, 50, len(requests)):
            reader, writer = await connect()
            for begin in range(0, len(requests), size):
                writer.write(requests[begin : begin + size])
                await writer.drain()
                await asyncio.sleep(0)
            answers = b""
            while answers.count(b'"well"') < 3:
                answers += await reader.read(2**16)
            statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
            assert statuses == [200, 200, 404, 200]


async def length(reader):
    """Of what comes until the server closes; 0 if it resets the connection."""
    with contextlib.suppress(ConnectionError):
        return len(await reader.read())
    return 0


@pytest.mark.parametrize("limit", ["time", "bytes of one", "bytes of all", "connections"])
async def test_answers_that_are_not_read_make_room(monkeypatch, limit):
    """`send` waited for ever: 72 such clients shut out all others, and 15 kept 800 MB."""
    seen: dict[str, list[Any]] = {"watch": [], "drop": []}

    def note(kind, name):
        function = getattr(kind, name)

        def noted(self, *arguments):
            seen[name].append(self)
            return function(self, *arguments)

        monkeypatch.setattr(kind, name, noted)

    note(connection.Door, "watch")
    note(connection.Connection, "drop")
    monkeypatch.setattr(connection, "LOOK", 0.05)
    if limit == "time":
        monkeypatch.setattr(connection, "SLOWEST_READER", 0.2)
    elif limit == "bytes of one":
        monkeypatch.setattr(connection, "MOST_UNREAD", (BIG // 8, 9 * BIG))
    elif limit == "bytes of all":
        monkeypatch.setattr(connection, "MOST_UNREAD", (2 * BIG, BIG))
    else:
        monkeypatch.setattr(program, "most_connections", lambda: 2)
    async with beside() as (connect, _):
        big = written("/big", "Connection: close")
        stuck = [(await connect(big, limit=2**16))[0] for _ in range(2)]
        await until(lambda: len(seen["watch"]) == 2, HANG)
        await asyncio.sleep(0.1)  # longer than LOOK
        reader, _ = await connect(written("/"))
        assert await reader.readuntil(b'"well"')
        count = 2 if limit in ("time", "bytes of one") else 1
        await until(lambda: len(seen["drop"]) == count, HANG)
        lengths = [await length(reader) for reader in stuck]
        assert sum(length < BIG for length in lengths) == count


async def test_a_reader_that_is_slow_but_reads_gets_all(monkeypatch):
    monkeypatch.setattr(connection, "LOOK", 0.02)
    monkeypatch.setattr(connection, "LEAST_READ", 1)
    monkeypatch.setattr(connection, "SLOWEST_READER", 0.8)
    async with beside() as (connect, _):
        reader, _ = await connect(written("/big", "Connection: close"), limit=2**16)
        size, begun = 0, asyncio.get_running_loop().time()
        while data := await reader.read(2**18):
            size += len(data)
            await asyncio.sleep(0.015)
        assert size > BIG and asyncio.get_running_loop().time() - begun > 0.8


async def test_a_half_closed_client_gets_its_answer_and_one_that_left_is_noticed(monkeypatch):
    """Both send the same bytes: the end of their data."""
    async with beside() as (connect, begun):
        for version in (b"1.0", b"1.1"):
            reader, writer = await connect(written("/slow").replace(b"1.1", version))
            await begun.wait()
            writer.write_eof()
            answer = await reader.read()
            assert b"HTTP/1.1 200" in answer and answer.endswith(b'"well"')
            begun.clear()
        _, writer = await connect(written("/until-left"))
        await begun.wait()
        writer.close()
        reader, _ = await connect(written("/wait"))  # until the other has left
        assert await reader.readuntil(b"null")


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


async def test_a_client_that_is_refused_may_send_on():
    """A reset could overtake the answer."""
    async with beside() as (connect, _):
        for more in ((), ("Connection: close",)):
            head = written("/", "Content-Length: 100000", *more, method="POST")  # not JSON
            reader, writer = await connect(head)
            answer = await reader.readuntil(b"}}")
            assert status_of(answer) == 400 and b"connection: close" in answer
            for _ in range(5):
                writer.write(b"a" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.02)
            assert await reader.read() == b""


async def test_an_answer_is_complete_at_shutdown_whatever_came_behind_its_request():
    app, begun = FastAPI(), asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        begun.set()
        await asyncio.sleep(0.3)
        return "well"

    async with asyncio.timeout(HANG):
        async with listening(app) as url:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(written("/slow", "Transfer-Encoding: chunked"))
            writer.write(b"0\r\n\r\n" + written("/"))
            await begun.wait()
        assert (await reader.read()).endswith(b'"well"')
        writer.close()


async def test_a_part_of_a_body_is_written_unless_the_client_has_much_to_read():
    """What is not written is for the application to send later."""
    parts, full = list[bytes](), asyncio.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http":  # the lifespan
            return
        write = scope["extensions"][connection.WRITE]
        await send({"type": "http.response.start", "status": 200})
        while write(part := b"%d " % len(parts) * 5000):
            parts.append(part)
        full.set()
        for body in (part, b"."):
            parts.append(body)
            await send({"type": "http.response.body", "body": body, "more_body": body != b"."})

    async with asyncio.timeout(HANG), listening(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(written("/"))
        await full.wait()
        body = b""
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        writer.close()
    assert len(parts) > 5 and body == b"".join(parts)
