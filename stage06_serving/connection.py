"""Limits on connections: their bytes, their time, and their number.

uvicorn has none of them. h11 limits headers only while they are incomplete: 54 KB passed, because
they arrived at once. Each header and each chunk takes microseconds of Python, whatever its size:
two megabytes in chunks of one byte kept the event loop busy for 18 seconds. And an answer that its
client does not read keeps memory and a descriptor: no other code looks at them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .async_engine import CLOSING
from .errors import error_body

LARGEST_HEADERS = 16_384  # bytes
MOST_HEADERS = 100
SLOWEST_HEADERS = 10.0  # seconds
MOST_CHUNKS = 512  # of a body
PIECE = 4_096  # bytes of a body in chunks that h11 gets at once: they may end in many headers
LINGER = 1.0  # seconds in which a refused client is still read: a reset could overtake the answer
MOST_CONNECTIONS = 4096
RESERVED = 128  # descriptors for other files, and for connections that are being accepted
BURST = 16  # connections accepted in one turn of the event loop
MOST_UNREAD = 2**25, 2**26  # bytes of answers not read: by one client, and by all
LEAST_READ, SLOWEST_READER = 2**16, 10.0  # bytes that a client must read in as many seconds
LOOK = 1.0  # seconds between two looks at the answers not read
PROBE = 0.05, 1.0  # seconds until a client that sends no more is probed a second time, and again
BLANK = re.compile(rb"\n\r?\n")
WRITE = "staircase.write"  # the extension in an ASGI scope: see Connection.write
SAFE = (  # with every answer: no other site may frame the page, or take an answer for a program
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)


CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
log = logging.getLogger("staircase.requests")


class Door:
    """Lets in at most `most` connections. When all are taken, a new one replaces the connection
    that has waited longest for its request, or whose client reads slowest."""

    def __init__(self, most: int = MOST_CONNECTIONS, statuses: Counter[int] | None = None) -> None:
        self.most = most
        self.statuses = Counter[int]() if statuses is None else statuses  # of all answers
        self.waiting: dict[Connection, None] = {}  # those without a whole request, the oldest first
        # The bytes that clients have not read, and the time of the last progress.
        self.unread: dict[Connection, tuple[int, float]] = {}
        self._looking: asyncio.TimerHandle | None = None

    def make_room(self) -> bool:
        """Close a connection for a new one. Returns whether there was one to close."""
        late = asyncio.get_running_loop().time() - LOOK
        for connection in (*self.waiting, *self._slowest()):
            if connection in self.waiting or self.unread[connection][1] < late:
                connection.drop()
                return True
        return False

    def watch(self, connection: Connection) -> None:
        """Look at the unread bytes of `connection` until there are none."""
        loop = asyncio.get_running_loop()
        self.unread[connection] = connection.unread, loop.time()
        self._shed()
        if self._looking is None:
            self._looking = loop.call_later(LOOK, self._look)

    def forget(self, connection: Connection) -> None:
        self.waiting.pop(connection, None)
        self.unread.pop(connection, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for connection, (size, since) in list(self.unread.items()):
            if connection.unread <= size - LEAST_READ:
                self.unread[connection] = connection.unread, loop.time()
            elif loop.time() - since > SLOWEST_READER:
                connection.drop()
        self._shed()
        self._looking = loop.call_later(LOOK, self._look) if self.unread else None

    def _shed(self) -> None:
        """Close connections, the slowest first, until the rest have few unread bytes."""
        single, total = MOST_UNREAD
        over = sum(connection.unread for connection in self.unread) - total
        for connection in self._slowest():
            if over > 0 or connection.unread > single:
                over -= connection.unread
                connection.drop()

    def _slowest(self) -> list[Connection]:
        """The connections with unread bytes, by their last progress, the oldest first."""
        return sorted(self.unread, key=lambda connection: self.unread[connection][1])


class Reader(h11.Connection):
    """h11's parser, which gives up on too many headers or chunks, and on a body of two lengths."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, LARGEST_HEADERS)
        self.chunks, self.chunked = 0, False
        self.error = 400, ""  # status and message for the client

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head = self.trailing_data[0]
            self._limit_headers(head[: blank.start()] if (blank := BLANK.search(head)) else head)
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self.chunks, self.chunked = 0, b"transfer-encoding" in names
            if not event.http_version.startswith(b"1."):
                self._give_up(400, "The request is not HTTP/1.1: use that version.")
            if self.chunked and (b"content-length" in names or event.http_version < b"1.1"):
                # Another program on the way may take the other length, and the rest for a request.
                self._give_up(400, "The body has two lengths: send only one of the headers.")
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            if self.chunks > MOST_CHUNKS:
                self._give_up(413, f"The body exceeds {MOST_CHUNKS} chunks: send larger ones.")
        elif event is h11.NEED_DATA and self.chunked and self.their_state is h11.SEND_BODY:
            self._limit_headers(self.trailing_data[0])  # of the body's end
        return event

    def _limit_headers(self, lines: bytes) -> None:
        if lines.count(b"\n") > MOST_HEADERS:
            self._give_up(431, f"There are more than {MOST_HEADERS} headers: send fewer.")

    def _give_up(self, status: int, message: str) -> None:
        self.error = status, message
        raise h11.RemoteProtocolError(message)


