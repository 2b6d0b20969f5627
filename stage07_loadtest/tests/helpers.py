"""Records, points, small servers, and a clock that several test files use."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from stage07_loadtest import mock
from stage07_loadtest.client import HTTP_503, RESET, Record, Target
from stage07_loadtest.load import Point, run_point
from stage07_loadtest.mock import Behaviour, Mock
from stage07_loadtest.schedule import Schedule
from stage07_loadtest.server import Counters
from stage07_loadtest.workload import Ask

QUICK: dict[str, Any] = {"ttft": 0.005, "itl": 0.001}  # where only counts matter
FAR = 1.0  # seconds: on the clock below, longer sleeps are time limits, not moments
T = TypeVar("T")


def asks(count: int, tokens: int = 5) -> list[Ask]:
    return [Ask([1, 2, number], tokens) for number in range(count)]


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
    fields: dict[str, Any] = {"chunks": chunks, "chunk_tokens": [1] * count, "end": chunks[-1]}
    fields |= {"prompt_tokens": 8, "completion_tokens": count, "finish_reason": "length"}
    return Record(index, intended, count, sent, 200, **{**fields, "done": True} | more)


def refused(index: int = 0, intended: float = 0.0) -> Record:
    """A request that the server rejected with 503."""
    end = intended + 0.01
    return Record(index, intended, 3, intended, status=503, end=end, failure=HTTP_503, detail="no")


def broken(index: int = 0, intended: float = 0.0) -> Record:
    """A request whose connection was lost after two tokens."""
    lost: dict[str, Any] = {"completion_tokens": None, "finish_reason": None, "done": False}
    return record(index, intended, gaps=(0.5, 0.1), end=intended + 0.7, failure=RESET, **lost)


def point(records: list[Record], users: int | None = 1, **more: Any) -> Point:
    """A point as long as its records, on an idle client."""
    schedule = Schedule(users, None if users else [one.intended for one in records], 2.0)
    duration = max(record.end for record in records)
    return replace(Point(schedule, records, duration, 0.1, server=None, in_flight=[]), **more)


def counters(generation_tokens: int, running: int = 0, usage: float = 0.0) -> Counters:
    return Counters(generation_tokens, 0, running, 0, usage)


@contextmanager
def mocked(**behaviour: Any) -> Iterator[Mock]:
    """The mock on a thread, for a program that has its own event loop."""
    loop, serving = asyncio.new_event_loop(), mock.serving(Behaviour(**QUICK | behaviour))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(20)
    finally:
        leaving = serving.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(leaving, loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Selector(selectors.SelectSelector):
    """Advances the clock of its loop by the time that is slept, and `late` seconds more.

    Bytes need a moment even within one machine, so a loop with sockets waits `grace` real seconds
    for something to arrive before its clock moves, and a thousand times longer before a limit.
    """

    def __init__(self, late: float = 0.0, grace: float = 0.0) -> None:
        super().__init__()
        self.now, self.late, self.grace = 0.0, late, grace

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(self.grace if timeout < FAR else 1000 * self.grace)
        if not ready:
            self.now += timeout + self.late
        return ready


def run(work: Coroutine[Any, Any, T], late: float = 0.0, grace: float = 0.01) -> T:
    """`asyncio.run` on such a clock."""
    selector = Selector(late, grace)
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


def stop(seconds: float) -> None:
    """Block the loop, as `time.sleep` does."""
    asyncio.get_running_loop()._selector.now += seconds  # type: ignore[attr-defined]


def against(
    behaviour: dict[str, Any],
    what: Sequence[Ask],
    when: Schedule,
    beside: Callable[[Mock], Any] | None = None,
    **options: Any,
) -> tuple[Point, Mock]:
    """A point against a mock on the same event loop, QUICK unless its behaviour is another, with
    `beside(server)` next to it."""

    async def load() -> tuple[Point, Mock]:
        async with mock.serving(Behaviour(**QUICK | behaviour)) as server:
            other = asyncio.create_task(beside(server)) if beside else None
            point = await run_point(Target(server.url, timeout=60.0), what, when, **options)
            if other:
                await other
            return point, server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stage07_loadtest.load.time", TIME)
        point, server = run(load())
    assert max(record.end for record in point.records) <= point.duration
    return point, server


# In place of the module `time`: whatever clock the running loop has.
TIME = SimpleNamespace(
    perf_counter=lambda: asyncio.get_running_loop().time(), process_time=time.process_time
)
