"""The router: an OpenAI-compatible server that sends each request to the replica that `routing.py`
chooses. `relay.py` takes a request there and its answer back; `replicas.py` has the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Receive, Scope, Send

from shared import cli
from shared.errors import UserError
from stage06_serving import logs
from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.app import PAGE, answer_errors
from stage06_serving.errors import ApiError, error_body
from stage06_serving.guard import Guard
from stage06_serving.settings import PREFIX, parse
from stage06_serving.sse import HEADERS, KIND

from .client import session
from .metrics import Metrics
from .process import SERVER
from .relay import SENT, Relay
from .replicas import Backend, Options, Pool
from .sources import source

POSTS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model:path}", "/version")
ADMIN = "x-admin-key"  # header
LOOP = "The request has come back to this router: remove the server that leads here."
ROUTERS = {"host", "port", "allowed_host", "api_key", "api_key_file", "log_requests", "block_size"}
ROUTERS |= {"request_timeout", "grace"}  # options of stage 06 that the router has too


class NoLoop:
    """Refuses what this router has sent itself. A server may lead back here, and a request would go
    round until no connection is left; so would a health check that it must fail."""

    def __init__(self, app: ASGIApp, via: bytes) -> None:
        self.app, self.via = app, via

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if any(self.via in value for name, value in scope.get("headers", ()) if name == b"via"):
            app = JSONResponse(error_body(503, LOOP), 503, {"retry-after": "60"})
        await app(scope, receive, send)


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
    metrics = Metrics(relay, state.statuses)
    app.add_middleware(NoLoop, via=pool.via.encode())
    app.add_middleware(
        Guard, keys=options.keys, hosts=options.hosts, statuses=state.statuses, state=state
    )
    answer_errors(app)
    for path in (*POSTS, *GETS):
        methods = ["POST"] if path in POSTS else ["GET"]
        app.router.routes.append(Path(path, relay, methods=methods))

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        """Whether the router works, and what it knows of its replicas; only their number where
        there are keys and the request has none."""
        status = "loading" if state.engine is None else "ok"
        status = "draining" if relay.draining else status
        replicas = {name: backend.about() for name, backend in pool.backends.items()}
        ready = sum(about["ready"] for about in replicas.values())
        known = {"replicas": replicas} if request.scope["known"] else {}
        return {"status": status, "ready": ready, "backends": len(replicas)} | known

    @app.get("/ready")
    async def ready(request: Request) -> dict[str, Any]:
        """Whether a request would find a replica."""
        now = await health(request)
        if now["status"] != "ok" or not now["ready"]:
            raise ApiError(503, "No replica is ready.", headers={"Retry-After": "1"})
        return now

    @app.get("/metrics")
    async def merged_metrics(request: Request) -> Response:
        page = await metrics.render(request.headers.get("via", ""))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE, media_type="text/html")

    @app.get("/live")
    async def live(request: Request) -> Response:
        """What stage 06's page draws: the first ready replica, as long as it runs."""
        backend = next((backend for backend in pool.backends.values() if backend.ready), None)
        if backend is None:
            raise ApiError(503, "No replica is ready.", headers={"Retry-After": "1"})
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        headers["via"] = f"{headers.get('via', '')} {pool.via}"

        async def frames() -> AsyncIterator[bytes]:
            with suppress(aiohttp.ClientError, OSError):  # the page connects again
                async with pool.session.get(f"{backend.url}/live", headers=headers) as response:
                    if response.content_type != KIND:
                        return  # another kind of server
                    async for data in response.content.iter_any():
                        if relay.draining:
                            return
                        yield data

        return StreamingResponse(frames(), headers=HEADERS, media_type=KIND)

    def named(fields: Any) -> Backend:
        try:
            return pool.backends[fields["replica"]]
        except (KeyError, TypeError):
            names = ", ".join(pool.backends)
            raise ApiError(400, f'Send {{"replica": NAME}}, one of {names}.', "replica") from None

    async def update(_: Any) -> dict[str, Any]:
        return {"updated": await pool.update(options.grace)}

    async def drain(fields: Any) -> dict[str, Any]:
        return {"drained": await pool.drain(named(fields), options.grace)}

    async def resume(fields: Any) -> dict[str, Any]:
        backend = named(fields)
        backend.draining = False
        await pool.check(backend)
        return {"ready": backend.ready}

    async def add(fields: Any) -> dict[str, Any]:
        try:
            backend = await pool.add(cli.address(fields["url"]))
        except (KeyError, TypeError, AttributeError, argparse.ArgumentTypeError):
            message = 'Send {"url": ADDRESS}, such as http://127.0.0.1:8001.'
            raise ApiError(400, message, "url") from None
        return {"replica": backend.name, "ready": backend.ready}

    async def remove(fields: Any) -> dict[str, Any]:
        return {"drained": await pool.remove(named(fields), options.grace)}

    actions = {action.__name__: action for action in (update, drain, resume, add, remove)}

    @app.post("/admin/{name}")
    async def admin(name: str, request: Request) -> dict[str, Any]:
        """`update` replaces all processes one by one; `drain`, `resume` and `remove` take
        {"replica": NAME}, and `add` takes {"url": ADDRESS}.

        Requests, not signals: they work on every system, and the answer tells how the action ended.
        """
        if not options.admin_key:
            raise ApiError(403, f"Start the router with {PREFIX}ADMIN_KEY in its environment.")
        key = request.headers.get(ADMIN, "")
        if not secrets.compare_digest(key.encode(), options.admin_key.encode()):
            raise ApiError(401, f"The header {ADMIN} is missing or wrong: send the key.")
        if name not in actions:
            raise ApiError(404, f"Unknown action: choose one of {', '.join(actions)}.")
        try:
            fields = await request.json()
        except ValueError:
            fields = None
        return await actions[name](fields)

    return app


