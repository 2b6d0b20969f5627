"""Records, points, and small servers that several test files use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from stage07_loadtest.client import HTTP_503, RESET, Record
from stage07_loadtest.load import Point, ServerDelta
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.workload import Ask

# A real run: python -m stage07_loadtest --users 1,2,4 --rates 4,8,12 --requests 8 --out <folder>.
SMALL_RUN = Path(__file__).with_name("small_run")
DONE = b"[DONE]"
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}}


def asks(count: int, tokens: int = 5) -> list[Ask]:
    return [Ask([1, 2, number], tokens) for number in range(count)]


# ---- records made by hand


def record(
    index: int = 0,
    intended: float = 0.0,
    sent: float | None = None,
    gaps: tuple[float, ...] = (0.5, 0.1, 0.1),
    **more: Any,
) -> Record:
    """A success: chunks of one token, `gaps` seconds apart, the first that long after sending."""
    sent, count = intended if sent is None else sent, len(gaps)
    chunks = [sent + sum(gaps[: number + 1]) for number in range(count)]
    fields: dict[str, Any] = {
        "chunks": chunks,
        "chunk_tokens": [1] * count,
        "end": chunks[-1],
        "status": 200,
    }
    fields |= {"prompt_tokens": 8, "completion_tokens": count, "finish_reason": "length"}
    fields |= {"done": True} | more
    return Record(index, intended, count, sent, **fields)


def refused(index: int = 0, intended: float = 0.0) -> Record:
    """A request that the server rejected with 503."""
    fields: dict[str, Any] = {
        "status": 503,
        "end": intended + 0.01,
        "failure": HTTP_503,
        "detail": "no room",
    }
    return Record(index, intended, 3, intended, **fields)


def broken(index: int = 0, intended: float = 0.0) -> Record:
    """A request whose connection was lost after two tokens."""
    lost: dict[str, Any] = {
        "completion_tokens": None,
        "finish_reason": None,
        "done": False,
        "failure": RESET,
    }
    chunks = record(index, intended).chunks[:2]
    return record(index, intended, chunks=chunks, chunk_tokens=[1, 1], **lost)


def point(records: list[Record], users: int | None = 1, **more: Any) -> Point:
    """A point as long as its records, on an idle client."""
    schedule = Schedule("closed", users, None)
    if users is None:
        schedule = Schedule("poisson", None, [record.intended for record in records], 2.0)
    duration = max(record.end for record in records)
    found = Point("short", schedule, records, 0.0, duration, 0.1, server=None, in_flight=[])
    return replace(found, **more)


def counters(generation_tokens: int, running: int = 0, usage: float = 0.0) -> ServerDelta:
    return ServerDelta(0, generation_tokens, 0, running, 0, usage)


# ---- answers and servers


def sse(*data: Any) -> bytes:
    lines = (item if isinstance(item, bytes) else json.dumps(item).encode() for item in data)
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


def chunk(text: str = "", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} | more]}


END = chunk(finish_reason="length")


def whole() -> web.Response:
    """A complete answer of six tokens."""
    return web.Response(body=sse(chunk("a"), END, USAGE, DONE), content_type="text/event-stream")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def with_server(routes: dict[str, Handler] | Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    """Run `use(url)` against a server with these GET routes, or with one handler of completions."""

    async def run() -> Any:
        app = web.Application()
        if callable(routes):
            app.router.add_post("/v1/completions", routes)
        else:
            for path, handler in routes.items():
                app.router.add_get(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        try:
            return await use("http://{}:{}".format(*runner.addresses[0][:2]))
        finally:
            await runner.cleanup()

    return asyncio.run(run())
