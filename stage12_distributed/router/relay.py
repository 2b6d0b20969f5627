"""One request through the router: to a replica, perhaps to another one, and the answer back.

Whether a request may be repeated depends on what the client was shown. Until its first byte,
another replica may answer instead, once and within the request's one deadline: after a death, and
if the budget that all requests share allows, after status 503 or silence. A death needs no budget:
what was in flight there is in flight no more. Afterwards an answer that breaks off ends with an
error. The client gets an error that the request itself caused (4xx), and that of a replica (500):
the request may have caused it too, and a repeat would spread it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from stage06_serving.errors import ApiError, error_body

from .client import whole
from .replicas import POLL, Pool
from .routing import Replica, Route, Routing

BYTES = 4  # of text that count as a token: GPT-2's average
MOST_BLOCKS = 1024  # of a prompt that are hashed: 16,384 tokens
MOST_TOKENS = 4096  # that an answer is expected to have, whatever the client asks for
DEFAULT_TOKENS = 16  # of an answer, if the client does not ask
TRIES = 2  # replicas that see a request, at most
BUDGET = 0.1  # retries for each request, so that a failing fleet does not get twice the load
MOST_BUDGET = 10.0  # retries that may be saved up
LARGEST_ANSWER = 2**26  # bytes of an answer that is no stream
LARGEST_EVENT = 2**20  # bytes of one event of a stream
STALLED = 5.0  # seconds in which a client may still read its last event
DONE = b"data: [DONE]"
FAULT = b'data: {"error"'  # an event in place of tokens
ENDS = (b"\n\n", b"\r\n\r\n")  # of an event
# Headers to a replica.
SENT = ("authorization", "content-type", "accept", "traceparent", "tracestate", "via")
SHOWN = ("content-type", "cache-control", "retry-after", "x-should-retry", "x-accel-buffering")
AUTOMATIC = ("accept-encoding", "user-agent")  # headers that aiohttp would add
REPLICA = "x-replica"  # header of an answer: the replica that gave it
FULL = "No replica can take the request now: try again in a moment."
DIED = "The replica ended before it answered: try again."
CUT = "The replica ended in the middle of the answer: try again."
SILENT = "The replica has sent nothing for too long: try again."
LATE = "The answer took longer than the router allows: ask for fewer tokens."
CLOSING = "The router is shutting down: try again."
ALIEN = "The replica answered with something other than JSON: check the address of --backend."


@dataclass(frozen=True)
class ForwardedRequest:
    """A request, and what the policy needs to know about it.

    tokens: of all its prompts. answer: tokens that it may generate. whole: whether the answer is
        sent at its end, so that its first byte may be late.
    """

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    digests: Sequence[bytes] = ()
    tokens: int = 1
    answer: int = 0
    whole: bool = False


def read(scope: Scope, body: bytes, routing: Routing) -> ForwardedRequest:
    """The request of a scope. A body that cannot be read has no digests: a replica refuses it."""
    sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    headers = {name: sent[name] for name in SENT if name in sent}
    headers["x-request-id"] = scope["request_id"]
    path = (scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1").removesuffix("?")
    request = (scope["method"], path, body, headers)
    try:
        fields = json.loads(body)
        ids, tokens, answer = size(fields)
        salt = f"{headers.get('authorization', '')}\0{fields.get('model')}".encode()
        digests = routing.digests(ids[: MOST_BLOCKS * routing.block_size], salt)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return ForwardedRequest(*request)
    return ForwardedRequest(*request, digests, tokens, answer, not fields.get("stream"))


def size(fields: Any) -> tuple[Sequence[int], int, int]:
    """The first prompt's tokens, the number of tokens in all prompts, and that in the answers.

    Each BYTES bytes of text count as one token, which needs no model's tokenizer and finds the same
    prefixes: texts that begin alike have tokens that begin alike.
    """
    if "messages" in fields:
        prompts: Any = [json.dumps(fields["messages"])]
    else:
        prompts = fields.get("prompt") or fields.get("text") or ""
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
    rows = [tokens_of(prompt) for prompt in prompts]
    most = fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_TOKENS
    answer = min(MOST_TOKENS, max(0, int(most))) * len(rows) * max(1, int(fields.get("n") or 1))
    return rows[0], max(1, sum(map(len, rows))), min(MOST_TOKENS, answer)


def tokens_of(prompt: str | Sequence[int]) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    data = prompt.encode("utf-8", "replace")
    return array("I", data[: len(data) // BYTES * BYTES])


class Answer:
    """What the client has been sent so far. status: 0 before. replica: the last one that had the
    request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.complete = 0, False
        self.replica: Replica | None = None
        self.created = time.perf_counter()
        self.first = 0.0  # seconds from then to the first byte

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.created

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.first = status, self.seconds
        if self.replica:
            headers = {**headers, REPLICA: self.replica.name}
        listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": data})

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.end(body)

    async def fail(self, error: ApiError) -> None:
        """End with an error, as an answer of its own or as the last event of a stream."""
        body = json.dumps(error.body()).encode()
        if self.status:
            await self.end(b"data: " + body + b"\n\n" + DONE + b"\n\n")
        else:
            kind = {"content-type": "application/json"}
            await self.send_whole(error.status, kind | error.headers, body)


