"""The router: an OpenAI-compatible server that sends each request to the replica that `routing.py`
chooses. `relay.py` has the way of a request, and `replicas.py` the servers behind it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from shared import cli
from shared.errors import UserError
from stage06_serving import logs
from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.errors import ApiError, error_body
from stage06_serving.guard import Guard
from stage06_serving.settings import PREFIX, parse

from . import metrics
from .relay import Relay
from .replicas import Find, Pool
from .routing import BLOCK_SIZE, Routing

CONNECT = 5.0  # seconds until a replica must have accepted a connection
POSTS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model:path}", "/version")
ADMIN = "x-admin-key"  # header


@dataclass(frozen=True)
class Options:
    """What the command line says. replicas: processes to start, if no `backends` are given, and
    none is `find`, which finds them."""

    backends: tuple[str, ...] = ()
    find: Find | None = None
    replicas: int = 2
    arguments: tuple[str, ...] = ()
    block_size: int = BLOCK_SIZE
    timeout: float = 300.0
    grace: float = 10.0
    hosts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    admin_key: str = ""


def session() -> aiohttp.ClientSession:
    """For all requests to replicas. Each has a connection of its own: one that is kept may have
    been closed by the other side, which looks like a death."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        auto_decompress=False,
    )


def create_app(options: Options) -> FastAPI:
    """The application. `state.engine` is its Relay once the replicas are started, and None before:
    the names are those that stage 06's server expects."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with session() as client:
            key = next(iter(options.keys), "")
            routing = Routing(options.block_size)
            own = (options.replicas, options.arguments)
            state.pool = Pool(routing, client, options.backends, *own, key, options.find)
            state.relay = Relay(state.pool, options.timeout)
            state.loading = asyncio.create_task(load())
            try:
                yield
            finally:
                state.loading.cancel()
                await state.relay.drain(options.grace)  # stage 06's server has, Ray's has not
                await state.pool.stop()

    async def load() -> None:
        await state.pool.start()
        state.engine = state.relay

    app = FastAPI(
        title="Staircase router",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    state: Any = app.state
    state.engine, state.statuses = None, Counter[int]()
    app.add_middleware(
        Guard, keys=options.keys, hosts=options.hosts, statuses=state.statuses, state=state
    )

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        messages = {404: "This path does not exist.", 405: "This path has no such method."}
        body = error_body(error.status_code, messages.get(error.status_code, "It is not readable."))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ApiError)
    async def failed(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return JSONResponse(error_body(400, str(error)), 400)

    for path in (*POSTS, *GETS):
        methods = ["POST"] if path in POSTS else ["GET"]
        app.router.routes.append(Path(path, Relayed(state), methods=methods))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the router works, and what it knows of its replicas."""
        status = "loading" if state.engine is None else "ok"
        status = "draining" if state.relay.draining else status
        backends = state.pool.backends.items()
        return {"status": status, "replicas": {name: one.about() for name, one in backends}}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether a request would find a replica."""
        now = await health()
        if now["status"] != "ok" or not any(one["ready"] for one in now["replicas"].values()):
            raise ApiError(503, "No replica is ready.", headers={"Retry-After": "1"})
        return now

    @app.get("/metrics")
    async def page() -> Response:
        return Response(await metrics.render(state.relay), media_type=CONTENT_TYPE_LATEST)

    @app.post("/admin/{action}")
    async def admin(action: str, request: Request) -> dict[str, Any]:
        """`update` replaces all processes one by one; `drain` and `resume` take {"replica": NAME}.

        Requests and not signals: they work on every system, and their answer tells how it ended.
        """
        if not options.admin_key:
            raise ApiError(403, f"Start the router with {PREFIX}ADMIN_KEY in its environment.")
        given = request.headers.get(ADMIN, "")
        if not secrets.compare_digest(given.encode(), options.admin_key.encode()):
            raise ApiError(401, f"The header {ADMIN} is missing or wrong.")
        pool: Pool = state.pool
        if action == "update":
            return {"updated": await pool.update(options.grace)}
        try:
            backend = pool.backends[(await request.json())["replica"]]
        except (ValueError, KeyError, TypeError):
            names = ", ".join(pool.backends)
            raise ApiError(400, f'Send {{"replica": NAME}}, one of {names}.', "replica") from None
        if action == "drain":
            return {"drained": await pool.drain(backend, options.grace)}
        if action != "resume":
            raise ApiError(404, "The actions are update, drain and resume.")
        backend.draining = False
        await pool.check(backend)
        return {"ready": backend.ready}

    return app


class Relayed:
    """The endpoint of all paths that replicas answer. An object: starlette would wrap a function.

    state: of the application, which has its `relay` once it has started.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.state.relay(scope, receive, send)


