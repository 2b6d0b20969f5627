"""Limits on connections, before there is a request: their bytes, their time, and their number.

uvicorn has none of them. h11 limits headers only while they are incomplete: 54 KB passed, because
they arrived at once. And each chunk of a body takes up to 50 µs of Python, whatever its size: two
megabytes in chunks of one byte kept the event loop busy for 18 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .async_engine import CLOSING
from .errors import error_body

LARGEST_HEADERS = 16_384  # bytes
SLOWEST_HEADERS = 10.0  # seconds
MOST_CHUNKS = 512  # of a body
LINGER = 1.0  # seconds in which a refused client is still read: a reset could overtake the answer
MOST_CONNECTIONS = 4096
RESERVED = 128  # descriptors for other files, and for connections that are being accepted
BURST = 16  # connections accepted in one turn of the event loop
SAFE = (  # with every answer: no other site may frame the page, or take an answer for a program
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)


log = logging.getLogger("staircase.requests")


class Door:
    """Lets in at most `most` connections. When all are taken, a new one replaces the connection
    that has waited longest for its request."""

    def __init__(self, most: int = MOST_CONNECTIONS, statuses: Counter[int] | None = None) -> None:
        self.most = most
        self.statuses = Counter[int]() if statuses is None else statuses  # of all answers
        self.waiting: dict[Connection, None] = {}  # those without a whole request, the oldest first


class Reader(h11.Connection):
    """h11's parser, which gives up on a body of too many chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, LARGEST_HEADERS)
        self.chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            if self.chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, with limits. It also answers requests that never become whole."""

    conn: Reader

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self.door = door
        self.conn = Reader()
        self.deaf = False  # refused: further bytes are dropped
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.door.most:
            if not self.door.waiting:
                self.refuse(503, "The server has too many connections: try again in a moment.")
                return
            oldest = next(iter(self.door.waiting))
            del self.door.waiting[oldest]
            oldest.transport.abort()
        self.door.waiting[self] = None
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.door.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self.conn.their_state is h11.IDLE:
            self._expect_headers()
            room = LARGEST_HEADERS - len(self.conn.trailing_data[0])
            first, data = data[:room], data[room:]
            if first:
                super().data_received(first)
            if data and self.conn.their_state is h11.IDLE:
                self.refuse(431, f"The headers exceed {LARGEST_HEADERS} bytes: send fewer.")
        if data and not self.deaf:
            super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE):
            self.door.waiting.pop(self, None)
            if len(self.conn.trailing_data[0]) > LARGEST_HEADERS:  # more requests, sent too early
                self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when `next_event` has failed."""
        if self.conn.chunks > MOST_CHUNKS:
            self.refuse(413, f"The body exceeds {MOST_CHUNKS} chunks: send larger ones.")
        else:
            self.refuse(400, msg)

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
                told: dict[str, Any] = self.scope  # type: ignore[assignment]
                told["refused"] = status  # the guard counts it
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
        if self.deaf:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self.refuse(503, CLOSING)
        else:
            super().shutdown()

    def _linger(self) -> None:
        """Send nothing more, and close once the client has, or LINGER seconds have passed."""
        self.deaf = True
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
