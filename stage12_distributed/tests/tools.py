"""The router in the process of its tests, on a real socket, and servers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from stage06_serving.__main__ import Server, configure, listen
from stage12_distributed import router
from stage12_distributed.relay import Relay
from stage12_distributed.replicas import Pool
from stage12_distributed.router import Options
from stage12_distributed.routing import Replica

PATH = "/v1/completions"
SLACK = 30.0  # seconds: nothing here takes a tenth of that


@dataclass
class Routed:
    """A router that answers at `url`."""

    url: str
    pool: Pool
    relay: Relay
    http: aiohttp.ClientSession
    server: Server

    @property
    def replicas(self) -> list[Replica]:
        """Those that are in the policy."""
        return list(self.pool.routing.replicas.values())

    @property
    def idle(self) -> bool:
        counts = [(each.requests, each.tokens) for each in self.replicas]
        return not self.relay.limits and not any(map(any, counts))

    async def post(self, path: str, fields: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and body of the answer: a string if it is a stream."""
        async with self.http.post(self.url + path, json=fields, headers=headers) as response:
            stream = response.content_type == "text/event-stream"
            body = await response.text() if stream else await response.json()
            return response.status, response.headers, body

    async def get(self, path: str, **headers: str) -> Any:
        async with self.http.get(self.url + path, headers=headers) as response:
            return await response.json()


@asynccontextmanager
async def routed(*urls: str, **options: Any) -> AsyncIterator[Routed]:
    """A router before these addresses."""
    made = Options(urls, **options)
    app, loaded = router.create_app(made), asyncio.Event()
    with listen("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = Server(configure(app), app, made.grace, loaded.set)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.wait_for(loaded.wait(), SLACK)
            async with aiohttp.ClientSession() as http:
                yield Routed(url, app.state.pool, app.state.relay, http, server)
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, SLACK)


@dataclass
class Plain:
    """A server without a model: `answer(request)` makes its answers."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    models: bytes = b'{"data": [{"id": "mock"}]}'
    slow: float = 0.0  # seconds that /ready takes
    requests: int = 0
    running: int = 0
    seen: Any = None  # headers of the last request
    url: str = ""

    async def ready(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.slow)
        return web.json_response({})

    async def listed(self, request: web.Request) -> web.Response:
        return web.Response(body=self.models)

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.requests, self.seen = self.requests + 1, dict(request.headers)
        self.running += 1
        try:
            return await self.answer(request)
        finally:
            self.running -= 1


@asynccontextmanager
async def plain(answer: Any, port: int = 0, **fields: Any) -> AsyncIterator[Plain]:
    made = Plain(answer, **fields)
    app = web.Application()
    app.router.add_get("/ready", made.ready)
    app.router.add_get("/v1/models", made.listed)
    app.router.add_post(PATH, made.post)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    made.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
    try:
        yield made
    finally:
        await runner.cleanup()
