"""The router: a server for OpenAI's clients that sends each request to the replica that routing.py
chooses, and its answer back. It needs no model and no tokenizer.

Until a client was shown the first byte of an answer, another replica may answer instead, once and
within one deadline: after a death, and if the budget that all requests share allows, after status
503 or silence. Afterwards an answer that breaks off ends with an error. 4xx and 500 are passed on:
the request may have caused them, and a repeat would spread them. Replicas are given, or Ray's.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send
from yarl import URL

from shared import cli

from .routing import Replica, Route, Routing

BYTES = 4  # of a prompt's JSON that count as a token, which is about right for English
MOST_BLOCKS = 1024  # of a prompt that are hashed: 16,384 tokens
MOST_TOKENS, DEFAULT_TOKENS = 4096, 16  # of an answer: expected at most, and without a limit
TRIES = 2  # replicas that see a request, at most
BUDGET, MOST_BUDGET = 0.1, 10.0  # retries that each request adds, and that may be saved up
CHECK = 0.5  # seconds between two looks at the replicas
PATIENCE = 5.0  # seconds until a replica must have accepted a connection, or shown its health
SILENCE = 60.0  # seconds until a stream must begin or go on
GRACE = 30  # seconds for answers in flight when the router ends
DONE = b"data: [DONE]"  # ends a stream
SENT = ("authorization", "content-type", "accept", "traceparent", "tracestate", "x-request-id")
SHOWN = ("content-type", "cache-control", "retry-after", "x-should-retry", "x-request-id")
FULL = "No replica can take the request now: try again in a moment."
DIED = "The replica ended before its answer did: try again."
SILENT = "The replica has sent nothing for too long: try again."
LATE = "The answer took longer than the router allows: ask for fewer tokens."

Find = Callable[[], Awaitable[Collection[str]]]  # the addresses of all replicas, now


@dataclass
class Failed(Exception):
    """A try without an answer, and what the client gets if there is no other try. died: the replica
    has died. Its load has died with it, so another try adds none and costs no budget."""

    status: int
    message: str
    died: bool = False


@dataclass(frozen=True)
class Prompt:
    """What the policy needs to know of a request's `body`. tokens: of its prompt. answer: tokens
    that it may generate. stream: whether its first byte comes long before its last."""

    body: bytes
    digests: Sequence[bytes] = ()
    tokens: int = 1
    answer: int = 0
    stream: bool = False


def read(body: bytes, tenant: str, routing: Routing) -> Prompt:
    """The prompt in a body; one that cannot be read has no digests: a replica refuses it. Each
    BYTES bytes of its JSON count as a token, which needs no tokenizer and finds the same prefixes:
    texts, chats and lists of ids that begin alike have JSON that begins alike."""
    try:
        fields = json.loads(body)
        data = json.dumps(fields.get("messages") or fields.get("prompt")).encode()
        tokens = array("I", data[: len(data) // BYTES * BYTES])
        most = fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_TOKENS
        answer = min(MOST_TOKENS, max(0, int(most)) * max(1, int(fields.get("n") or 1)))
        salt = f"{tenant}\0{fields.get('model')}".encode()
        digests = routing.digests(tokens[: MOST_BLOCKS * routing.block_size], salt)
        return Prompt(body, digests, max(1, len(tokens)), answer, bool(fields.get("stream")))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Prompt(body)


class Answer:
    """What the client has been sent so far. status: 0 before."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        listed = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, failed: Failed) -> None:
        """End with an error as OpenAI's clients expect it: a whole answer, after whose 503 they try
        again, or the last event of a stream."""
        error = {"message": failed.message, "type": "RouterError", "param": None}
        body = json.dumps({"error": error | {"code": failed.status}}).encode()
        if self.status:
            return await self.write(b"data: %b\n\n%b\n\n" % (body, DONE), more=False)
        again = {"retry-after": "1"} if failed.status == 503 else {"x-should-retry": "false"}
        await self.begin(failed.status, {"content-type": "application/json", **again})
        await self.write(body, more=False)


