"""The writer: one callback per step sends every stream its new tokens.

A task per stream that wakes for each token costs the event loop more than text, JSON and socket
together. So a stream's task only begins and ends it. In between, the engine's message for a step
calls `Stream.news`, which turns the new tokens into events and hands their bytes to the connection.
If a client does not keep up, its tokens gather in the tickets, and the task sends them when the
connection has room again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from .connection import LEFT, WRITE
from .errors import failure
from .formats import Frame
from .service import Choice, Format, Piece, Service, due
from .sse import DONE, START, event

READ = 256  # tokens that are formatted before the event loop goes on: each may take 0.2 ms


class Events:
    """The answers to one request as events, as far as they have come.

    interval: tokens to gather before more are sent; the first is sent at once.
    """

    def __init__(
        self, service: Service, choices: Sequence[Choice], answer: Format, interval: int = 1
    ) -> None:
        self.service, self.choices, self.answer = service, choices, answer
        self.interval = interval
        self.ended = self.behind = self._begun = False  # behind: `read` has left some
        self._frames: dict[int, Frame] = {}  # by choice, from its second chunk on

    @property
    def due(self) -> bool:
        """Whether to read now."""
        return self.interval == 1 or not self._begun or due(self.choices, self.interval)

    def read(self) -> bytes:
        """What is new, up to READ tokens. The last of it sets `ended`."""
        events: list[bytes] = []
        count, self.behind = 0, False
        try:
            for choice, piece in self.service.pieces(self.choices, READ):
                events.append(self._event(choice, piece))
                count += len(piece.tokens)
                if count >= READ:
                    self.behind = True
                    break
            self.ended = all(choice.ended for choice in self.choices)
            if self.ended:
                events += map(event, self.answer.last())
        except Exception as error:  # the status is sent already: report the error in the stream
            events.append(self.fail(error))
        return b"".join(events) + (DONE if self.ended else b"")

    def fail(self, error: Exception) -> bytes:
        """The end of a stream that fails."""
        self.ended = True
        return event(failure(error).body())

    def _event(self, choice: Choice, piece: Piece) -> bytes:
        frame = self._frames.get(choice.index)
        if frame and piece.text and piece.finish_reason is None:
            return frame.event(piece)
        events = b"".join(map(event, self.answer.chunks(choice, piece)))
        self._begun |= bool(events)
        if events and self.answer.repeats and frame is None and not choice.ended:
            self._frames[choice.index] = Frame(self.answer, choice)
        return events


class Stream:
    """The response of a streamed answer. However it ends, even before its first event, `release`
    is called.

    deadline: event-loop time by which the answer must be made. A client that does not read is cut
        off by its connection.
    """

    def __init__(self, events: Events, release: Callable[[], None], deadline: float) -> None:
        self.events, self.release, self.deadline = events, release, deadline
        self._write: Callable[[bytes], bool]  # the connection's
        self._left = False  # the client has
        self._waiting = False  # the task is; so the writer may send
        self._unsent = b""  # by the writer
        self._woken = asyncio.Event()

    def news(self) -> None:
        """Send what is new, or have the task do it. The engine's message for a step calls this."""
        if self._waiting and self.events.due:
            data = self.events.read()
            late = self.events.ended or self.events.behind
            if late or data and not self._write(data):
                self._unsent, self._waiting = data, False
                self._woken.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = scope["extensions"][WRITE]
        scope["extensions"][LEFT](self._leave)
        try:
            await self._send(send)
        finally:
            self.release()

    def _leave(self) -> None:
        self._left = True
        self._woken.set()

    async def _send(self, send: Send) -> None:
        await send(START)
        for choice in self.events.choices:
            choice.ticket.news = self.news
        while not self._left:
            data, self._unsent = self._unsent, b""
            if not self.events.ended:
                data += self.events.read()
            more = not self.events.ended
            if data:
                # This waits for a slow client; what arrives meanwhile is read before the next wait.
                await send({"type": "http.response.body", "body": data, "more_body": more})
            if not more:
                return
            if self.events.behind:
                await asyncio.sleep(0)
            elif not data:
                await self._wait()

    async def _wait(self) -> None:
        """Until the writer needs the task, the client has left, or the deadline has passed."""
        self._woken.clear()
        self._waiting = True
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._woken.wait()
        except TimeoutError as error:
            self._unsent += self.events.fail(error) + DONE
        finally:
            self._waiting = False


async def gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
