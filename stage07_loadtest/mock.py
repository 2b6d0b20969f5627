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
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shared import cli
from shared.server import READY, own_server

MODEL = "mock"
STATUSES = {"500": "an error", "503": "no room", "504": "too late"}
IN_THE_MIDDLE = ("reset", "hang", "cut", "error_event", "garbage")
FAULTS = (*STATUSES, *IN_THE_MIDDLE, "no_done", "wrong_count", "no_usage", "leak")
CACHE_TOKENS = 2**16  # capacity of the imaginary cache; never enforced
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Behaviour:
    """How the server answers; times in seconds."""

    ttft: float = 0.1  # from a request's slot to its first token
    itl: float = 0.02  # from each token to the next
    max_num_seqs: int = 100_000  # answers that run at a time, the rest queue
    chunk_tokens: int = 1  # tokens in one event, sent when the last of them is due
    stall: float = 0.0  # of each freeze
    stall_every: float = 0.0  # between freezes; the first is that long after the 1st request
    fault: str | None = None  # one of FAULTS
    fault_every: int = 1  # every n-th request has the fault

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
        self.behaviour = behaviour
        self.url = ""  # set once it listens
        self.bodies: deque[dict[str, Any]] = deque(maxlen=1000)  # of requests, in order
        self.requests = self.running = self.waiting = 0
        self.most_running = self.most_waiting = 0  # at the same time
        self.held = 0  # tokens in the imaginary cache
        self.prompt_tokens = self.generated = self.ended = 0  # since the start
        self.first: float | None = None  # the loop's time at the first request
        self._slots = asyncio.Semaphore(behaviour.max_num_seqs)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        """In Prometheus' format, under vLLM's names."""
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": self.held / CACHE_TOKENS,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated,
            "request_success_total": self.ended,
        }
        lines = [f'vllm:{name}{{model_name="{MODEL}"}} {float(values[name])}\n' for name in values]
        return web.Response(text="".join(lines))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.first is None:
            self.first = asyncio.get_running_loop().time()
        self.bodies.append(body)
        self.requests += 1
        fault = self.behaviour.fault if self.requests % self.behaviour.fault_every == 0 else None
        if fault in STATUSES:
            status, message = int(fault), f"A planted fault: {STATUSES[fault]}."
            return web.json_response({"error": {"message": message}}, status=status)
        waits = self._slots.locked()
        self.waiting += waits
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= waits
        size, count = len(body["prompt"]), body["max_tokens"]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.held += size + count
        self.prompt_tokens += size
        try:  # the counts stay right however the answer ends
            return await self._answer(request, body, count - (fault == "wrong_count"), fault)
        finally:
            self._slots.release()
            self.running -= 1
            self.ended += 1
            self.held -= 0 if fault == "leak" else size + count

    async def _answer(
        self, request: web.Request, body: dict[str, Any], count: int, fault: str | None
    ) -> web.StreamResponse:
        """A stream of `count` tokens."""
        sent, head = 0, {"id": f"cmpl-{self.requests}", "object": "text_completion", "model": MODEL}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for tokens in self.paced(count):
            last = sent + tokens == count
            if fault in IN_THE_MIDDLE and (sent >= count // 2 or last):
                return await break_off(request, response, fault)
            choice = {"index": 0, "text": " noise" * tokens, "token_ids": [*range(tokens)]}
            choice["finish_reason"] = "length" if last else None
            sent += tokens
            self.generated += tokens
            await response.write(event({**head, "created": 0, "choices": [choice]}))
        if fault != "no_usage":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sent}
            usage["total_tokens"] = sum(usage.values())
            await response.write(event({**head, "created": 0, "choices": [], "usage": usage}))
        if fault != "no_done":
            await response.write(DONE)
        await response.write_eof()
        return response

    async def paced(self, count: int) -> AsyncIterator[int]:
        """Yield the number of tokens of each chunk of an answer when it is due.

        All moments are computed from the start: a late chunk does not delay the next ones.
        """
        loop, first = asyncio.get_running_loop(), self.first or 0.0
        start = loop.time() - first
        for done in range(0, count, self.behaviour.chunk_tokens):
            tokens = min(self.behaviour.chunk_tokens, count - done)
            work = self.behaviour.ttft + (done + tokens - 1) * self.behaviour.itl
            due = first + self.behaviour.due(start, work)
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield tokens


async def break_off(
    request: web.Request, response: web.StreamResponse, fault: str
) -> web.StreamResponse:
    """End a stream as `fault` says."""
    if fault == "hang":
        await asyncio.Event().wait()  # the handler is cancelled when the client leaves
    if fault == "reset" and request.transport is not None:
        request.transport.abort()
        return response
    if fault == "error_event":
        message = "A planted fault: an error in the middle."
        await response.write(event({"error": {"message": message}}) + DONE)
    if fault == "garbage":
        await response.write(b"data: {this is not JSON\n\n" + DONE)
    await response.write_eof()
    return response


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour | None = None, port: int = 0) -> AsyncIterator[Mock]:
    """Serve the mock in this process inside the block. It shares the event loop with the caller:
    exact times need a process instead."""
    mock = Mock(behaviour or Behaviour())
    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    mock.url = "http://{}:{}".format(*listening.getsockname()[:2])
    options: dict[str, Any] = {"handler_cancellation": True, "access_log": None}
    runner = web.AppRunner(mock.app(), **options, shutdown_timeout=0.1)
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
    for name, what in (
        ("ttft", "to the first token"), ("itl", "between tokens"), ("stall", "of each freeze"),
        ("stall-every", "from one freeze to the next"),
    ):  # fmt: skip
        default = getattr(Behaviour, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=seconds, default=default, help=f"seconds {what}")
    parser.add_argument("--fault", choices=FAULTS, help="how every request fails; default: none")
    asyncio.run(serve(**vars(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    cli.run(main)
