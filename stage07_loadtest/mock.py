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
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from shared import cli, paths
from shared.errors import UserError

MODEL = "mock"
FAULTS = {
    "refused": "no process listens at the address",
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


@dataclass(frozen=True)
class Behaviour:
    """How the server answers. Raises UserError for contradictory settings."""

    ttft: float = 0.1  # seconds from a request's slot to its first token
    itl: float = 0.02  # seconds from each token to the next
    max_num_seqs: int | None = None  # answers that run at a time, the rest queue; None: no limit
    chunk_tokens: int = 1  # tokens in one event, sent when the last of them is due
    stall: float = 0.0  # seconds of each freeze
    stall_every: float = (
        0.0  # seconds between freezes; the first is that long after the 1st request
    )
    fault: str | None = None  # one of FAULTS
    fault_every: int = 1  # every n-th request has the fault
    api_key: str | None = None  # that clients must send

    def __post_init__(self) -> None:
        if (self.stall > 0) != (self.stall_every > 0) or self.stall < 0:
            raise UserError(
                "A stall needs a length and a period: give --stall and --stall-every, both above 0."
            )
        if self.stall and self.stall >= self.stall_every:
            raise UserError(
                "The server would stay frozen: make --stall shorter than --stall-every."
            )
        if self.fault is not None and self.fault not in FAULTS:
            raise UserError(f"Unknown fault '{self.fault}': choose one of {', '.join(FAULTS)}.")
        if self.fault == "refused" and self.fault_every != 1:
            raise UserError("--fault refused affects all requests: leave --fault-every out.")

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


@dataclass
class Answer:
    """One request while it is being answered."""

    id: str
    prompt_tokens: int
    count: int  # tokens of the complete answer
    fault: str | None
    finish_reason: str
    created: int = field(default_factory=lambda: int(time.time()))
    sent: int = 0

    @property
    def middle(self) -> int:
        """The number of tokens after which a fault IN_THE_MIDDLE occurs."""
        return self.count // 2

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sent,
            "total_tokens": self.prompt_tokens + self.sent,
        }

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": MODEL,
            "choices": choices,
            **more,
        }


