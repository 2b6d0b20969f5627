"""Limits on connections: their bytes, their time, and their number.

uvicorn has none of them. Each header and each chunk takes microseconds of Python, whatever its
size: two megabytes in chunks of one byte kept the event loop busy for 18 seconds. And an answer
that its client does not read keeps memory and a descriptor: no other code looks at them.
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
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from .async_engine import CLOSING
from .errors import error_body

LARGEST_HEADERS = 16_384  # bytes
MOST_HEADERS = 100
SLOWEST_HEADERS, SLOWEST_BODY = 10.0, 30.0  # seconds: a byte now and then could hold a connection
MOST_CHUNKS = 512  # of a body
PIECE = 4_096  # bytes of a body in chunks that are parsed at once: they may hold many chunks
LINGER = 1.0  # seconds in which a refused client is still read: a reset could overtake the answer
MOST_CONNECTIONS = 4096
RESERVED = 128  # descriptors for other files, and for connections that are being accepted
BURST = 16  # connections accepted in one turn of the event loop
MOST_UNREAD = 2**25, 2**26  # bytes of answers not read: by one client, and by all
LEAST_READ, SLOWEST_READER = 2**16, 10.0  # bytes that a client must read in as many seconds
LOOK = 1.0  # seconds between two looks at the answers not read
PROBE = 0.05, 1.0  # seconds until a client that sends no more is probed a second time, and again
BLANK = re.compile(rb"\n\r?\n")
# Extensions in an ASGI scope: see Connection.write and Connection.on_left.
WRITE, LEFT = "staircase.write", "staircase.left"
SAFE = (  # with every answer: no other site may frame the page, or take an answer for a program
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)
CONTINUE, END = b"HTTP/1.1 100 Continue\r\n\r\n", b"0\r\n\r\n"  # END: of a body in chunks
UNREADABLE = "The request is not valid HTTP/1.1: check its first line, headers and lengths."
MANY_HEADERS = f"There are more than {MOST_HEADERS} headers: send fewer."
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


class Cycle(RequestResponseCycle):
    """A request and its answer, whose head and first part go out in one write."""

    head = b""  # not written yet
    plain = False  # the body ends with the connection: HTTP/1.0 knows no chunks
    left: Callable[[], object] | None = None  # called once the client has

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message)
        elif message["type"] != "http.response.body" or self.response_complete:
            raise RuntimeError(f"The answer has ended, or begun: it takes no {message['type']}.")
        else:
            self._part(message.get("body", b""), message.get("more_body", False))

    def _begin(self, message: Any) -> None:
        """Raises RuntimeError for a header of more than one line."""
        self.response_started, self.waiting_for_100_continue = True, False
        status = message["status"]
        headers = [*self.default_headers, *message.get("headers", ())]
        names = dict(headers)
        length = names.get(b"content-length")
        if b"connection" in names:
            self.keep_alive = False  # applications only ever close it
        elif (
            not self.keep_alive
            or self.more_body  # the rest of the request is dropped
            or length is None
            and self.scope["http_version"] == "1.0"
        ):
            self.keep_alive = False
            headers.append((b"connection", b"close"))
        if length is not None:
            self.expected_content_length, self.chunked_encoding = int(length), False
        elif self.scope["http_version"] == "1.0":
            self.plain = True
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            headers.append((b"transfer-encoding", b"chunked"))
        lines = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])
        if lines.count(b"\n") != len(headers) + 1 or lines.count(b"\r") != len(headers) + 1:
            raise RuntimeError("A header of the answer has more than one line.")
        self.head = lines + b"\r\n"
        if length is None:  # a stream: its first part may be long in coming
            self.head = self._write(self.head)

    def _part(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            body = chunk(body) if body else b""
            body += b"" if more else END
        elif not self.plain:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or not more and self.expected_content_length:
                raise RuntimeError("The answer's body has another length than its header.")
        if body or self.head:
            self.head = self._write(self.head + body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not (self.keep_alive or self.more_body):
                self.transport.close()
            self.on_response()

    def _write(self, data: bytes) -> bytes:
        self.transport.write(data)
        return b""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits. It also answers requests that never become whole, and
    applications find `write` and `on_left` among a request's extensions, as WRITE and LEFT.

    httptools gets the head of a request once it is whole, and a body in chunks; other bodies need
    no parser.
    """

    cycle: Cycle

    def __init__(self, door: Door, **options: Any) -> None:
        super().__init__(**options)
        self.door = door
        self.app = partial(_with_extensions, self.app, {WRITE: self.write, LEFT: self.on_left})
        self.refused = False  # further bytes are dropped
        self._early = bytearray()  # bytes of the next request
        self._left: int | None = 0  # bytes of the body to come; None: it comes in chunks
        self._chunks = self._trailers = self._around = 0  # _around: bytes that are not body
        self._error = 400, UNREADABLE  # status and message, if the parser fails
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` at the first byte that must wait
        if len(self.connections) > self.door.most and not self.door.make_room():
            self.refuse(503, "The server has too many connections: try again in a moment.")
            return
        self.door.waiting[self] = None
        self._expect(SLOWEST_HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.door.forget(self)
        super().connection_lost(exc)
        self._tell()

    @property
    def unread(self) -> int:
        """Bytes written that the client has no room for."""
        return self.transport.get_write_buffer_size()

    @property
    def answering(self) -> bool:
        """Whether an application has the request, has not answered all of it, and still may."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.disconnected)

    @property
    def _reads_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

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
        if self._reads_body or not self.answering:
            return False  # asyncio closes
        self.cycle.keep_alive = False
        self._probe(PROBE[0])
        return True

    def _probe(self, again: float) -> None:
        if self.transport.is_closing() or not self.answering:
            return
        if not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self.transport.write(CONTINUE)
        elif self.scope.get("streams"):
            self.write(b":\n\n")
        self.loop.call_later(again, self._probe, PROBE[1])

    # ---- reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self.refused:
            if self._reads_body:
                data = self._read_chunks(data) if self._left is None else self._read_body(data)
            elif self.answering:  # the next request comes too early
                self._early += data
                self.flow.pause_reading()
                if len(self._early) > LARGEST_HEADERS:
                    self.cycle.keep_alive = False
                return
            else:
                data = self._read_head(data)
        if self._late is None and not self.refused and (self._reads_body or not self.answering):
            self._expect(SLOWEST_BODY if self._reads_body else SLOWEST_HEADERS)

    def _read_head(self, data: bytes) -> bytes:
        """Returns the bytes after the head."""
        known = max(0, len(self._early) - 3)
        self._early += data
        if known == 0:
            self._early = self._early.lstrip(b"\r\n")  # between two requests
        blank = BLANK.search(self._early, known)
        size = blank.end() if blank else len(self._early)
        if size > LARGEST_HEADERS:
            self.refuse(431, f"The headers exceed {LARGEST_HEADERS} bytes: send fewer.")
        elif self._early.count(b"\n", 0, blank.start() if blank else size) > MOST_HEADERS:
            self.refuse(431, MANY_HEADERS)
        elif self._early and not self._early[:1].isalpha():
            self.refuse(400, UNREADABLE)  # TLS, for example
        elif blank:
            head, rest = bytes(self._early[:size]), bytes(self._early[size:])
            self._early, self._left, self._error = bytearray(), 0, (400, UNREADABLE)
            self.parser, before = httptools.HttpRequestParser(self), self.cycle
            if self._parse(head) and self.cycle is before:
                self.refuse(400, UNREADABLE)  # HTTP/2: its parser waits for more
            elif not self.refused:
                self._stop_timer()
                if not self._left and self._left is not None:
                    self._whole()
                return rest
        return b""

    def _read_body(self, data: bytes) -> bytes:
        """Returns the bytes after the body."""
        assert self._left is not None
        part, rest = data[: self._left], data[self._left :]
        self._left -= len(part)
        self.on_body(part)
        if not self._left:
            self._whole()
        return rest

    def _read_chunks(self, data: bytes) -> bytes:
        """Returns the bytes that are not parsed yet."""
        part, rest = data[:PIECE], data[PIECE:]
        self._around += len(part)
        if self._parse(part) and self._around > LARGEST_HEADERS:
            self.refuse(431, f"There are more than {LARGEST_HEADERS} bytes around the chunks.")
        return rest

    def _whole(self) -> None:
        """The request is."""
        self._stop_timer()
        self.door.waiting.pop(self, None)
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def _parse(self, data: bytes) -> bool:
        """Returns False once the request is refused."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # we stay with HTTP/1.1
            if self._left is None:
                self.refuse(400, UNREADABLE)
        except httptools.HttpParserError:
            if self._left is None and not self._reads_body:  # it fails behind a whole request
                self.cycle.keep_alive, self.refused = False, True
            else:
                self.refuse(*self._error)
        return not self.refused

    def _give_up(self, status: int, message: str) -> None:
        """For the parser's callbacks: raises what makes it fail."""
        self._error = status, message
        raise ValueError(message)

    def on_message_begin(self) -> None:
        if self._left is None:  # the next request, in the same bytes
            raise ValueError("A request came too early.")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._left is None:
            self._trailers += 1
            if self._trailers > MOST_HEADERS:
                self._give_up(431, MANY_HEADERS)
        else:
            super().on_header(name, value.strip())

    def on_headers_complete(self) -> None:
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        lengths, encodings = (
            [value for name, value in self.headers if name == kind]
            for kind in (b"content-length", b"transfer-encoding")
        )
        if version not in ("1.0", "1.1"):
            self._give_up(400, "The request is not HTTP/1.1: use that version.")
        if names.count(b"host") > 1 or version == "1.1" and b"host" not in names:
            self._give_up(400, "The request must have one header 'Host'.")
        if encodings and (lengths or version == "1.0"):
            # Another program on the way may take the other length, and the rest for a request.
            self._give_up(400, "The body has two lengths: send only one of the headers.")
        if encodings and [value.lower() for value in encodings] != [b"chunked"]:
            self._give_up(400, "The only known 'Transfer-Encoding' is chunked: use that.")
        raw, _, query = self.url.partition(b"?")
        self.scope |= {
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "path": self.root_path + unquote(raw.decode("ascii")),
            "raw_path": self.root_path.encode("ascii") + raw,
            "query_string": query,
        }
        self.cycle = Cycle(
            self.scope,
            self.transport,
            self.flow,
            *(self.logger, self.access_logger, self.access_log, self.server_state.default_headers),
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version == "1.1",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._left = None if encodings else int(lengths[0]) if lengths else 0
        self._chunks = self._trailers = self._around = 0
        self._start_asgi_task(self.cycle, self.app)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MOST_CHUNKS + 1:  # the last is empty
            self._give_up(413, f"The body exceeds {MOST_CHUNKS} chunks: send larger ones.")

    def on_body(self, body: bytes) -> None:
        self._around -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._left is None:
            self._whole()

    # ---- answering ------------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        """Send a part of the answer's body, which must have begun and not ended. Returns False, and
        sends nothing, while the client has much to read, or once it has left.

        A part is a chunk, or in HTTP/1.0 plain.
        """
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        self.transport.write(chunk(data) if self.cycle.chunked_encoding else data)
        return True

    def on_left(self, do: Callable[[], object]) -> None:
        """Have `do` called if the client leaves before its answer is complete."""
        self.cycle.left = do
        self._tell()

    def _tell(self) -> None:
        if self.cycle is not None and self.cycle.disconnected and self.cycle.left is not None:
            self.cycle.left()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._reads_body:  # refused before the body had arrived
            self._linger()
        else:
            self.door.waiting[self] = None
            if self._early:
                early, self._early = bytes(self._early), bytearray()
                self.data_received(early)

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        began = self.answering
        if status == 400:
            self.logger.warning("A request cannot be read.")
        if began:
            self.cycle.disconnected = True  # the application may send nothing more
            self.cycle.message_event.set()
            self._tell()
        if not began or not self.cycle.response_started:
            if began:
                scope: dict[str, Any] = self.scope  # type: ignore[assignment]
                scope["refused"] = status  # the guard counts it
            else:
                self.door.statuses[status] += 1
                log.info("- %s - - %s", (self.client or ("-",))[0], status)
            body = json.dumps(error_body(status, message)).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close"), *SAFE]
            headers.append((b"content-length", b"%d" % len(body)))
            lines = [b"%b: %b\r\n" % header for header in headers]
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self._linger()

    def shutdown(self) -> None:
        """uvicorn calls this once, for each connection, when the server stops."""
        if self.refused and not self.answering:
            self.transport.close()
        elif self._reads_body and self.answering and not self.cycle.response_started:
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

    def _expect(self, seconds: float) -> None:
        """Headers, or a body, within this time."""
        self._late = self.loop.call_later(seconds, self._too_late)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self._reads_body:
            self.refuse(408, f"The body took longer than {SLOWEST_BODY:g} s: send faster.")
        elif self._early:
            self.refuse(408, f"The headers took longer than {SLOWEST_HEADERS:g} s: send faster.")
        else:
            self.transport.close()


def chunk(data: bytes) -> bytes:
    """A part of a body, in HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _with_extensions(
    app: Any, extensions: dict[str, Any], scope: dict[str, Any], receive: Any, send: Any
) -> None:
    scope["extensions"] = extensions
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