class Router:
    """An ASGI application for all requests. find: the addresses of all replicas. timeout: seconds
    for a request, with all its tries."""

    http: aiohttp.ClientSession

    def __init__(self, find: Find, timeout: float) -> None:
        self.find, self.timeout = find, timeout
        self.routing, self.budget = Routing(), MOST_BUDGET

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. If the client leaves, the replica loses its connection too."""
        request, answer = Request(scope, receive), Answer(send)
        body = await request.body()

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        serving = asyncio.create_task(self._serve(request, body, answer))
        leaving = asyncio.create_task(gone())
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, request: Request, body: bytes, answer: Answer) -> None:
        self.budget = min(MOST_BUDGET, self.budget + BUDGET)
        prompt = read(body, request.headers.get("authorization", ""), self.routing)
        try:
            async with asyncio.timeout(self.timeout):
                await self._tries(request, prompt, answer)
        except TimeoutError:
            await answer.fail(Failed(504, LATE))

    async def _tries(self, request: Request, prompt: Prompt, answer: Answer) -> None:
        """Have a replica answer, or a second one if nothing was shown."""
        tried: list[Replica] = []
        failed = Failed(503, FULL)
        while len(tried) < TRIES:
            price = 1.0 if tried and not failed.died else 0.0
            route = self.routing.choose(prompt.digests, prompt.tokens, prompt.answer, tried)
            if route is None or self.budget < price:
                break
            self.budget -= price
            tried.append(route.replica)
            self.routing.start(route)
            try:
                return await self._try(request, prompt, route, answer)
            except Failed as error:
                failed = error
            finally:
                self.routing.finish(route)
        await answer.fail(failed)

    async def _try(self, request: Request, prompt: Prompt, route: Route, answer: Answer) -> None:
        """Have one replica answer, and pass its answer on. Raises Failed if another one may try."""
        replica = route.replica
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        silence = SILENCE if prompt.stream else None  # a whole answer comes at its end
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        timeout = aiohttp.ClientTimeout(None, sock_connect=PATIENCE, sock_read=silence)
        options: Any = {"data": prompt.body or None, "headers": headers, "timeout": timeout}
        options |= {"url": URL(replica.name + path, encoded=True), "allow_redirects": False}
        try:
            async with self.http.request(request.method, **options) as response:
                headers = {key: response.headers[key] for key in SHOWN if key in response.headers}
                headers["x-replica"] = replica.name
                if response.content_type == "text/event-stream":
                    async for events in whole_events(response):
                        if not answer.status:
                            self.routing.begin(route)
                            await answer.begin(response.status, headers)
                        await answer.write(events)
                    return await answer.write(b"", more=False)
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            died, replica.ready = not isinstance(error, TimeoutError), False
            if died:
                self.forget(replica)
            failed = Failed(503, DIED if died else SILENT, died)
            if not answer.status:
                raise failed from None
            return await answer.fail(failed)
        if response.status == 503:
            replica.ready = False  # until the next look: what fails fast looks idle
            raise Failed(503, FULL)
        headers["content-length"] = response.headers.get("content-length", str(len(data)))
        await answer.begin(response.status, headers)
        await answer.write(data, more=False)

    def forget(self, replica: Replica) -> None:
        """A request found it dead. No other request must find that out again, and what was
        remembered of its cache has died with it."""
        if self.routing.replicas.get(replica.name) is replica:
            self.routing.add(replica.name).ready = False

    async def look(self) -> None:
        """Learn the addresses of all replicas, and which are ready. Load is never touched: requests
        at a replica that answers slowly are still in flight."""
        urls = {*await self.find()}
        for url in self.routing.replicas.keys() - urls:
            self.routing.remove(url)
        for url in urls - self.routing.replicas.keys():
            self.routing.add(url).ready = False
        await asyncio.gather(*map(self._check, list(self.routing.replicas.values())))

    async def _check(self, replica: Replica) -> None:
        try:
            async with self.http.get(f"{replica.name}/ready") as response:
                replica.ready = response.status == 200
        except TimeoutError:
            replica.ready = False
        except (aiohttp.ClientError, OSError):
            self.forget(replica)


async def whole_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Events as they arrive, each as a whole: an error can follow even if the replica dies within
    one. Raises ClientPayloadError for a stream without its end."""
    left = b""
    async for data in response.content.iter_any():
        events, end, left = (left + data).rpartition(b"\n\n")
        if events:
            yield events + end
            if events.endswith(DONE):
                return
    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


def create_app(find: Find, timeout: float = 300.0) -> FastAPI:
    """The application in front of the replicas that `find` names."""
    router = Router(find, timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A connection for each request: one that is kept may be closed, which looks like a death.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session: Any = {"timeout": aiohttp.ClientTimeout(PATIENCE), "connector": connector}
        session["skip_auto_headers"] = ["accept-encoding"]  # bytes are passed on as they are
        async with aiohttp.ClientSession(**session) as router.http:
            await router.look()
            watching = asyncio.create_task(watch())
            yield
            watching.cancel()

    async def watch() -> None:
        while True:
            await asyncio.sleep(CHECK)
            await router.look()

    app = FastAPI(title="Staircase router", lifespan=lifespan, docs_url=None, openapi_url=None)
    app.state.router = router

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, Any]:
        """The replicas. /ready is answered by one of them; status 503: there is none."""
        replicas = router.routing.replicas.values()
        return {"replicas": {r.name: {"ready": r.ready, "requests": r.requests} for r in replicas}}

    app.router.routes.append(Path("/{path:path}", router, methods=["GET", "HEAD", "POST"]))
    return app


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage12_distributed router",
        "Sends each request to the server that has most of its prompt cached, unless it is busy.",
        "  python -m stage12_distributed router --backend http://HOST:8001 --backend ...",
    )
    about = "address of a running server, http://HOST:PORT; repeat it for each"
    parser.add_argument("--backend", type=cli.address, action="append", required=True, help=about)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=cli.whole_number(1, 65_535), default=8000, help="its port")
    options = parser.parse_args(argv)

    async def find() -> Collection[str]:
        return options.backend

    more: Any = {"access_log": False, "timeout_graceful_shutdown": GRACE}
    uvicorn.run(create_app(find), host=options.host, port=options.port, **more)
    return 0
