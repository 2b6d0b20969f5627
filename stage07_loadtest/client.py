"""One request: sent once, read to its end, and recorded. No failure of a server raises here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .workload import Ask

# Kinds of failure.
REFUSED = "refused"  # no connection
RESET = "reset"  # the connection was lost
HTTP_503 = "http_503"
HTTP_504 = "http_504"
HTTP_OTHER = "http_other"  # any other status than 200; `detail` names it
CUT = "cut"  # the stream ended without a finish reason or without [DONE]
ERROR_EVENT = "error_event"  # an error inside the stream, after status 200
TIMEOUT = "timeout"  # the client's own
TOKENS = "tokens"  # not the number of tokens that was requested, or no `usage`
PROTOCOL = "protocol"  # not what an OpenAI-style server sends

IDLE = 2.0  # seconds for which an unused connection is kept
LONGEST = 300  # characters of a detail


@dataclass(frozen=True)
class Target:
    """The server to load."""

    url: str  # without a path: http://127.0.0.1:8000
    model: str | None = None  # as the server names it; None: the server chooses
    key: str = ""
    timeout: float = 600.0  # seconds from sending to the end of the answer


@dataclass
class Record:
    """One request and its outcome. Times are seconds since the start of the measured part.

    A failed request keeps what had arrived.
    """

    index: int  # in the order of the schedule
    intended: float  # intended start: as scheduled; in a closed loop, when its user became free
    asked_tokens: int
    sent: float | None = None  # when it was handed to the connection; None: never
    status: int | None = None  # of HTTP; None without an answer
    chunks: list[float] = field(default_factory=list)  # arrival of each chunk with content
    chunk_tokens: list[int] = field(default_factory=list)  # by ids or logprobs; else 1 with text
    end: float = 0.0  # when the last byte arrived or the failure was noticed
    prompt_tokens: int | None = None  # from `usage`
    completion_tokens: int | None = None  # from `usage`
    finish_reason: str | None = None
    done: bool = False  # data: [DONE] arrived
    failure: str | None = None  # a kind; None: it succeeded
    detail: str | None = None  # of the failure, for readers


def open_session(target: Target) -> aiohttp.ClientSession:
    """An unlimited pool of connections for all requests. Open and close it on the event loop.

    A connection that the server closes just as it is used again would look like a reset, and
    nothing is retried. So idle connections are dropped before a server would drop them.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.key:
        headers["Authorization"] = f"Bearer {target.key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
        timeout=aiohttp.ClientTimeout(total=None),  # `send` has its own
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def body_of(target: Target, ask: Ask) -> bytes:
    """The body that requests exactly `ask.max_tokens` greedy tokens as a stream.

    `ignore_eos` and `return_token_ids` are vLLM's. With the latter every chunk lists its tokens,
    and a token without text of its own, such as half a character, is not held back until the next.
    """
    body: dict[str, Any] = {
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.model is not None:
        body["model"] = target.model
    return json.dumps(body, separators=(",", ":")).encode()


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    ask: Ask,
    intended: float,
    clock: Callable[[], float],
    index: int = 0,
) -> Record:
    """Send one request, read its answer to the end, and return the record; raises only when
    cancelled.

    `clock` gives seconds since the start. While the answer arrives, only the time of each piece is
    taken. The content is parsed once the answer is complete: otherwise the time stamps of a hundred
    streams would wait for JSON to be parsed.
    """
    record = Record(index, intended, ask.max_tokens)
    body = body_of(target, ask)
    pieces: list[tuple[float, bytes]] = []
    try:
        async with asyncio.timeout(target.timeout):
            record.sent = clock()
            async with session.post(
                f"{target.url}/v1/completions", data=body, allow_redirects=False
            ) as response:
                record.status = response.status
                content = response.content
                while piece := await content.readany():
                    pieces.append((clock(), piece))
    except TimeoutError:
        record.failure, record.detail = TIMEOUT, f"not finished after {target.timeout:g} s"
    except aiohttp.ClientConnectorError as error:
        record.failure, record.detail = REFUSED, str(error.os_error)
    except aiohttp.ClientResponseError as error:  # not HTTP
        record.failure, record.detail = PROTOCOL, str(error)
    except (aiohttp.ClientError, OSError) as error:
        record.failure, record.detail = RESET, str(error) or type(error).__name__
    record.end = clock()
    if record.status is None or record.status == 200:
        read(record, pieces)
    else:
        record.failure = {503: HTTP_503, 504: HTTP_504}.get(record.status, HTTP_OTHER)
        record.detail = f"{record.status}: {error_text(b''.join(piece for _, piece in pieces))}"
    return record


def read(record: Record, pieces: Sequence[tuple[float, bytes]]) -> None:
    """Fill in the record from its stream and judge it; `pieces`: (time of arrival, bytes).

    The stream's content takes precedence over the way the connection ended: a server that reports
    an error and hangs up has reported an error.
    """
    any_event = False
    for at, data in events(pieces):
        any_event = True
        if data == b"[DONE]":
            record.done = True
            break
        try:
            problem = _take(record, at, json.loads(data))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            record.failure, record.detail = PROTOCOL, f"not a completion chunk: {short(data)}"
            return
        if problem is not None:
            record.failure, record.detail = ERROR_EVENT, problem
            return
    if record.failure is not None:
        return
    if pieces and not any_event:
        record.failure, record.detail = PROTOCOL, f"not an event stream: {short(pieces[0][1])}"
    elif not record.done or record.finish_reason is None:
        missing = "[DONE]" if record.finish_reason is not None else "a finish reason"
        record.failure, record.detail = CUT, f"the stream ended without {missing}"
    elif record.completion_tokens != record.asked_tokens:
        count = record.completion_tokens
        received = "no usage" if count is None else f"{count} tokens"
        record.failure = TOKENS
        record.detail = f"{received}, but {record.asked_tokens} tokens were requested"


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, with the time at which the line was complete. Skips comments,
    other fields, and an unfinished last line."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def _take(record: Record, at: float, event: dict[str, Any]) -> str | None:
    """Add one event to the record. Returns the message of an error event; raises any of the errors
    that `read` catches for an event that is not a completion chunk."""
    if event.get("error") is not None:
        return _message(event)
    if usage := event.get("usage"):
        record.prompt_tokens = int(usage["prompt_tokens"])
        record.completion_tokens = int(usage["completion_tokens"])
    for choice in event["choices"][:1]:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None and logprobs is not None:
            ids = logprobs["tokens"]
        reason = choice.get("finish_reason")
        if ids or choice["text"] or reason is not None:
            record.chunks.append(at)
            record.chunk_tokens.append(len(ids) if ids is not None else 1 if choice["text"] else 0)
            record.finish_reason = reason or record.finish_reason
    return None


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)[:LONGEST]


def error_text(body: bytes) -> str:
    """The message of an OpenAI-style error, else the beginning of the body."""
    try:
        return _message(json.loads(body))
    except (ValueError, TypeError, KeyError, RecursionError):
        return short(body)


def short(data: bytes) -> str:
    """The beginning, on one line."""
    return " ".join(data[:LONGEST].decode("utf-8", "replace").split())