class Mock:
    """The server's state and its endpoints."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.url = ""  # set once it listens
        self.bodies: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)  # of requests, in order
        self.requests = self.running = self.waiting = 0
        self.most_running = self.most_waiting = 0  # at the same time
        self.held = 0  # tokens in the imaginary cache
        self.first: float | None = None  # the loop's time at the first request
        self._slots = asyncio.Semaphore(behaviour.max_num_seqs or sys.maxsize)
        self.registry = CollectorRegistry()
        self._running, self._waiting, self._cache = (
            Gauge(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(MODEL)
            for name, about in (
                ("num_requests_running", "Running requests."),
                ("num_requests_waiting", "Waiting requests."),
                ("kv_cache_usage_perc", "Share of the cache that is owned, from 0 to 1."),
            )
        )
        self._prompt_tokens, self._generated = (
            Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(MODEL)
            for name, about in (
                ("prompt_tokens", "Tokens of prompts."),
                ("generation_tokens", "Tokens of answers."),
            )
        )
        self._ended = Counter(
            "vllm:request_success",
            "Answers that ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(MODEL, reason)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        self._authorize(request)
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}],
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        self._authorize(request)
        self._running.set(self.running)
        self._waiting.set(self.waiting)
        self._cache.set(self.held / CACHE_TOKENS)
        return web.Response(body=generate_latest(self.registry), content_type="text/plain")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._authorize(request)
        try:
            body = await request.json()
            prompt, most = body["prompt"], body.get("max_tokens", 16)
            if not (
                isinstance(prompt, str | list) and prompt and isinstance(most, int) and most > 0
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            _refuse(400, "The body must be JSON with a non-empty prompt and max_tokens above 0.")
        if self.first is None:
            self.first = asyncio.get_running_loop().time()
        self.bodies.append(body)
        self.requests += 1
        fault = self.behaviour.fault if self.requests % self.behaviour.fault_every == 0 else None
        if fault in STATUSES:
            _refuse(int(fault), f"A planted fault: {STATUSES[fault]}.")
        # As a model does, end early unless the end-of-text token is ignored.
        count = most if body.get("ignore_eos") is True else (most + 1) // 2
        answer = Answer(
            id=f"cmpl-{self.requests}",
            prompt_tokens=len(prompt if isinstance(prompt, list) else prompt.encode()),
            count=count - (fault == "wrong_count"),
            fault=fault,
            finish_reason="length" if count == most else "stop",
        )
        waits = self._slots.locked()
        self.waiting += waits
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= waits
        try:
            return await self._answer(request, body, answer)
        finally:
            self._slots.release()

    async def _answer(
        self, request: web.Request, body: dict[str, Any], answer: Answer
    ) -> web.StreamResponse:
        """Answer in a slot; the counts stay right however the answer ends."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        held = answer.prompt_tokens + answer.count
        self.held += held
        self._prompt_tokens.inc(answer.prompt_tokens)
        reason = "abort"  # unless it reaches its end
        try:
            if body.get("stream"):
                response = await self._stream(request, body, answer)
            else:
                response = await self._whole(answer)
            reason = "error" if answer.fault in IN_THE_MIDDLE else answer.finish_reason
            return response
        finally:
            self.running -= 1
            if answer.fault != "leak":
                self.held -= held
            self._ended.labels(MODEL, reason).inc()

    async def _whole(self, answer: Answer) -> web.Response:
        async for tokens in self._paced(answer):
            self._count(answer, tokens)
        choice = {
            "index": 0,
            "text": " noise" * answer.sent,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        return web.json_response(answer.body([choice], usage=answer.usage))

    async def _stream(
        self, request: web.Request, body: dict[str, Any], answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(request)
        async for tokens in self._paced(answer):
            last = answer.sent + tokens == answer.count
            if answer.fault in IN_THE_MIDDLE and (answer.sent >= answer.middle or last):
                await self._break(request, response, answer.fault)
                return response
            choice: dict[str, Any] = {
                "index": 0,
                "text": " noise" * tokens,
                "logprobs": None,
                "finish_reason": None,
            }
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(answer.sent, answer.sent + tokens))
            if last and answer.fault != "no_finish":
                choice["finish_reason"] = answer.finish_reason
            self._count(answer, tokens)
            await response.write(_event(answer.body([choice])))
        if (body.get("stream_options") or {}).get("include_usage") and answer.fault != "no_usage":
            await response.write(_event(answer.body([], usage=answer.usage)))
        if answer.fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _paced(self, answer: Answer) -> AsyncIterator[int]:
        """Yield the number of tokens of each chunk when it is due.

        All moments are computed from the start: a late chunk does not delay the next ones.
        """
        loop = asyncio.get_running_loop()
        assert self.first is not None
        start = loop.time() - self.first
        for done in range(0, answer.count, self.behaviour.chunk_tokens):
            tokens = min(self.behaviour.chunk_tokens, answer.count - done)
            work = self.behaviour.ttft + (done + tokens - 1) * self.behaviour.itl
            due = self.first + self.behaviour.due(start, work)
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield tokens

    def _count(self, answer: Answer, tokens: int) -> None:
        answer.sent += tokens
        more = answer.fault == "wrong_counter" and answer.sent == answer.count
        self._generated.inc(tokens + more)

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> None:
        """End the stream as `fault` says."""
        if fault == "hang":
            await asyncio.Event().wait()  # the handler is cancelled when the client leaves
        elif fault == "reset":
            assert request.transport is not None
            # Closing without lingering sends a reset instead of an orderly end.
            linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
            request.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
            request.transport.abort()
            return
        elif fault == "error_event":
            await response.write(
                _event(_error(500, "A planted fault: an error in the middle."))
                + b"data: [DONE]\n\n"
            )
        elif fault == "garbage":
            await response.write(b"data: {this is not JSON\n\ndata: [DONE]\n\n")
        await response.write_eof()

    def _authorize(self, request: web.Request) -> None:
        key = self.behaviour.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            _refuse(401, "The key is missing or wrong: send it as Authorization: Bearer KEY.")


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "MockError", "param": None, "code": status}}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _refuse(status: int, message: str) -> NoReturn:
    """End a request with an error before its stream has begun."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        500: web.HTTPInternalServerError,
        503: web.HTTPServiceUnavailable,
        504: web.HTTPGatewayTimeout,
    }
    headers = {"Retry-After": "1"} if status == 503 else None
    raise kinds[status](
        text=json.dumps(_error(status, message)), content_type="application/json", headers=headers
    )


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
            f"Port {port} on {host} cannot be opened ({why}): "
            "choose another --port, or stop the program that uses it."
        ) from None
    mock.url = "http://{}:{}".format(*listening.getsockname()[:2])
    if mock.behaviour.fault == "refused":
        # Bind the port without listening: another program could take a free one.
        listening.close()
        with socket.socket() as taken:
            taken.bind((host, int(mock.url.rsplit(":", 1)[1])))
            yield mock
        return
    runner = web.AppRunner(
        mock.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        yield mock
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Run the mock as a separate process on a free port inside the block; yields its address.

    Raises RuntimeError with the program's output if it does not start.
    """
    command = [sys.executable, "-m", __spec__.name, "--port", "0", *arguments]
    with subprocess.Popen(
        command, cwd=paths.ROOT, stderr=subprocess.PIPE, encoding="utf-8"
    ) as program:
        assert program.stderr is not None
        try:
            first = program.stderr.readline()
            if " at http://" not in first:
                raise RuntimeError(f"The mock did not start: {first}{program.stderr.read()}")
            yield first.split()[-1]
        finally:
            program.kill()


