"""Server-sent events: the lines that make up a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KIND, HEADERS = "text/event-stream", {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# The message that begins a stream.
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": StreamingResponse((), headers=HEADERS, media_type=KIND).raw_headers,
}
# Bytes of ASCII: for some clients, U+2028 and U+0085 end a line.
written = partial(to_json, ensure_ascii=True)


def event(data: dict[str, Any]) -> bytes:
    """One event with `data` as JSON."""
    return b"data: %b\n\n" % written(data)


class EventStream(StreamingResponse):
    """Events as an iterator makes them. However they end, even before the first, `release` is
    called."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        super().__init__(events, headers=HEADERS, media_type=KIND)
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()
