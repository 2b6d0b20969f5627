"""A request on its way through the router: what is repeated, what is passed on, and what is left
behind when replicas or clients go. The servers are stubs on real sockets; one test has real ones,
asked by the official client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest
import uvicorn
from aiohttp import web

from shared.errors import UserError
from shared.server import own_server
from stage12_distributed import router
from stage12_distributed.router import Router, create_app, main, read
from stage12_distributed.routing import Routing

ASK: dict[str, Any] = {"prompt": "There was a fox. " * 16, "max_tokens": 8}
STREAM = ASK | {"stream": True}
PATH = "/v1/completions"


@dataclass
class Replica:
    """A server without a model: `answer(request)` makes its answers."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ready: int = 200  # status of /ready
    requests: int = 0
    running: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    url: str = ""


@asynccontextmanager
async def replica(answer: Any) -> AsyncIterator[Replica]:
    server = Replica(answer)

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response(status=server.ready)
        server.requests, server.running = server.requests + 1, server.running + 1
        server.headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            return await server.answer(request)
        finally:
            server.running -= 1

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


async def whole(request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "whole"})


async def stream(request: web.Request, end: bytes = b"data: [DONE]\n\n") -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in (b'data: {"first": 1}\n\nda', b'ta: {"second": 2}\n\n', end):
        await response.write(data)
    return response


async def cut(request: web.Request) -> web.StreamResponse:
    """Dies in the middle of its third event."""
    await stream(request, b'data: {"thi')
    await asyncio.sleep(0.05)
    return await dies(request)


async def dies(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def held(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def full(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "no room"}, status=503, headers={"Retry-After": "7"})


async def wrong(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "max_tokens"}, status=400)


@dataclass
class Routed:
    """A router that answers at `url`."""

    url: str
    router: Router
    http: aiohttp.ClientSession

    def prefer(self, server: Replica) -> None:
        """Make the prompt of ASK cached at this server alone."""
        routing = self.router.routing
        for known in routing.replicas.values():
            known.tree.clear()
        prompt = read(json.dumps(ASK).encode(), "", routing)
        routing.replicas[server.url].remember(prompt.digests)

    async def ask(self, fields: Any = ASK, **headers: str) -> tuple[int, str, Any]:
        async with self.http.post(self.url + PATH, json=fields, headers=headers) as response:
            events = response.content_type == "text/event-stream"
            body = await response.text() if events else await response.json()
            return response.status, response.headers.get("x-replica", ""), body

    @property
    def idle(self) -> bool:
        return not any(r.requests or r.tokens for r in self.router.routing.replicas.values())


@asynccontextmanager
async def routed(*servers: Replica, timeout: float = 30.0) -> AsyncIterator[Routed]:
    urls = [server.url for server in servers]

    async def find() -> list[str]:
        return urls

    app = create_app(find, timeout)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with aiohttp.ClientSession() as http:
            yield Routed(url, app.state.router, http)
        server.should_exit = True
        await serving
        await asyncio.sleep(0.01)  # transports close


@asynccontextmanager
async def two(first: Any, second: Any, **options: Any) -> AsyncIterator[tuple[Any, Any, Routed]]:
    """Two servers behind a router that prefers the first one for ASK."""
    async with (
        replica(first) as preferred,
        replica(second) as other,
        routed(preferred, other, **options) as client,
    ):
        client.prefer(preferred)
        yield preferred, other, client


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_answers_are_passed_on_with_the_headers_that_matter():
    async with replica(whole) as server, routed(server) as client:
        sent = {"authorization": "Bearer k", "traceparent": "00-4bf9", "x-request-id": "mine"}
        assert await client.ask(**sent, Cookie="secret") == (200, server.url, {"text": "whole"})
        assert server.headers.items() > sent.items()
        assert server.headers["host"] in server.url and "cookie" not in server.headers
        server.answer = stream
        _, _, text = await client.ask(STREAM)
        assert text == 'data: {"first": 1}\n\ndata: {"second": 2}\n\ndata: [DONE]\n\n'
        server.answer = whole
        for path in ("/health", "/v1/models"):
            async with client.http.head(client.url + path) as head:
                assert head.status == 200
            async with client.http.get(client.url + path) as got:
                length = head.headers["content-length"]
                assert got.status == 200 and got.headers["content-length"] == length != "0"
        assert client.idle


