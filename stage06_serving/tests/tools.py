"""Helpers for tests of engines: prompts, gates and faults before a pass, engines on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from stage01_forward.engine import Engine as Naive
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage06_serving.async_engine import CLOSING, DEAD, AsyncEngine, Broken, EngineDead, Ticket

from .asking import HANG


class Passes:
    """The passes of a runner from now on. Those with the numbers `failing`, from 1 on, raise
    `error`; behind a gate they wait until the test allows them."""

    def __init__(
        self, runner: Any, failing: Any = (), error: BaseException | None = None, gate: bool = False
    ) -> None:
        self.forward, self.failing, self.gate = runner.run, failing, gate
        self.error = error or RuntimeError("a planted fault")
        self.permits, self.count = threading.Semaphore(0), 0  # passes that have begun
        runner.run = self

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        assert not self.gate or self.permits.acquire(timeout=HANG), "the gate was never opened"
        if self.count in self.failing:
            raise self.error
        return self.forward(*arguments)

    def allow(self, passes: int = 10_000) -> None:
        self.permits.release(passes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny model's vocabulary; none of them ends a text."""
    return [1 + (7 * seed + 13 * place) % 99 for place in range(length)]


def words(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def alone(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The tokens of stage 01."""
    return Naive(model).generate([prompt], params)[0].token_ids


class Plans:
    """What each pass of an engine ran: `seen` of the observed engine."""

    def __init__(self, engine: Any) -> None:
        engine.observers.append(self)
        engine.seen = self.seen = list[SimpleNamespace]()

    def before(self, plan: Plan) -> None:
        """The end of the step counts."""

    def after(self, plan: Plan) -> None:
        prefill = sum(work.prefill_tokens for work in plan.work)
        decode = sum(work.count for work in plan.work) - prefill
        ids = [work.request.id for work in plan.work]
        self.seen += [SimpleNamespace(ids=ids, rows=len(ids), prefill_tokens=prefill,
                                      decode_tokens=decode)] if ids else []  # fmt: skip


def is_empty(engine: Any) -> bool:
    scheduler = engine.scheduler
    return not (scheduler.running or scheduler.waiting or scheduler.pool.owned)


@asynccontextmanager
async def started(engine: Any, max_queue: int = 64) -> AsyncIterator[AsyncEngine]:
    """`engine` on its thread, which then ends. Unless it has died, nothing may be left in it. An
    error in a callback of the loop ends the test, and so does an open task in the thread."""
    running, test = AsyncEngine(engine, max_queue), asyncio.current_task()
    errors: list[Any] = []

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and test:
            errors.append(context["exception"])
            test.cancel()

    asyncio.get_running_loop().set_exception_handler(failed)
    running.start()
    try:
        async with asyncio.timeout(HANG):
            yield running
    finally:
        await running.stop()
        if (thread := running._running) and thread.done():
            open_task = isinstance(thread.exception(), NotImplementedError)
            errors += [thread.exception()] if open_task else []
        for error in errors:
            raise error
    assert is_empty(engine) or not running.alive


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def submit(running: AsyncEngine, prompt: list[int], count: int) -> Ticket:
    return running.submit([prompt], [words(count)])[0][0]


async def reading(
    running: AsyncEngine, *tickets: Ticket
) -> AsyncGenerator[tuple[Ticket, list[Token]], None]:
    """The tokens of tickets as they arrive, until all have ended."""
    news, unread = asyncio.Event(), list(tickets)
    for ticket in tickets:
        ticket.news = news.set
    while unread:
        for ticket in list(unread):
            while tokens := running.read(ticket):
                yield ticket, tokens
            if ticket.ended:
                unread.remove(ticket)
        if unread:
            await news.wait()
            news.clear()


async def said(running: AsyncEngine, ticket: Ticket) -> list[int]:
    """All tokens of a ticket, until it ends."""
    return [token.id async for _, tokens in reading(running, ticket) for token in tokens]


async def error_of(running: AsyncEngine, ticket: Ticket) -> str | None:
    """The failure that ended a ticket."""
    try:
        await said(running, ticket)
    except (Broken, EngineDead) as error:
        assert isinstance(error, EngineDead) == (str(error) in (CLOSING, DEAD))
        return str(error)
    return None
