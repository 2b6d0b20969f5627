"""The same replicas on Ray: `python -m stage12_distributed serve`, or on your cluster
`serve deploy stage12_distributed/serve.yaml`.

Ray places the servers, restarts them, and replaces them in an update.
`routing.py` decides which server gets a request, and answers come by plain HTTP: `Front` is the
router of router.py as an application of Ray Serve, behind Ray's own proxy. It asks Ray for the
servers' addresses, and their tokens do not pass through Ray's objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Collection
from typing import Any

import aiohttp

from shared import cli
from shared.errors import UserError
from shared.paths import ROOT
from shared.server import STARTING, STOPPING, free_port

from .router import CHECK, create_app

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is loaded: it reports by default
try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
except ModuleNotFoundError:
    raise UserError(
        "Ray is not installed: run `python -m pip install -r requirements-distributed.txt`."
    ) from None

NAME = "staircase"
HOST = "STAIRCASE_NODE"  # variable: the address of every node; by default Ray knows it
MEMORY = 100_000_000  # bytes for Ray's objects: there are none; its default is 30 % of the memory
LISTED = 2.0  # seconds in which all engines must name their addresses
GRACE = 45.0  # seconds for answers in flight when a server is replaced or no longer needed
DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 4096,  # the servers have queues; Ray's 5 would leave batches empty
    "graceful_shutdown_timeout_s": 75.0,  # longer than GRACE; Ray's 20 would cut answers off
    "health_check_period_s": 1.0,  # Ray's 10, three times, would be half a minute
    "health_check_timeout_s": 10.0,
    "max_surge_percent": 100,  # an update starts the new one first; Ray would first end the old one
}


@serve.deployment(ray_actor_options={"num_cpus": 1}, **DEFAULTS)
class Engine:
    """A server of stage 06, in a process that ends with this one."""

    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]
        port = free_port()
        self.url, self.http = f"http://{address()}:{port}", aiohttp.ClientSession()
        words = ["-m", "stage06_serving", "--host", address(), "--port", str(port), *arguments]
        self.process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT)
        async with asyncio.timeout(STARTING):
            while not await self.ready():
                await self.check_health()
                await asyncio.sleep(CHECK)

    async def ready(self) -> bool:
        try:
            async with self.http.get(f"{self.url}/ready") as response:
                return bool(response.status == 200)
        except aiohttp.ClientError:
            return False

    async def where(self) -> str:
        return self.url

    async def check_health(self) -> None:
        """Ray calls this, and replaces a replica in which it raises."""
        if self.process.returncode is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")

    async def __del__(self) -> None:
        """Ray calls this once no request should come: answers in flight are finished."""
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), GRACE + STOPPING)
        except TimeoutError:
            self.process.kill()


@serve.deployment(ray_actor_options={"num_cpus": 0}, **DEFAULTS)
@serve.ingress()
class Front:
    """The router in front of all engines."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines
        self.urls: list[str] = []  # of the engines, when Ray last named them

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self.find)

    async def find(self) -> Collection[str]:
        """The addresses of all engines. Ray raises while the first ones start, and on a machine
        that is busy: the router's health checks judge those that were known."""
        with contextlib.suppress(TimeoutError, RayError, RayServeException):
            response = self.engines.broadcast("where")
            urls = await response.results_async(timeout_s=LISTED, return_exceptions=True)
            self.urls = [url for url in urls if isinstance(url, str)]
        return self.urls


def address() -> str:
    """The address of this node for the others; HOST has it where there are no others."""
    return os.environ.get(HOST) or str(ray.util.get_node_ip_address())


def build(arguments: dict[str, Any]) -> Any:
    """The application, for `serve.yaml` too. replicas: servers; engine: their options."""
    options = ["--grace", str(GRACE), *arguments.get("engine", [])]
    engine: Any = Engine  # Ray made deployments of both classes
    front: Any = Front
    return front.bind(engine.options(num_replicas=arguments.get("replicas", 2)).bind(options))


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage12_distributed serve",
        "Starts Ray on this machine and, on Ray, servers of stage 06 behind the router.",
        "  python -m stage12_distributed serve --replicas 2 -- --max-num-seqs 8\n"
        "  python -m stage12_distributed serve --update -- --max-num-seqs 16\n"
        "  serve deploy stage12_distributed/serve.yaml     the same on your own cluster",
    )
    port, count = cli.whole_number(1, 65_535), cli.whole_number(1, 64)
    about = "servers to start"
    parser.add_argument("--replicas", type=count, default=2, metavar="N", help=about)
    parser.add_argument("--port", type=port, default=8000, metavar="N", help="port to listen on")
    about = "replace the servers of a `serve` that runs here, one by one, and return"
    parser.add_argument("--update", action="store_true", help=about)
    about = "options of each server, none by default"
    parser.add_argument("server", nargs="*", metavar="-- OPTION", help=about)
    options = parser.parse_args(argv)
    os.environ[HOST] = "127.0.0.1"  # Ray's processes inherit it
    engine = ["--threads", "1", *options.server]
    settings = {"replicas": options.replicas, "engine": engine}
    if options.update:
        ray.init(address="auto")
        serve.run(build(settings), name=NAME)
        return 0
    try:  # in an update, each server has a successor for a while
        ray.init(num_cpus=2 * options.replicas, include_dashboard=False, object_store_memory=MEMORY)
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        serve.run(build(settings), name=NAME)
        print(f"Staircase serves on Ray at http://127.0.0.1:{options.port}", flush=True)
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0
