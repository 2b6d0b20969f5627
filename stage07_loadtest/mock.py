"""A server of known latencies, to check the load test with.

    python -m stage07_loadtest.mock --ttft 0.1 --itl 0.02

It has no model: the text is noise, and each token's time is fixed when its request gets a slot. It
can fail as servers do, and freeze periodically. Its counters at /metrics are exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shared import cli
from shared.errors import UserError
from shared.server import READY, own_server

MODEL = "mock"


@dataclass(frozen=True)
class Behaviour:
    """How the server answers; times in seconds."""

    ttft: float = 0.1  # from a request's slot to its first token
    itl: float = 0.02  # from each token to the next
    max_num_seqs: int = 100_000  # answers that run at a time, the rest queue
    stall: float = 0.0  # of each freeze
    stall_every: float = 0.0  # from freeze to freeze, the first after that time
    fault: int | None = None  # the HTTP status of requests that fail
    fault_every: int = 1  # every n-th fails

    def __post_init__(self) -> None:
        if self.stall and self.stall >= self.stall_every:
            raise UserError(f"A freeze of {self.stall:g} s needs a longer --stall-every.")

    def due(self, start: float, work: float) -> float:
        """When `work` seconds of work that began at `start` are done, both in seconds since the
        first request. A frozen server does no work, so each freeze on the way delays the end."""
        if not self.stall:
            return start + work
        number = max(1, int(start // self.stall_every))  # current, last or next freeze
        while start + work > number * self.stall_every:
            begins = number * self.stall_every
            if start < begins + self.stall:
                work -= max(0.0, begins - start)
                start = begins + self.stall
            number += 1
        return start + work


class Mock:
    """The server's state and its endpoints."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.url = behaviour, ""  # the address is known once it listens
        self.bodies: list[dict[str, Any]] = []  # of requests, in order
        self.running = self.waiting = self.most_running = 0
        self.generated = self.ended = 0  # tokens and requests, since the start
        self.first: float | None = None  # the loop's time at the first request
        self._slots = asyncio.Semaphore(behaviour.max_num_seqs)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        """In Prometheus' format, under vLLM's names."""
        values: dict[str, float] = {"num_requests_running": self.running}
        values["num_requests_waiting"] = self.waiting
        values["kv_cache_usage_perc"] = self.running / self.behaviour.max_num_seqs
        values |= {"generation_tokens_total": self.generated, "request_success_total": self.ended}
        return web.Response(text="".join(f"vllm:{key} {values[key]}\n" for key in values))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body, behaviour = await request.json(), self.behaviour
        self.first = self.first or asyncio.get_running_loop().time()
        self.bodies.append(body)
        if behaviour.fault and len(self.bodies) % behaviour.fault_every == 0:
            error = {"error": {"message": "A planted fault."}}
            return web.json_response(error, status=behaviour.fault)
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:  # the counts stay right however the answer ends
            return await self._answer(request, body)
        finally:
            self._slots.release()
            self.running -= 1
            self.ended += 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        count = body["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for sent in self.paced(count):
            self.generated += 1
            choice: dict[str, Any] = {"index": 0, "text": " noise", "token_ids": [sent]}
            choice["finish_reason"] = "length" if sent == count else None
            await response.write(event({"choices": [choice]}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def paced(self, count: int) -> AsyncIterator[int]:
        """Yield the number of each token of an answer, from 1 on, when it is due.

        All moments are computed from the start: a late token does not delay the next ones.
        """
        loop, first = asyncio.get_running_loop(), self.first or 0.0
        start = loop.time() - first
        for earlier in range(count):
            work = self.behaviour.ttft + earlier * self.behaviour.itl
            due = first + self.behaviour.due(start, work)
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield earlier + 1


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour, port: int = 0) -> AsyncIterator[Mock]:
    """Serve the mock in this process inside the block. It shares the event loop with the caller:
    exact times need a process instead."""
    mock, app = Mock(behaviour), web.Application(client_max_size=2**24)
    app.router.add_get("/metrics", mock.metrics)
    app.router.add_get("/v1/models", mock.models)
    app.router.add_post("/v1/completions", mock.completions)
    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    mock.url = "http://{}:{}".format(*listening.getsockname()[:2])
    options: dict[str, Any] = {"handler_cancellation": True, "access_log": None}
    runner = web.AppRunner(app, **options, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        yield mock
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """The mock in a process of its own, inside the block; yields its address."""
    with own_server(arguments, quiet=True, module=__spec__.name) as server:
        yield server.url


async def serve(port: int, **behaviour: Any) -> None:
    """Serve until the program is stopped."""
    async with serving(Behaviour(**behaviour), port) as mock:
        print(f"{READY}{MODEL} at {mock.url}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    about = "A server without a model, with known latencies, to check a load test against."
    example = "  python -m stage07_loadtest.mock --ttft 0.1 --itl 0.02 --stall 1 --stall-every 5"
    parser, seconds = cli.Parser("stage07_loadtest.mock", about, example), cli.number(0, 86_400)
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    parser.add_argument(
        "--max-num-seqs", type=cli.whole_number(1, 100_000), default=Behaviour.max_num_seqs,
        help="answers at a time",
    )  # fmt: skip
    for name, what in (
        ("ttft", "to the first token"), ("itl", "between tokens"), ("stall", "of each freeze"),
        ("stall-every", "from one freeze to the next"),
    ):  # fmt: skip
        default = getattr(Behaviour, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=seconds, default=default, help=f"seconds {what}")
    asyncio.run(serve(**vars(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    cli.run(main)
