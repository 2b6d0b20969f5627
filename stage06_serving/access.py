"""Who may use the server: the names in the Host header, the pages of other sites, and API keys."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .async_engine import CLOSING
from .errors import ENCODED, REFUSALS, ApiError

LARGEST_BODY = 2**20  # bytes
GONE = 499  # the status of a client that left before its answer
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@\\\s]+)(:[0-9]*)?")
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LONGEST_PATH = 200  # characters, in the log
SAFE = [  # with every answer: no other site may frame the page, or take an answer for a program
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
]
log = logging.getLogger("staircase.requests")


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
    """What each request meets first: it is named and logged; its Host header must name this server,
    and its body must be short and plain. HEAD becomes GET: uvicorn leaves out the body.

    hosts: names of this server besides localhost and all addresses; "*" is any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app = app
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", "")  # the client's own, if it is plain enough
        name = name if REQUEST_ID.fullmatch(name) else os.urandom(16).hex()
        started, status, size = time.perf_counter(), GONE, 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [*SAFE, (b"x-request-id", name.encode())]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        async def body() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LARGEST_BODY:
                raise HTTPException(413)
            return message

        refusal = self._refusal(headers, scope["path"])
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await (refusal.response() if refusal else self.app)(inner, body, answer)
        except asyncio.CancelledError:  # the shutdown waits no longer
            if status == GONE:
                await ApiError(503, CLOSING).response()(inner, receive, answer)
        finally:
            client, path = (scope["client"] or "-")[0], scope["path"][:LONGEST_PATH]
            line = name, client, scope["method"], path, status, time.perf_counter() - started
            log.info("%s %s %s %r %s %.3f s", *line)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        """The path is the one that was sent: `request.url` contains the Host header, which the
        client chooses."""
        host = headers.get("host")  # a browser always sends it
        if host is not None and not self._serves(host.lower()):
            message = (
                "The Host header does not name this server: use its address, or start it with "
                "--allowed-host NAME."
            )
            return ApiError(403, message)
        if headers.get("sec-fetch-site") == "cross-site" and path != "/":
            return ApiError(403, "A page on another site sent this: use this server's own page.")
        if int(headers.get("content-length", "0")) > LARGEST_BODY:
            return ApiError(413, REFUSALS[413])
        if headers.get("content-encoding", "identity") != "identity":
            return ApiError(415, ENCODED)
        return None

    def _serves(self, host: str) -> bool:
        """Whether `host` is this server. Any address may be: another site's page can only change
        the address behind its own name (DNS rebinding)."""
        match = HOST.fullmatch(host)
        name = match[1].strip("[]").removesuffix(".") if match else ""
        if not match or name in self.hosts or name.endswith(".localhost") or "*" in self.hosts:
            return bool(match)
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False
