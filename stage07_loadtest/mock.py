"""A server of known latencies, to check the load test with.

    python -m stage07_loadtest.mock --ttft 0.1 --itl 0.02

It implements as much of OpenAI's API as a load test needs and has no model: the text is noise, and
each token's time is fixed when its request gets a slot. It can fail in every way that servers do,
and freeze periodically. Its counters at /metrics are exact. It does not replace a model in tests of
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shared import cli
from shared.errors import UserError
from shared.server import READY, own_server

MODEL = "mock"
FAULTS = {
    "500": "status 500",
    "503": "status 503",
    "504": "status 504",
    "reset": "the connection is lost in the middle",
    "hang": "silence from the middle on, until the client leaves",
    "cut": "the stream ends in the middle as if complete",
    "no_finish": "all tokens, but no finish reason",
    "no_done": "all tokens, but no [DONE]",
    "error_event": "an error inside the stream",
    "garbage": "an event that is not JSON",
    "wrong_count": "one token fewer than requested",
    "no_usage": "no token count at the end",
    "wrong_counter": "/metrics counts a token that was never sent",
    "leak": "the blocks are never released",
}
IN_THE_MIDDLE = ("reset", "hang", "cut", "error_event", "garbage")
STATUSES = {"500": "an error", "503": "no room", "504": "too late"}
CACHE_TOKENS = 2**16  # capacity of the imaginary cache; never enforced
REMEMBERED = 1000  # request bodies kept
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Behaviour:
    """How the server answers; times in seconds. Raises UserError for contradictory settings."""

    ttft: float = 0.1  # from a request's slot to its first token
    itl: float = 0.02  # from each token to the next
    max_num_seqs: int | None = None  # answers that run at a time, the rest queue; None: no limit
    chunk_tokens: int = 1  # tokens in one event, sent when the last of them is due
    stall: float = 0.0  # of each freeze
    stall_every: float = 0.0  # between freezes; the first is that long after the 1st request
    fault: str | None = None  # one of FAULTS
    fault_every: int = 1  # every n-th request has the fault
    api_key: str | None = None  # that clients must send

    def __post_init__(self) -> None:
        if (self.stall or self.stall_every) and not 0 < self.stall < self.stall_every:
            raise UserError(
                "A stall needs a length and a longer period: give --stall and --stall-every."
            )

    def due(self, start: float, work: float) -> float:
        """When `work` seconds of work that began at `start` are done, both in seconds since the
        first request. A frozen server does no work, so each freeze on the way delays the end."""
        if not self.stall:
            return start + work
        number = max(1, int(start // self.stall_every))  # current, last or next freeze
        while True:
            begins = number * self.stall_every
            if start + work <= begins:
                return start + work
            ends = begins + self.stall
            if start < ends:
                work -= max(0.0, begins - start)
                start = ends
            number += 1


class Mock:
    """The server's state and its endpoints."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.url = ""  # set once it listens
        self.bodies: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)  # of requests, in order
        self.requests = self.running = self.waiting = 0
        self.most_running = self.most_waiting = 0  # at the same time
        self.held = 0  # tokens in the imaginary cache
        self.prompt_tokens = self.generated = self.ended = 0  # since the start
        self.first: float | None = None  # the loop's time at the first request
        self._slots = asyncio.Semaphore(behaviour.max_num_seqs or sys.maxsize)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24, middlewares=[self._authorized])
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key, sent = self.behaviour.api_key, request.headers.get("Authorization")
        if key is not None and request.path != "/health" and sent != f"Bearer {key}":
            message = "The key is missing or wrong: send it as Authorization: Bearer KEY."
            return web.json_response(error(401, message), status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

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
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE vllm:{name} {kind}\n")
            lines.append(f'vllm:{name}{{model_name="{MODEL}"}} {float(value)}\n')
        return web.Response(text="".join(lines))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("prompt") or body.get("max_tokens", 1) < 1:
            message = "The body must have a non-empty prompt, and max_tokens above 0."
            return web.json_response(error(400, message), status=400)
        if self.first is None:
            self.first = asyncio.get_running_loop().time()
        self.bodies.append(body)
        self.requests += 1
        fault = self.behaviour.fault if self.requests % self.behaviour.fault_every == 0 else None
        if fault in STATUSES:
            status, message = int(fault), f"A planted fault: {STATUSES[fault]}."
            headers = {"Retry-After": "1"} if status == 503 else None
            return web.json_response(error(status, message), status=status, headers=headers)
        waits = self._slots.locked()
        self.waiting += waits
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= waits
        prompt, most = body["prompt"], body.get("max_tokens", 16)
        size = len(prompt if isinstance(prompt, list) else prompt.encode())
        # As a model does, end early unless the end-of-text token is ignored.
        count = most if body.get("ignore_eos") is True else (most + 1) // 2
        held, reason = size + count, "length" if count == most else "stop"
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.held += held
        self.prompt_tokens += size
        answer = Answer(f"cmpl-{self.requests}", size, count - (fault == "wrong_count"), reason)
        try:  # the counts stay right however the answer ends
            return await self._answer(request, body, answer, fault)
        finally:
            self._slots.release()
            self.running -= 1
            self.ended += 1
            if fault != "leak":
                self.held -= held

    async def _answer(
        self, request: web.Request, body: dict[str, Any], answer: Answer, fault: str | None
    ) -> web.StreamResponse:
        count, sent, streams = answer.count, 0, body.get("stream")
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=kind)
        if streams:
            await response.prepare(request)
        async for tokens in self.paced(count):
            last = sent + tokens == count
            if streams and fault in IN_THE_MIDDLE and (sent >= count // 2 or last):
                return await break_off(request, response, fault)
            reason = answer.reason if last and fault != "no_finish" else None
            choice = {"index": 0, "text": " noise" * tokens, "finish_reason": reason}
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(sent, sent + tokens))
            sent += tokens
            self.generated += tokens + (last and fault == "wrong_counter")
            if streams:
                await response.write(event(answer.body([choice])))
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": sent}
        usage["total_tokens"] = answer.prompt_tokens + sent
        if not streams:
            choice = {"index": 0, "text": " noise" * sent, "finish_reason": answer.reason}
            return web.json_response(answer.body([choice], usage=usage))
        if (body.get("stream_options") or {}).get("include_usage") and fault != "no_usage":
            await response.write(event(answer.body([], usage=usage)))
        if fault != "no_done":
            await response.write(DONE)
        await response.write_eof()
        return response

    async def paced(self, count: int) -> AsyncIterator[int]:
        """Yield the number of tokens of each chunk of an answer when it is due.

        All moments are computed from the start: a late chunk does not delay the next ones.
        """
        loop = asyncio.get_running_loop()
        assert self.first is not None
        start = loop.time() - self.first
        for done in range(0, count, self.behaviour.chunk_tokens):
            tokens = min(self.behaviour.chunk_tokens, count - done)
            work = self.behaviour.ttft + (done + tokens - 1) * self.behaviour.itl
            due = self.first + self.behaviour.due(start, work)
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield tokens


