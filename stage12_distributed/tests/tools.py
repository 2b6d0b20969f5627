"""The router in the process of its tests, on a real socket, and servers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.tests.asking import HANG
from stage07_loadtest.mock import Behaviour, serving
from stage12_distributed.router.app import create_app
from stage12_distributed.router.relay import Relay, tokens_of
from stage12_distributed.router.replicas import Backend, Options, Pool
from stage12_distributed.router.routing import Replica

PATH = "/v1/completions"
ASK: dict[str, Any] = {"prompt": "There was a fox. " * 16, "max_tokens": 8, "ignore_eos": True}
STREAM = ASK | {"stream": True}


class Answered(NamedTuple):
    """body: a text if it is a stream."""

    status: int
    headers: Any
    body: Any

    @property
    def replica(self) -> tuple[int, str]:
        """Its status and the replica that answered."""
        return self.status, self.headers["x-replica"]


@dataclass
class Routed:
    """A router that answers at `url`."""

    url: str
    pool: Pool
    relay: Relay
    http: aiohttp.ClientSession
    server: Server

    @property
    def backends(self) -> list[Backend]:
        return list(self.pool.backends.values())

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that the policy knows."""
        return list(self.pool.routing.replicas.values())

    @property
    def idle(self) -> bool:
        counts = [(replica.requests, replica.tokens) for replica in self.replicas]
        return not self.relay.in_flight and not any(map(any, counts))

    def prefer(self, server: Any) -> Backend:
        """Make the prompt of ASK cached at this server alone; returns its backend."""
        (backend,) = (backend for backend in self.backends if backend.url == server.url)
        for replica in self.replicas:
            replica.tree.clear()
        assert backend.replica is not None
        digests = self.pool.routing.digests(tokens_of(ASK["prompt"]), b"\0None")
        backend.replica.remember(digests)
        return backend

    async def post(self, fields: Any = ASK, path: str = PATH, **headers: str) -> Answered:
        async with self.http.post(self.url + path, json=fields, headers=headers) as response:
            stream = response.content_type == "text/event-stream"
            body = await response.text() if stream else await response.json()
            return Answered(response.status, response.headers, body)

    async def get(self, path: str, **headers: str) -> Any:
        async with self.http.get(self.url + path, headers=headers) as response:
            return await response.json()

    async def metrics(self) -> set[str]:
        """The lines of the page."""
        async with self.http.get(self.url + "/metrics") as response:
            return {*(await response.text()).splitlines()}


@asynccontextmanager
async def routed(*servers: Any, **options: Any) -> AsyncIterator[Routed]:
    """A router in front of these servers, each of which has a `url` or is one."""
    settings = Options(tuple(getattr(server, "url", server) for server in servers), **options)
    app, loaded = create_app(settings), asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = Server(configure(app), app, settings.grace, loaded.set)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.wait_for(loaded.wait(), HANG)
            async with aiohttp.ClientSession() as http:
                yield Routed(url, app.state.pool, app.state.relay, http, server)
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, HANG)


@asynccontextmanager
async def two(first: Any, second: Any, **options: Any) -> AsyncIterator[tuple[Any, Any, Routed]]:
    """Two servers behind a router that prefers the first one for ASK."""
    async with first as preferred, second as other, routed(preferred, other, **options) as router:
        router.prefer(preferred)
        yield preferred, other, router


def mock(**fields: Any) -> Any:
    """A server of stage 07: known latencies and faults."""
    return serving(Behaviour(**{"ttft": 0.01, "itl": 0.002, **fields}))


@dataclass
class Plain:
    """A server without a model: `answer(request)` makes its answers."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    models: bytes = b'{"data": [{"id": "mock"}]}'
    slow: float = 0.0  # seconds that /ready takes
    waiting: int = 0  # requests, as /ready reports
    passes: int | None = None  # that /ready reports, if any
    pace: int = 0  # passes between two looks there
    requests: int = 0
    running: int = 0
    seen: Any = None  # headers of the last request
    url: str = ""


@asynccontextmanager
async def plain(answer: Any, **fields: Any) -> AsyncIterator[Plain]:
    server = Plain(answer, **fields)

    async def ready(request: web.Request) -> web.Response:
        await asyncio.sleep(server.slow)
        if server.passes is not None:
            server.passes += server.pace
        return web.json_response({"waiting": server.waiting, "passes": server.passes})

    async def models(request: web.Request) -> web.Response:
        return web.Response(body=server.models)

    def see(request: web.Request) -> None:
        server.seen = {name.lower(): value for name, value in request.headers.items()}

    async def live(request: web.Request) -> web.Response:
        see(request)
        return web.Response()

    async def post(request: web.Request) -> web.StreamResponse:
        server.requests, server.running = server.requests + 1, server.running + 1
        see(request)
        try:
            return await server.answer(request)
        finally:
            server.running -= 1

    app = web.Application()
    gets = {"/ready": ready, "/v1/models": models, "/live": live}
    app.add_routes([web.post(PATH, post), *(web.get(path, get) for path, get in gets.items())])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


async def held(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def answered(request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "whole"})


async def dies(request: web.Request) -> web.StreamResponse:
    """Dies as a process does."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