def make_parser() -> cli.Parser:
    parser = cli.Parser(
        "stage12_distributed router",
        "A server for OpenAI's clients that sends each request to the replica that has the longest "
        "part of its prompt, unless that one is busy. It starts its replicas, which are servers of "
        "stage 06, or takes given ones.",
        "  python -m stage12_distributed router --replicas 2\n"
        "  python -m stage12_distributed router -- --max-sequences 8     "
        "what follows -- is for stage06_serving\n"
        "  python -m stage12_distributed router --backend http://10.0.0.1:8000 --backend "
        "http://10.0.0.2:8000",
    )
    parser.add_argument(
        "--replicas", type=cli.whole_number(1, 64), default=2, metavar="N", help="servers to start"
    )
    parser.add_argument(
        "--backend",
        type=cli.address,
        action="append",
        metavar="URL",
        help="address of a server that runs already, in place of --replicas; may be given again; "
        "default: none",
    )
    parser.add_argument(
        "server",
        nargs="*",
        metavar="-- OPTION",
        help="options of each server that is started; default: threads that share the processor",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port",
        type=cli.whole_number(0, 65_535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one",
    )
    parser.add_argument(
        "--allowed-host",
        metavar="NAMES",
        default="",
        help="more names for the Host header, commas between; * is any; default: none",
    )
    parser.add_argument(
        "--request-timeout",
        type=cli.number(0, 86400, above=True),
        default=300.0,
        metavar="S",
        help="seconds until a request gets 504, with all its tries",
    )
    parser.add_argument(
        "--grace",
        type=cli.number(0, 3600),
        default=10.0,
        metavar="S",
        help="seconds for requests in flight to end at a drain, an update or the end",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    given = make_parser().parse_args(argv)
    if given.backend and given.server:
        raise UserError("Options after -- are for servers that are started: leave out --backend.")
    settings = parse(given.server)
    share = max(1, (os.cpu_count() or 1) // given.replicas)
    own = ("--threads", str(share), *given.server)
    options = Options(
        tuple(given.backend or ()),
        replicas=given.replicas,
        arguments=own,
        block_size=settings.block_size,
        timeout=given.request_timeout,
        grace=given.grace,
        hosts=(given.host, *filter(None, given.allowed_host.split(","))),
        keys=tuple(settings.keys),
        admin_key=os.environ.get(f"{PREFIX}ADMIN_KEY", ""),
    )
    logs.start(False)
    with listen(given.host, given.port) as listening:
        app = create_app(options)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        def loaded() -> None:
            print(plan(app.state.pool, address), file=sys.stderr, flush=True)

        server = Server(configure(app, app.state.statuses), app, options.grace, loaded)
        asyncio.run(server.serve(sockets=[listening]))
        if (loading := app.state.loading).done() and not loading.cancelled():
            loading.result()  # raises the error that ended the router before it was ready
    return 0


def plan(pool: Pool, address: str) -> str:
    """The text at the start."""
    lines = [f"Staircase serves {pool.model or 'no model yet'} at {address}"]
    for backend in pool.backends.values():
        why = "" if backend.ready else f": no requests, {backend.why}"
        lines.append(f"  {backend.name}  {backend.url}{why}")
    return "\n".join(lines)
