"""The router: an OpenAI-compatible server that sends each request to the replica that `routing.py`
chooses. `relay.py` takes a request there and its answer back; `replicas.py` has the servers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route as Path

from shared import cli
from shared.errors import UserError
from stage06_serving import logs
from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.app import answer_errors
from stage06_serving.errors import ApiError
from stage06_serving.guard import Guard
from stage06_serving.settings import PREFIX, parse

from . import metrics
from .relay import Relay
from .replicas import Options, Pool

CONNECT = 5.0  # seconds until a replica must have accepted a connection
POSTS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model:path}", "/version")
ADMIN = "x-admin-key"  # header
OWN = {"host", "port", "allowed_host", "api_key", "api_key_file", "log_requests", "block_size"}
OWN |= {"request_timeout", "grace"}  # options of stage 06 that the router has too


def session() -> aiohttp.ClientSession:
    """The session for all requests to replicas. Each request opens its own connection: the other
    side may have closed one that was kept, which would look like a death."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        auto_decompress=False,
    )


def create_app(options: Options) -> FastAPI:
    """The application. `state.engine` is its Relay once the replicas are started, and None before;
    stage 06's server expects these names."""
    pool = Pool(options)
    relay = Relay(pool, options.timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with session() as pool.session:
            state.loading = asyncio.create_task(load())
            try:
                yield
            finally:
                state.loading.cancel()
                await relay.drain(options.grace)  # stage 06's server has, Ray's has not
                await pool.stop()

    async def load() -> None:
        await pool.start()
        state.engine = relay

    app = FastAPI(
        title="Staircase router",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    state: Any = app.state
    state.engine, state.pool, state.relay, state.statuses = None, pool, relay, Counter[int]()
    app.add_middleware(
        Guard, keys=options.keys, hosts=options.hosts, statuses=state.statuses, state=state
    )
    answer_errors(app)
    for path in (*POSTS, *GETS):
        methods = ["POST"] if path in POSTS else ["GET"]
        app.router.routes.append(Path(path, relay, methods=methods))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the router works, and what it knows of its replicas."""
        status = "loading" if state.engine is None else "ok"
        status = "draining" if relay.draining else status
        replicas = {name: backend.about() for name, backend in pool.backends.items()}
        return {"status": status, "replicas": replicas}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether a request would find a replica."""
        now = await health()
        if now["status"] != "ok" or not any(one["ready"] for one in now["replicas"].values()):
            raise ApiError(503, "No replica is ready.", headers={"Retry-After": "1"})
        return now

    @app.get("/metrics")
    async def page() -> Response:
        return Response(await metrics.render(relay), media_type=CONTENT_TYPE_LATEST)

    @app.post("/admin/{action}")
    async def admin(action: str, request: Request) -> dict[str, Any]:
        """`update` replaces all processes one by one; `drain` and `resume` take {"replica": NAME}.

        Requests, not signals: they work on every system, and the answer tells how the action ended.
        """
        if not options.admin_key:
            raise ApiError(403, f"Start the router with {PREFIX}ADMIN_KEY in its environment.")
        given = request.headers.get(ADMIN, "")
        if not secrets.compare_digest(given.encode(), options.admin_key.encode()):
            raise ApiError(401, f"The header {ADMIN} is missing or wrong: send the key.")
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
            raise ApiError(404, "Unknown action: choose update, drain or resume.")
        backend.draining = False
        await pool.check(backend)
        return {"ready": backend.ready}

    return app


def make_parser() -> cli.Parser:
    parser = cli.Parser(
        "stage12_distributed router",
        "A server for OpenAI's clients that sends each request to the replica that has cached the "
        "longest part of its prompt, unless that replica is busy. It starts servers of stage 06 as "
        "its replicas, or takes given ones. All other options are those of stage06_serving: host, "
        "port, keys and times are the router's; the rest go to each server that it starts.",
        "  python -m stage12_distributed router --replicas 2 --port 8080 --max-sequences 8\n"
        "  python -m stage12_distributed router --backend http://10.0.0.1:8000 --backend "
        "http://10.0.0.2:8000",
    )
    parser.add_argument(
        "--replicas",
        type=cli.whole_number(1, 64),
        default=2,
        metavar="N",
        help="servers to start; by default their threads share the processor",
    )
    parser.add_argument(
        "--backend",
        type=cli.address,
        action="append",
        metavar="URL",
        help="address of a running server, instead of --replicas; repeat it for more servers; "
        "default: none",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    given, rest = make_parser().parse_known_args(argv)
    settings = parse(rest)
    changed = settings.model_dump().items() - parse([]).model_dump().items()
    if given.backend and (for_servers := {name for name, _ in changed} - OWN):
        option = min(for_servers).replace("_", "-")
        raise UserError(f"--{option} is for servers that we start: leave out --backend.")
    share = max(1, (os.cpu_count() or 1) // given.replicas)
    options = Options(
        tuple(given.backend or ()),
        replicas=given.replicas,
        arguments=("--threads", str(share), *rest),
        block_size=settings.block_size,
        timeout=settings.request_timeout,
        grace=settings.grace,
        hosts=tuple(settings.hosts),
        keys=tuple(settings.keys),
        admin_key=os.environ.get(f"{PREFIX}ADMIN_KEY", ""),
    )
    logs.start(settings.log_requests)
    with listen(settings.host, settings.port) as listening:
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


if __name__ == "__main__":
    cli.run(main)
