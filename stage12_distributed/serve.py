"""The same replicas on Ray: `python -m stage12_distributed serve`, or on a cluster of yours
`serve deploy stage12_distributed/serve.yaml`.

Ray places the servers, starts them again, and replaces them at an update. Which server gets a
request is decided by `routing.py`, as in the router, and what a server answers comes by plain HTTP.
`Front` is that router as an application of Ray Serve: behind Ray's own proxy, and on a port of its
own, where tokens do not pass through Ray at all.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection
from typing import Any

from shared import cli
from shared.errors import UserError
from stage06_serving import logs
from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.settings import parse

from .replicas import close, launch
from .router import Options, create_app

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is there: it reports by default
try:
    import ray
    from ray import serve
except ModuleNotFoundError:
    raise UserError(
        "Ray is not installed: run `python -m pip install -r requirements-distributed.txt`."
    ) from None

NAME = "staircase"
HOST = "STAIRCASE_NODE"  # variable: the address of every node; by default Ray knows it
MEMORY = 100_000_000  # bytes for Ray's objects: there are none; its default is 30 % of the memory
LISTED = 2.0  # seconds in which all engines must name their addresses
GRACE = 45.0  # seconds for answers in flight at an update or the end
DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 4096,  # the servers have queues; Ray's 5 would leave batches empty
    "graceful_shutdown_timeout_s": 60.0,  # longer than GRACE; Ray's 20 would cut answers off
    "health_check_period_s": 1.0,  # Ray's 10, three times, would be half a minute
    "health_check_timeout_s": 10.0,
}


@serve.deployment(max_surge_percent=100, ray_actor_options={"num_cpus": 1}, **DEFAULTS)
class Engine:
    """A server of stage 06, in a process that ends with this one. At an update a new one comes
    first: without a surge, one replica less is Ray's default."""

    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]
        self.process, self.showing, url = await launch("engine", arguments, address())
        self.url = await url

    async def where(self) -> str:
        return self.url

    async def check_health(self) -> None:
        """Ray calls this, and replaces what raises."""
        if self.process.returncode is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")

    async def __del__(self) -> None:
        await close(self.process)


@serve.deployment(ray_actor_options={"num_cpus": 0}, **DEFAULTS)
@serve.ingress()
class Front:
    """The router before all engines. port: of its own, on its node; 0 for none."""

    def __init__(self, engines: Any, hosts: list[str], port: int) -> None:
        self.engines, self.port = engines, port
        logs.start(False)
        keys = tuple(parse([]).keys)
        options = Options(find=self.find, hosts=tuple(hosts), keys=keys, grace=GRACE)
        self.router = create_app(options)

    def __serve_build_asgi_app__(self) -> Any:
        return self.router

    async def find(self) -> Collection[str]:
        """The addresses of all engines. Its first call, in the lifespan that Ray runs, is when our
        own port can be opened."""
        if self.port:
            self.serving = asyncio.create_task(self.serve(self.port))
            self.port = 0
        response = self.engines.broadcast("where")
        found = await response.results_async(timeout_s=LISTED, return_exceptions=True)
        return [url for url in found if isinstance(url, str)]

    async def serve(self, port: int) -> None:
        config = configure(self.router)
        config.lifespan = "off"  # Ray runs it
        server = Server(config, self.router, GRACE, lambda: None)
        await server.serve([listen(address(), port)])


def address() -> str:
    """Of this node, for the others; of this machine, if there are no others."""
    return os.environ.get(HOST) or str(ray.util.get_node_ip_address())


def build(arguments: dict[str, Any]) -> Any:
    """The application, for `serve.yaml` too. replicas: servers; engine: their options; hosts: names
    that a Host header may have; port: of the front, past Ray's proxy."""
    count = arguments.get("replicas", 2)
    engine: Any = Engine  # Ray made deployments of both classes
    front: Any = Front
    engines = engine.options(num_replicas=count).bind(arguments.get("engine", []))
    return front.bind(engines, arguments.get("hosts", []), arguments.get("port", 0))


def make_parser() -> cli.Parser:
    parser = cli.Parser(
        "stage12_distributed serve",
        "Starts Ray on this machine, and on it servers of stage 06 behind the router.",
        "  python -m stage12_distributed serve --replicas 2 -- --max-sequences 8\n"
        "  serve deploy stage12_distributed/serve.yaml     the same on a cluster of yours",
    )
    ports, count = cli.whole_number(1, 65_535), cli.whole_number(1, 64)
    for option, kind, default, about in (
        ("--replicas", count, 2, "servers to start"),
        ("--port", ports, 8000, "port of the router itself, past Ray's proxy"),
        ("--ray-port", ports, 8001, "port of Ray's proxy, before the router"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar="N", help=about)
    parser.add_argument(
        "server", nargs="*", metavar="-- OPTION", help="options of each server, none by default"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    given = make_parser().parse_args(argv)
    parse(given.server)
    try:
        start(given.replicas, given.port, given.ray_port, given.server)
        print(f"Staircase serves on Ray at http://127.0.0.1:{given.port}", flush=True)
        threading.Event().wait()
    finally:
        stop()
    return 0


def start(replicas: int, port: int, ray_port: int, arguments: list[str]) -> None:
    """A Ray of our own on this machine, for it alone, with the application."""
    os.environ[HOST] = "127.0.0.1"  # Ray's processes inherit it
    ray.init(num_cpus=replicas, include_dashboard=False, object_store_memory=MEMORY)
    serve.start(http_options={"host": "127.0.0.1", "port": ray_port})
    engine = ["--threads", "1", *arguments]
    serve.run(build({"replicas": replicas, "engine": engine, "port": port}), name=NAME)


def stop() -> None:
    serve.shutdown()
    ray.shutdown()
