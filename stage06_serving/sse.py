"""Server-sent events: the lines that make up a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
STALLED = 5.0  # seconds after its deadline in which a client may still read a stream to its end


def event(data: dict[str, Any]) -> str:
    """One event with `data` as JSON."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """An answer made of events. However it ends, even before its first event, `release` is called.

    deadline: event-loop time by which the events are made. A client that has not read them STALLED
        seconds later is cut off: no more can be sent to it, and its stream would never end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[str], release: Callable[[], None], deadline: float | None = None
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.release = release
        self.until = None if deadline is None else deadline + STALLED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.until):
                    await super().__call__(scope, receive, send)
        finally:
            self.release()
