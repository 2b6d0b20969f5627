"""The checks that every request passes first (host, key, size, content type), and the count of
answers by status."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import SAFE, log
from .errors import ApiError

LARGEST_BODY = 2**20  # bytes
OPEN = ("/health", "/ready", "/")  # paths that need no key: the page asks for it
EARLY = (*OPEN, "/version")  # paths that are answered while the model is loaded
EVENTS = b"text/event-stream"
GONE = 499  # the status of a client that left before its answer
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@\\\s]+)(:[0-9]*)?")
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LONGEST_PATH = 200  # characters, in the log


class Guard:
    """Checks every request first: its host, its key, its size, and whether its body is JSON.

    The path is the one that was sent. `request.url` contains the Host header, which the client
    chooses.

    hosts: names of this server besides localhost and all addresses; "*" is any. state: of the
        application; `state.engine` is None while the model is loaded.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str] = (),
        hosts: Collection[str] = (),
        statuses: Counter[int] | None = None,
        state: Any = None,
    ) -> None:
        self.app, self.state = app, state
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.statuses = Counter[int]() if statuses is None else statuses  # answers by status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        name = scope["request_id"] = request_id(headers.get(b"x-request-id", b""))
        started, status = time.perf_counter(), GONE

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, sent = message["status"], message.get("headers", ())
                scope["streams"] = any(value.startswith(EVENTS) for _, value in sent)
                message = {**message, "headers": [*sent, *SAFE, (b"x-request-id", name.encode())]}
            await send(message)

        try:
            self._check(scope, headers)
            body = await self._body(receive)
        except ApiError as error:
            await _refuse(error, scope, receive, answer)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), answer)
        finally:
            status = scope.get("refused", status)  # by the connection
            self.statuses[status] += 1
            if log.isEnabledFor(logging.INFO):
                client, path = scope["client"] or ("-",), scope["path"][:LONGEST_PATH]
                seconds = f"{time.perf_counter() - started:.3f} s"
                more = scope.get("log", "")  # from the application
                log.info(
                    "%s %s %s %r %s %s%s",
                    *(name, client[0], scope["method"], path, status, seconds, more),
                )

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError for a request that must go no further, before its body is read."""
        path = scope["path"]
        host = headers.get(b"host")  # a browser always sends it
        if host is not None and not self._serves(host.decode("latin-1").lower()):
            message = (
                "The Host header does not name this server: use its address, or start it with "
                "--allowed-host NAME."
            )
            raise ApiError(403, message)
        if headers.get(b"sec-fetch-site") == b"cross-site" and path != "/":
            raise ApiError(403, "A page on another site sent this: use this server's own page.")
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else b""
        scope["tenant"] = tenant(key.decode("latin-1")) if self.digests else b""
        known = scope["known"] = not self.digests or self._known(key)
        if not known and path not in OPEN:
            message = "The API key is missing or wrong: send 'Authorization: Bearer KEY'."
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        if self.state is not None and self.state.engine is None and path not in EARLY:
            raise loading()
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            # Another site's page may send us other types without a preflight request.
            message = "The body must be JSON: send the header 'Content-Type: application/json'."
            raise ApiError(400, message)
        if int(headers.get(b"content-length", b"0")) > LARGEST_BODY:
            raise too_large()

    def _serves(self, host: str) -> bool:
        """Whether `host` is this server. Any address may be: another site's page can only change
        the address behind its own name (DNS rebinding)."""
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        known = name in self.hosts or name.endswith(".localhost") or "*" in self.hosts
        return known or is_address(name)

    def _known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        same = [secrets.compare_digest(digest, known) for known in self.digests]
        return any(same)  # after all comparisons: the time taken reveals nothing of the keys

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client left meanwhile. Raises ApiError if it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > LARGEST_BODY:
                raise too_large()
            if not message.get("more_body", False):
                return bytes(body)


@lru_cache(64)
def is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def loading() -> ApiError:
    message = "The model is still loading: try again in a moment."
    return ApiError(503, message, headers={"Retry-After": "1"})


def too_large() -> ApiError:
    return ApiError(413, f"The body exceeds {LARGEST_BODY} bytes: send a shorter one.")


def request_id(sent: bytes) -> str:
    """The name of a request in its answer and the log: the client's own if it is plain enough."""
    name = sent.decode("latin-1")
    return name if REQUEST_ID.fullmatch(name) else os.urandom(16).hex()


def tenant(key: str) -> bytes:
    """The salt of the client with this key: only its own requests share blocks."""
    return hashlib.sha256(key.encode()).digest() if key else b""


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which was read already, and then acts as the real one."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
