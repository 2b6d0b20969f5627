"""What every request passes first: its key, its size, its content type."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .service import tenant

LARGEST_BODY = 2**20  # bytes
SLOWEST_BODY = 30  # seconds: one byte now and then would hold a connection without end
OPEN = ("/health", "/")  # paths that need no key: the page asks for it


class Guard:
    """Checks every request first: its key, its size, and whether its body is JSON.

    The path is the one that was sent. `request.url` contains the Host header, which the client
    chooses.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else b""
        scope["tenant"] = tenant(key.decode("latin-1")) if self.digests else b""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if self.digests and scope["path"] not in OPEN and not self._known(key):
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            error = ApiError(401, message)
        elif scope["method"] == "POST" and kind != b"application/json":
            # A page of another site may send other types to us without asking first.
            message = "The body must be JSON: send the header 'Content-Type: application/json'."
            error = ApiError(400, message)
        else:
            try:
                async with asyncio.timeout(SLOWEST_BODY):
                    body = await self._body(receive)
            except TimeoutError:
                message = f"The body took longer than {SLOWEST_BODY} s to arrive: send it faster."
                error = ApiError(408, message)
            else:
                if body is None:
                    return  # the client has left
                if len(body) <= LARGEST_BODY:
                    await self.app(scope, _replay(body, receive), send)
                    return
                message = f"The body has over {LARGEST_BODY} bytes: send a shorter one."
                error = ApiError(413, message)
        await JSONResponse(error.body(), error.status)(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        same = [secrets.compare_digest(digest, known) for known in self.digests]
        return any(same)  # after all comparisons: the time taken shows nothing of the keys

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or its first bytes if it is too large; None if the client left meanwhile."""
        body = b""
        while len(body) <= LARGEST_BODY:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which has been read, and then acts as the real one."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