def make_parser(replicas: int) -> cli.Parser:
    parser = cli.Parser(
        "stage12_distributed router",
        "A server for OpenAI's clients that sends each request to the replica that has cached the "
        "longest part of its prompt, unless that replica is busy. It starts servers of stage 06 as "
        "its replicas, or takes given ones. All other options are those of stage06_serving: host, "
        "port, keys and times are the router's; the rest go to each server that it starts.",
        "  python -m stage12_distributed router --replicas 2 --port 8080 --max-num-seqs 8\n"
        "  python -m stage12_distributed router --backend http://10.0.0.1:8000 --backend "
        "http://10.0.0.2:8000\n"
        "  python -m stage12_distributed router --backend dns:engines.internal:8000",
    )
    parser.add_argument(
        "--replicas",
        type=cli.whole_number(1, 64),
        default=replicas,
        metavar="N",
        help="servers to start; by default their threads share the processor",
    )
    parser.add_argument(
        "--backend",
        type=source,
        action="append",
        metavar="SOURCE",
        help="running servers, instead of --replicas: an address, http://HOST:PORT; a file with an "
        "address per line, file:PATH, read again every second; or a name, dns:NAME:PORT, looked up "
        "every second; repeat it for more; default: none",
    )
    for option, about in (
        ("--first-byte-timeout", "until a stream must begin, or a server must show progress"),
        ("--idle-timeout", "until an answer that has begun must go on"),
    ):
        parser.add_argument(
            option,
            type=cli.number(0.1, 3600),
            default=60.0,
            metavar="S",
            help=f"seconds {about}; a replica that is silent for longer is ejected",
        )
    return parser


def main(
    argv: list[str] | None = None,
    module: str = SERVER,
    arguments: Sequence[str] = (),
    processes: int = 1,
    replicas: int = 2,
) -> int:
    """Run the router. The servers that it starts, by default `replicas` of them, are `module` with
    `arguments`, which takes `processes` processes."""
    ours, rest = make_parser(replicas).parse_known_args(argv)
    settings = parse(rest)
    changed = settings.model_dump().items() - parse([]).model_dump().items()
    if ours.backend and (for_servers := {name for name, _ in changed} - ROUTERS):
        option = min(for_servers).replace("_", "-")
        raise UserError(f"--{option} is for servers that we start: leave out --backend.")
    share = max(1, (os.cpu_count() or 1) // (ours.replicas * processes))
    options = Options(
        tuple(ours.backend or ()),
        replicas=ours.replicas,
        arguments=("--threads", str(share), *arguments, *rest),
        module=module,
        block_size=settings.block_size,
        timeout=settings.request_timeout,
        first_byte=ours.first_byte_timeout,
        idle=ours.idle_timeout,
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
