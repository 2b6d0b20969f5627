"""API keys, and the size of bodies."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

LARGEST_BODY = 2**20  # bytes


class Keys:
    """Checks a request's API key: a dependency of the endpoints. Returns the salt of the client,
    so that only its own requests share cached prefixes. Without keys, all clients are one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, request: Request) -> bytes:
        if not self.digests:
            return b""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # All comparisons are made: the time taken reveals nothing of the keys.
        same = [secrets.compare_digest(digest, known) for known in self.digests]
        if not any(same) or scheme.lower() != "bearer":
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        return digest


class Door:
    """Refuses large and encoded bodies. HEAD becomes GET, as uvicorn leaves out its body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, coding = 0, Headers(scope=scope).get("content-encoding", "identity")

        async def body() -> Message:
            nonlocal size
            message = await receive()
            if coding != "identity":
                raise HTTPException(415, "The body is encoded: send it without Content-Encoding.")
            size += len(message.get("body", b""))
            if size > LARGEST_BODY:
                raise HTTPException(413, "The body exceeds a megabyte: send a shorter one.")
            return message

        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self.app({**scope, "method": method}, body, send)