@pytest.mark.parametrize("fields", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_dead_replica_costs_one_request_a_second_try_and_the_others_nothing(fields):
    """It is chosen for its cache once, not again and again until a health check notices."""
    async with two(dies, stream if "stream" in fields else whole) as (dead, other, client):
        for _ in range(3):
            status, name, _ = await client.ask(fields)
            assert (status, name) == (200, other.url)
            dead.ready = 503
        assert (dead.requests, other.requests) == (1, 3) and client.idle
        assert client.router.budget == router.MOST_BUDGET  # a death needs none
        assert not client.router.routing.replicas[dead.url].tree


async def test_what_was_shown_is_never_tried_again():
    """And an event that was cut in two is not shown."""
    async with two(cut, stream) as (bad, other, client):
        status, _, text = await client.ask(STREAM)
        first, second, error, done = (event[6:] for event in text.strip().split("\n\n"))
        assert status == 200 and json.loads(first) == {"first": 1} and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == 503
        assert (bad.requests, other.requests) == (1, 0) and client.idle


@pytest.mark.parametrize(
    "body", [json.dumps(ASK), "", "[]", '"x"', '{"prompt": {"a": 1}}', '{"n": "x"}', "[" * 9999]
)
async def test_a_wrong_request_is_no_fault_of_the_replica(body):
    """Nor is a body that the router cannot read: a replica refuses it."""
    async with two(wrong, wrong) as (server, other, client):
        async with client.http.post(client.url + PATH, data=body) as response:
            assert response.status == 400
        assert server.requests + other.requests == 1 and client.idle
        assert client.router.budget == router.MOST_BUDGET


async def test_a_full_replica_is_passed_over_and_retries_have_a_budget(monkeypatch):
    """A fleet that fails does not get twice the load: one retry for ten requests."""
    monkeypatch.setattr(router, "CHECK", 60.0)
    async with two(full, whole) as (server, other, client):
        assert await client.ask() == (200, other.url, {"text": "whole"})
        assert client.router.budget == router.MOST_BUDGET - 1
        other.answer = full
        client.router.budget, before = 0.0, server.requests + other.requests
        for _ in range(30):
            await client.router.look()  # both are ready again
            assert (await client.ask())[0] == 503
        assert server.requests + other.requests - before in (32, 33)


async def test_no_replica_is_503_until_one_lives():
    async with replica(whole) as server, routed(server) as client:
        server.ready = 503
        await client.router.look()
        status, _, body = await client.ask()
        assert status == 503 == body["error"]["code"] and "try again" in body["error"]["message"]
        async with client.http.get(client.url + "/ready") as response:
            assert response.status == 503
        server.ready = 200
        await client.router.look()
        assert (await client.ask())[0] == 200


@pytest.mark.parametrize("fields", [ASK, STREAM], ids=["whole", "stream"])
async def test_one_deadline_for_all_tries(fields):
    async with two(held, held, timeout=0.2) as (server, other, client):
        status, _, body = await client.ask(fields)
        assert status == 504 and "fewer tokens" in body["error"]["message"]
        await until(lambda: not server.running + other.running and client.idle)


async def test_a_stream_that_stands_still_is_given_up(monkeypatch):
    monkeypatch.setattr(router, "SILENCE", 0.2)
    async with two(held, stream) as (server, other, client):
        assert (await client.ask(STREAM))[:2] == (200, other.url)
        await until(lambda: not server.running)


@pytest.mark.parametrize("fields", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_client_that_leaves_leaves_nothing(fields):
    async with two(held, held) as (server, other, client):
        asking = asyncio.create_task(client.ask(fields))
        await until(lambda: server.running)
        asking.cancel()
        await until(lambda: not server.running and client.idle)
        assert not other.requests


def test_prompts_that_begin_alike_share_digests():
    routing = Routing()

    def digests(tenant: str = "", **fields: Any) -> list[bytes]:
        return list(read(json.dumps(fields).encode(), tenant, routing).digests)

    text = "Once upon a time there lived a fox. " * 8
    chat = [{"role": "user", "content": text}]
    for short, long in (
        ({"prompt": text}, {"prompt": text + "It slept."}),
        ({"prompt": [*range(200)]}, {"prompt": [*range(300)]}),
        ({"messages": chat}, {"messages": [*chat, {"role": "assistant", "content": "Yes."}]}),
    ):
        first, second = digests(**short), digests(**long)
        assert 3 <= len(first) <= len(second) and first[:-1] == second[: len(first) - 1]
        assert not {*first} & {*digests("Bearer other", **short)}
        assert not {*first} & {*digests(**short, model="other")}


def test_the_official_client_through_the_router_to_real_servers():
    """A conversation stays where its blocks are, and its answers are those of one server."""
    with ExitStack() as stack:
        options = ["--kv-memory", "8MiB", "--threads", "1"]
        servers = [stack.enter_context(own_server(options, quiet=True)) for _ in range(2)]

        async def conversation() -> None:
            async with routed(*(Replica(whole, url=server.url) for server in servers)) as front:
                text, names = "Once upon a time there was a small fox called Pim. " * 4, set()
                for _ in range(3):
                    asked: dict[str, Any] = {"model": "stories", "prompt": text, "temperature": 0}
                    answers = []
                    for url in (front.url, servers[0].url):
                        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a") as client:
                            raw = await client.completions.with_raw_response.create(**asked)
                        answers.append(raw.parse().choices[0].text)
                        names.add(raw.headers.get("x-replica"))
                    assert answers[0] == answers[1]
                    text += answers[0]
                assert len(names - {None}) == 1 and front.idle

        asyncio.run(conversation())


def test_wrong_options_are_refused_in_a_sentence():
    for words in ([], ["--backend", "nowhere"]):
        with pytest.raises(UserError, match="--backend"):
            main(words)