class Connection(H11Protocol):
    """uvicorn's connection, with limits. It also answers requests that never become whole, and
    applications find `write` among a request's extensions, as WRITE."""

    conn: Reader

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self.door = door
        self.app = partial(_with_extension, self.app, self.write)
        self.conn = Reader()
        self.refused = False  # further bytes are dropped
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` at the first byte that must wait
        if len(self.connections) > self.door.most and not self.door.make_room():
            self.refuse(503, "The server has too many connections: try again in a moment.")
            return
        self.door.waiting[self] = None
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.door.forget(self)
        super().connection_lost(exc)

    @property
    def unread(self) -> int:
        """Bytes written that the client has no room for."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once, and drop what is unread."""
        self.door.forget(self)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.door.watch(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.door.unread.pop(self, None)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Either it has left, or it waits for its answer: only what is
        sent to it shows which, because the system of a client that has left answers with a
        reset."""
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if not whole or self.cycle.response_complete:
            return False  # asyncio closes
        self.cycle.keep_alive = False
        self._probe(PROBE[0])
        return True

    def _probe(self, again: float) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] != "1.0":
            self.transport.write(self.conn.send(CONTINUE) or b"")
        elif self.scope.get("streams"):
            self.write(b":\n\n")
        self.loop.call_later(again, self._probe, PROBE[1])

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        if self.conn.their_state is h11.IDLE:
            self._expect_headers()
            room = LARGEST_HEADERS - len(self.conn.trailing_data[0])
            first, data = data[:room], data[room:]
            if first:
                super().data_received(first)
            if data and self.conn.their_state is h11.IDLE:
                self.refuse(431, f"The headers exceed {LARGEST_HEADERS} bytes: send fewer.")
        while data and not self.refused:
            chunked = self.conn.chunked and self.conn.their_state is h11.SEND_BODY
            first, data = (data[:PIECE], data[PIECE:]) if chunked else (data, b"")
            super().data_received(first)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE):
            self.door.waiting.pop(self, None)
            if len(self.conn.trailing_data[0]) > LARGEST_HEADERS:  # more requests, sent too early
                self.cycle.keep_alive = False

    def write(self, data: bytes) -> bool:
        """Send a part of the answer's body, which must have begun and not ended. Returns False, and
        sends nothing, while the client has much to read, or once it has left.

        Past h11, whose checks take longer than the socket: a part is a chunk, or in HTTP/1.0 plain.
        """
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        if self.conn.their_http_version != b"1.0":
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.transport.write(data)
        return True

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when `next_event` has failed."""
        status, message = self.conn.error
        self.refuse(status, message or msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:  # refused before the body had arrived
            self._linger()
        elif self.conn.their_state is h11.IDLE:
            self.door.waiting[self] = None

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        began = self.cycle is not None and not self.cycle.response_complete
        if began:
            self.cycle.disconnected = True  # the application may send nothing more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if began:
                scope: dict[str, Any] = self.scope  # type: ignore[assignment]
                scope["refused"] = status  # the guard counts it
            else:
                self.door.statuses[status] += 1
                log.info("- %s - - %s", (self.client or ("-",))[0], status)
            body = json.dumps(error_body(status, message)).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close"), *SAFE]
            headers.append((b"content-length", str(len(body)).encode()))
            reason = HTTPStatus(status).phrase.encode()
            begin = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (begin, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def shutdown(self) -> None:
        """uvicorn calls this once, for each connection, when the server stops."""
        if self.refused:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self.refuse(503, CLOSING)
        else:
            super().shutdown()

    def _linger(self) -> None:
        """Send nothing more, and close once the client has, or LINGER seconds have passed."""
        self.refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            with contextlib.suppress(OSError):  # the client has just reset it
                self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.abort)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(SLOWEST_HEADERS, self._too_late)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:
            self.refuse(408, f"The headers took longer than {SLOWEST_HEADERS:g} s: send faster.")
        else:
            self.transport.close()


async def _with_extension(
    app: Any, write: Callable[[bytes], bool], scope: dict[str, Any], receive: Any, send: Any
) -> None:
    scope.setdefault("extensions", {})[WRITE] = write
    await app(scope, receive, send)


class Listening(socket.socket):
    """Accepts at most BURST connections in a turn of the event loop: each has a descriptor before
    the `Door` can refuse it."""

    _left = BURST

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._left:
            raise BlockingIOError
        if self._left == BURST:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= 1
        return super().accept()

    def _next_turn(self) -> None:
        self._left = BURST


def most_connections() -> int:
    """Raise the limit on open files as far as needed and allowed. Returns how many connections
    fit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    wanted, unlimited = MOST_CONNECTIONS + RESERVED, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < more:
        with contextlib.suppress(OSError, ValueError):  # a system may allow less than it claims
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    return MOST_CONNECTIONS if soft == unlimited else max(1, min(wanted, soft) - RESERVED)