@dataclass(frozen=True)
class Answer:
    """What a request gets, if nothing goes wrong."""

    id: str
    prompt_tokens: int
    count: int  # tokens
    reason: str  # why it ends

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        fields = {"id": self.id, "object": "text_completion", "created": 0, "model": MODEL}
        return fields | {"choices": choices} | more


async def break_off(
    request: web.Request, response: web.StreamResponse, fault: str
) -> web.StreamResponse:
    """End a stream as `fault` says."""
    if fault == "hang":
        await asyncio.Event().wait()  # the handler is cancelled when the client leaves
    elif fault == "reset":
        assert request.transport is not None
        # Closing without lingering sends a reset instead of an orderly end.
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.transport.abort()
        return response
    elif fault == "error_event":
        await response.write(event(error(500, "A planted fault: an error in the middle.")) + DONE)
    elif fault == "garbage":
        await response.write(b"data: {this is not JSON\n\n" + DONE)
    await response.write_eof()
    return response


def error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "MockError", "param": None, "code": status}}


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


@contextlib.asynccontextmanager
async def serving(
    behaviour: Behaviour | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Mock]:
    """Serve the mock in this process inside the block. Raises UserError if the port cannot be
    opened.

    It shares the event loop with the caller: exact times need `process` instead.
    """
    mock = Mock(behaviour or Behaviour())
    try:
        listening = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise UserError(
            f"Port {port} on {host} cannot be opened ({why}): choose another --port, or stop the "
            "program that uses it."
        ) from None
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
    """Run the mock as a separate process on a free port inside the block; yields its address.
    Raises UserError if it does not start."""
    with own_server(arguments, quiet=True, module=__spec__.name) as server:
        yield server.url


def parser() -> cli.Parser:
    parser = cli.Parser(
        "stage07_loadtest.mock",
        "A server without a model, with known latencies, to check a load test against.",
        "  python -m stage07_loadtest.mock --ttft 0.1 --itl 0.02 --max-num-seqs 4\n"
        "  python -m stage07_loadtest.mock --stall 1 --stall-every 5\n"
        "  python -m stage07_loadtest.mock --fault cut --fault-every 10",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    seconds, many = cli.number(0, 86_400), cli.whole_number(1, 100_000)
    for name, kind, default, about in (
        ("port", cli.whole_number(0, 65_535), 8000, "port to listen on; 0 takes a free one"),
        ("api_key", str, None, "key that clients must send; default: none"),
        ("ttft", seconds, Behaviour.ttft, "seconds to the first token"),
        ("itl", seconds, Behaviour.itl, "seconds between tokens"),
        ("max_num_seqs", many, None, "requests that run at a time; default: no limit"),
        ("chunk_tokens", many, Behaviour.chunk_tokens, "tokens in one event"),
        ("stall", seconds, Behaviour.stall, "seconds of each freeze"),
        ("stall_every", seconds, Behaviour.stall_every, "seconds from one freeze to the next"),
        ("fault_every", many, Behaviour.fault_every, "every N-th request has the fault"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=default, metavar="N", help=about)
    faults = "; ".join(f"{name}: {about}" for name, about in FAULTS.items())
    parser.add_argument("--fault", choices=FAULTS, help=faults)
    return parser


async def serve(behaviour: Behaviour, host: str, port: int) -> None:
    """Serve until the program is stopped."""
    async with serving(behaviour, host, port) as mock:
        print(f"{READY}{MODEL} at {mock.url}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    options = vars(parser().parse_args(argv))
    host, port = options.pop("host"), options.pop("port")
    asyncio.run(serve(Behaviour(**options), host, port))
    return 0


if __name__ == "__main__":
    cli.run(main)