def parser() -> cli.Parser:
    parser = cli.Parser(
        "stage07_loadtest.mock",
        "A server without a model, with known latencies, to check a load test against.",
        "  python -m stage07_loadtest.mock --ttft 0.1 --itl 0.02\n"
        "  python -m stage07_loadtest.mock --max-num-seqs 4              "
        "four requests at a time, the rest queue\n"
        "  python -m stage07_loadtest.mock --stall 1 --stall-every 5     "
        "frozen for one second of five\n"
        "  python -m stage07_loadtest.mock --fault cut --fault-every 10  "
        "every tenth answer ends in the middle",
    )
    seconds, many = cli.number(0, 86_400), cli.whole_number(1, 100_000)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port",
        type=cli.whole_number(0, 65_535),
        default=8000,
        help="port to listen on; 0 takes a free one",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key that clients must send; default: none"
    )
    group = parser.add_argument_group("behaviour")
    group.add_argument(
        "--ttft", type=seconds, default=0.1, metavar="S", help="seconds to the first token"
    )
    group.add_argument(
        "--itl", type=seconds, default=0.02, metavar="S", help="seconds between tokens"
    )
    group.add_argument(
        "--max-num-seqs",
        type=many,
        metavar="N",
        help="requests that run at a time; default: no limit",
    )
    group.add_argument(
        "--chunk-tokens", type=many, default=1, metavar="N", help="tokens in one event"
    )
    group.add_argument(
        "--stall", type=seconds, default=0.0, metavar="S", help="seconds of each freeze"
    )
    group.add_argument(
        "--stall-every",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds from one freeze to the next",
    )
    group.add_argument(
        "--fault",
        choices=FAULTS,
        help="; ".join(f"{name}: {about}" for name, about in FAULTS.items()),
    )
    group.add_argument(
        "--fault-every",
        type=many,
        default=1,
        metavar="N",
        help="every N-th request has the fault; default: all",
    )
    return parser


async def serve(behaviour: Behaviour, host: str, port: int) -> None:
    """Serve until the program is stopped."""
    async with serving(behaviour, host, port) as mock:
        print(f"The mock serves {MODEL} at {mock.url}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    options = vars(parser().parse_args(argv))
    host, port = options.pop("host"), options.pop("port")
    asyncio.run(serve(Behaviour(**options), host, port))
    return 0


if __name__ == "__main__":
    cli.run(main)