@dataclass
class Failed(Exception):
    """A try without an answer; nothing was shown. What the client gets if there is no other try.

    died: the replica has died, so that another try costs no budget.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    died: bool = False


def busy(message: str, status: int = 503, died: bool = False) -> Failed:
    """An error after which clients try again."""
    headers = {"content-type": "application/json", "retry-after": "1"}
    return Failed(status, headers, json.dumps(error_body(status, message)).encode(), died)


class Relay:
    """All requests. Stage 06's server takes this as its `engine`, and drains it at its end.

    timeout: seconds for a request, with all its tries.
    """

    def __init__(self, pool: Pool, timeout: float) -> None:
        self.pool, self.routing, self.timeout = pool, pool.routing, timeout
        self.listeners: list[Callable[[Answer], None]] = []  # called at the end of each answer
        self.draining = False
        self.budget = MOST_BUDGET
        self.in_flight: set[asyncio.Timeout] = set()  # of the requests in flight
        self.counts: Counter[str] = Counter()  # for /metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application. If the client leaves, the replica loses its connection too."""
        body = await Request(scope, receive).body()
        answer, task, left = Answer(send), asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            if not answer.complete:
                left = True
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            await self._serve(read(scope, body, self.routing), answer)
        except asyncio.CancelledError:
            if not left:
                raise
            task.uncancel()
            self.counts["left"] += 1
        finally:
            watching.cancel()
            if answer.replica:
                scope["log"] = f" {answer.replica.name}"  # in the line of this request
            for listener in self.listeners:
                listener(answer)

    async def _serve(self, request: ForwardedRequest, answer: Answer) -> None:
        """Answer with what a replica sends, or with an error."""
        self.counts["requests"] += 1
        self.budget = min(MOST_BUDGET, self.budget + BUDGET)
        limit = asyncio.timeout(0 if self.draining else self.timeout)
        try:
            async with limit:
                self.in_flight.add(limit)
                await self._tries(request, answer)
        except TimeoutError:
            if answer.replica and not self.draining:
                self.pool.erred(answer.replica, "an answer took too long", 1.0)
            late = ApiError(504, LATE, headers={"x-should-retry": "false"})
            with contextlib.suppress(TimeoutError):  # a client that reads nothing
                async with asyncio.timeout(STALLED):
                    await answer.fail(ApiError(503, CLOSING) if self.draining else late)
        finally:
            self.in_flight.discard(limit)

    async def _tries(self, request: ForwardedRequest, answer: Answer) -> None:
        tried: list[Replica] = []
        failed = busy(FULL)
        while len(tried) < TRIES:
            price = 1.0 if tried and not failed.died else 0.0
            route = self.routing.choose(request.digests, request.tokens, request.answer, tried)
            if route is None or self.budget < price:
                break
            self.budget -= price
            self.counts["retries"] += bool(tried)
            tried.append(route.replica)
            self.routing.start(route)
            try:
                return await self._try(request, route, answer)
            except Failed as failure:
                failed = failure
            finally:
                self.routing.finish(route)
        await answer.send_whole(failed.status, failed.headers, failed.body)

    async def _try(self, request: ForwardedRequest, route: Route, answer: Answer) -> None:
        """Have one replica answer. Raises Failed if another one may try."""
        replica = answer.replica = route.replica
        silence = asyncio.timeout(None if request.whole else self.pool.options.first_byte)
        watching = asyncio.create_task(self._watch(replica, silence)) if request.whole else None
        sending = self.pool.session.request(
            request.method,
            URL(self.pool.backends[replica.name].url + request.path, encoded=True),
            data=request.body or None,
            headers={**request.headers, "via": f"{request.headers.get('via', '')} {self.pool.via}"},
            allow_redirects=False,
            skip_auto_headers=AUTOMATIC,
        )
        try:
            with self.pool.attempt(replica):
                async with silence, sending as response:
                    if watching:
                        watching.cancel()
                    await self._pass_on(response, replica, answer, silence)
        except (aiohttp.ClientError, OSError) as error:
            if late := silence.expired():
                self.pool.erred(replica, "it was silent for too long", 1.0)
            else:
                self.pool.failed(replica, error)
            status, message = (504, SILENT) if late else (503, CUT if answer.status else DIED)
            if not answer.status:
                if not late:
                    await self.pool.revival()
                raise busy(message, status, died=not late) from None
            self.counts["cut"] += 1
            await answer.fail(ApiError(status, message))
        else:
            self.counts["prompt_tokens"] += request.tokens
            self.counts["cached_tokens"] += route.cached
        finally:
            if watching:
                watching.cancel()

    async def _watch(self, replica: Replica, silence: asyncio.Timeout) -> None:
        """End the wait for an answer that comes as a whole once its replica stands still."""
        await self.pool.stalled(replica)
        silence.reschedule(asyncio.get_running_loop().time())

    async def _pass_on(
        self,
        response: aiohttp.ClientResponse,
        replica: Replica,
        answer: Answer,
        silence: asyncio.Timeout,
    ) -> None:
        """Pass an answer on. Raises ClientError if it breaks off, and Failed for status 503.

        silence: ends the reading of the next bytes. Nothing limits how long the client reads them.
        """
        sent, status = response.headers, response.status
        status = status if 200 <= status < 600 else 502  # others cannot be passed on
        headers = {name: sent[name] for name in SHOWN if name in sent}
        kind = headers.get("content-type", "").partition(";")[0]
        if kind == "text/event-stream":
            async for events in whole_events(response, silence, self.pool.options.idle):
                if FAULT in events:  # its status was sent before
                    self.pool.erred(replica, "most of its streams end with an error")
                elif not answer.status:
                    self.pool.served(replica)
                if not answer.status:
                    await answer.begin(status, headers)
                await answer.write(events)
            return await answer.end()
        silence.reschedule(asyncio.get_running_loop().time() + self.pool.options.idle)
        body = await whole(response, LARGEST_ANSWER)
        silence.reschedule(None)
        if status == 503:
            self.pool.full(replica, seconds(headers.get("retry-after", "")))
            raise Failed(status, headers, body)
        if kind != "application/json" or not like_json(body):
            status = 502
        if status >= 500 or status == 429:
            self.pool.erred(replica, f"most of its answers have a status such as {status}")
        else:
            self.pool.served(replica)
        if status == 502:
            await answer.fail(ApiError(502, ALIEN))
        else:
            await answer.send_whole(status, headers, body)

    @property
    def awaited(self) -> int:
        """Requests in flight."""
        return len(self.in_flight)

    async def drain(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Accept nothing more, wait up to `grace` seconds for what is in flight, and end the rest
        with an error; at once if `hurry` returns true."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        while self.in_flight and not hurry() and loop.time() < end:
            await asyncio.sleep(POLL)
        for limit in self.in_flight:
            with contextlib.suppress(RuntimeError):  # it is expiring already
                limit.reschedule(loop.time())
        while self.in_flight:  # until their clients have the error, or STALLED seconds have passed
            await asyncio.sleep(POLL)


async def whole_events(
    response: aiohttp.ClientResponse, silence: asyncio.Timeout, idle: float
) -> AsyncIterator[bytes]:
    """Events as they arrive, each as a whole: an error can follow even if the replica dies within
    an event. Ends with [DONE], however long the replica keeps its connection. Raises
    ClientPayloadError for a stream without its end.

    silence: expires `idle` seconds after an event if no other one is complete by then.
    """
    loop, left = asyncio.get_running_loop(), b""
    async for data in response.content.iter_any():
        left += data
        end = max((left.rfind(mark) + len(mark) for mark in ENDS if mark in left), default=0)
        if end:
            events, left = left[:end], left[end:]
            silence.reschedule(None)
            yield events
            if events.rstrip().endswith(DONE):
                return
            silence.reschedule(loop.time() + idle)
        elif len(left) > LARGEST_EVENT:
            raise aiohttp.ClientPayloadError("an event is too long")
    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


def like_json(body: bytes) -> bool:
    """Whether it begins and ends as an object or a list. To parse all of it would take too long."""
    text = body.strip()
    return text[:1] + text[-1:] in (b"{}", b"[]")


def seconds(retry_after: str) -> float:
    """Of a Retry-After header; a moment if it has none, or a date."""
    return float(retry_after) if retry_after.isdecimal() else 1.0
