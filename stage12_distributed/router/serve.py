"""The same replicas on Ray: `python -m stage12_distributed serve`, or on your cluster
`serve deploy stage12_distributed/serve.yaml`.

Ray places the servers, restarts them, replaces them in an update, and runs more of them under load.
As in the router, `routing.py` decides which server gets a request, and answers come by plain HTTP.
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
from shared.server import STOPPING
from stage06_serving import logs
from stage06_serving.__main__ import Server, configure, listen
from stage06_serving.settings import parse

from .app import create_app
from .client import session, whole
from .metrics import LARGEST, total
from .process import close, launch
from .replicas import Options

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is loaded: it reports by default
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
GRACE = 45.0  # seconds for answers in flight when a server is replaced or no longer needed
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")
DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 4096,  # the servers have queues; Ray's 5 would leave batches empty
    "graceful_shutdown_timeout_s": 75.0,  # longer than GRACE; Ray's 20 would cut answers off
    "health_check_period_s": 1.0,  # Ray's 10, three times, would be half a minute
    "health_check_timeout_s": 10.0,
}
SCALING: dict[str, Any] = {  # of Ray's autoscaling; "scaling" of `build` comes before these
    "target_ongoing_requests": 8,  # in flight at each server; Ray's 2 would leave batches empty
    "upscale_delay_s": 10.0,  # Ray's 30 would come after a mean over 30 s
    "policy": {"policy_function": f"{__name__}:scale"},
}


def scale(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray's autoscaling policy: how many servers to run for the requests that they report in
    flight. By default Ray counts the requests that pass through it, and here none do."""
    flights = context.aggregated_metrics.get("in_flight")
    if not flights:  # none has reported yet
        return context.target_num_replicas, {}
    return sum(flights.values()) / context.config.target_ongoing_requests, {}


@serve.deployment(max_surge_percent=100, ray_actor_options={"num_cpus": 1}, **DEFAULTS)
class Engine:
    """A server of stage 06, in a process that ends with this one. An update starts the new server
    first; without the surge, Ray would first remove an old one."""

    async def __init__(self, arguments: list[str]) -> None:  # type: ignore[misc]
        options = ["--grace", str(GRACE), *arguments]
        self.process, self.showing, url = await launch("engine", options, address())
        self.url = await url

    async def where(self) -> str:
        return self.url

    async def check_health(self) -> None:
        """Ray calls this, and replaces a replica in which it raises."""
        if self.process.returncode is not None:
            raise RuntimeError(f"the server ended with status {self.process.returncode}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray calls this, for `scale`."""
        key = {"Authorization": f"Bearer {next(iter(parse([]).keys), '')}"}
        async with session() as client, client.get(f"{self.url}/metrics", headers=key) as answer:
            page = (await whole(answer, LARGEST)).decode()
        return {"in_flight": total(page, *IN_FLIGHT)}

    async def __del__(self) -> None:
        await close(self.process, GRACE + STOPPING)


@serve.deployment(ray_actor_options={"num_cpus": 0}, **DEFAULTS)
@serve.ingress()
class Front:
    """The router in front of all engines. port: of its own, on its node; 0 for none."""

    def __init__(self, engines: Any, hosts: list[str], port: int) -> None:
        self.engines, self.port = engines, port
        logs.start(False)
        keys = tuple(parse([]).keys)
        options = Options(find=self.find, hosts=tuple(hosts), keys=keys, grace=GRACE)
        self.router = create_app(options)

    def __serve_build_asgi_app__(self) -> Any:
        return self.router

    async def find(self) -> Collection[str]:
        """The addresses of all engines. The first call, in the lifespan that Ray runs, also opens
        our own port."""
        if self.port:
            self.serving = asyncio.create_task(self.serve(self.port))
            self.port = 0
        response = self.engines.broadcast("where")
        urls = await response.results_async(timeout_s=LISTED, return_exceptions=True)
        return [url for url in urls if isinstance(url, str)]

    async def serve(self, port: int) -> None:
        config = configure(self.router)
        config.lifespan = "off"  # Ray runs it
        server = Server(config, self.router, GRACE, lambda: None)
        await server.serve([listen(address(), port)])


def address() -> str:
    """The address of this node for the others; HOST has it where there are no others."""
    return os.environ.get(HOST) or str(ray.util.get_node_ip_address())


def build(arguments: dict[str, Any]) -> Any:
    """The application, for `serve.yaml` too. replicas: servers; scaling: Ray's autoscaling_config,
    with a "max_replicas" above `replicas`; engine: the servers' options; hosts: names that a Host
    header may have; port: of the front, past Ray's proxy."""
    count = arguments.get("replicas", 2)
    scaling = {"min_replicas": count, "max_replicas": count, **SCALING}
    scaling |= arguments.get("scaling", {})
    engine: Any = Engine  # Ray made deployments of both classes
    front: Any = Front
    engines = engine.options(autoscaling_config=scaling).bind(arguments.get("engine", []))
    return front.bind(engines, arguments.get("hosts", []), arguments.get("port", 0))


def make_parser() -> cli.Parser:
    parser = cli.Parser(
        "stage12_distributed serve",
        "Starts Ray on this machine and, on Ray, servers of stage 06 behind the router.",
        "  python -m stage12_distributed serve --replicas 2 -- --max-num-seqs 8\n"
        "  python -m stage12_distributed serve --replicas 1 --max-replicas 4\n"
        "  serve deploy stage12_distributed/serve.yaml     the same on your own cluster",
    )
    ports, count = cli.whole_number(1, 65_535), cli.whole_number(1, 64)
    for option, kind, default, about in (
        ("--replicas", count, 2, "servers to start"),
        ("--port", ports, 8000, "port of the router itself, bypassing Ray's proxy"),
        ("--ray-port", ports, 8001, "port of Ray's proxy, in front of the router"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar="N", help=about)
    parser.add_argument(
        "--max-replicas",
        type=count,
        metavar="N",
        help="servers that may run under load, at most; default: as many as --replicas",
    )
    parser.add_argument(
        "server", nargs="*", metavar="-- OPTION", help="options of each server, none by default"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    parse(options.server)
    most = options.max_replicas or options.replicas
    if most < options.replicas:
        raise UserError("--max-replicas is less than --replicas: raise it.")
    try:
        start(options.replicas, options.port, options.ray_port, options.server, max_replicas=most)
        print(f"Staircase serves on Ray at http://127.0.0.1:{options.port}", flush=True)
        threading.Event().wait()
    finally:
        stop()
    return 0


def start(replicas: int, port: int, ray_port: int, arguments: list[str], **scaling: Any) -> None:
    """Start Ray for this machine alone, and the application on it. scaling: as for
    `build`."""
    os.environ[HOST] = "127.0.0.1"  # Ray's processes inherit it
    cpus = scaling.get("max_replicas", replicas)
    ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=MEMORY)
    serve.start(http_options={"host": "127.0.0.1", "port": ray_port})
    engine = ["--threads", "1", *arguments]
    settings = {"replicas": replicas, "scaling": scaling, "port": port, "engine": engine}
    serve.run(build(settings), name=NAME)


def stop() -> None:
    serve.shutdown()
    ray.shutdown()
