"""The engine on a thread of its own, and asyncio on the other side of the fence.

A forward pass takes tens of milliseconds, and an event loop that waits for one serves nobody meanwhile. So the thread alone
touches the engine. What the loop wants goes to it through a queue of commands, which it empties before every step; what the
engine says comes back in one call a step. Nothing else is shared but settings that never change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.engine import BlocksRecord

from .engines import AnyEngine

BROKEN = "The engine failed in this step, and the request with it: send it again."
DEAD = "The engine has stopped after failures in a row: restart the server, and look into its log."
CLOSING = "The server is shutting down: send the request again later, or to another one."
FAILURES = 3  # steps that fail in a row until the engine is given up
STUCK = 5.0  # seconds: a step that takes longer ends with the process
DRAIN = 0.05  # seconds between two looks at what is left, while the server shuts down
PROBE = "probe"  # a request of our own: after a failure it finds out whether steps work again

log = logging.getLogger("staircase")


class Overloaded(Exception):
    """There is no place in line for a request. Later there will be."""


class EngineDead(Exception):
    """The engine has stopped for good, or is about to."""


class Broken(Exception):
    """A sequence was ended by a failure that is not its own."""


@dataclass(eq=False)
class Ticket:
    """One sequence on its way through the engine, as the event loop sees it. Times are `time.perf_counter()`.

    `fresh` is what the engine has said and nobody has read yet. A slow reader finds more of it at a time and holds nobody up; it
    is never more than the `max_tokens` of the answer.
    """

    id: str
    prompt_tokens: int
    sampling: SamplingParams
    arrived: float
    news: asyncio.Event  # set when there is something to read; the tickets of a request share it
    fresh: list[Token] = field(default_factory=list)
    generated: int = 0  # tokens
    ended: bool = False  # the engine has let go of it
    reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str | None = None  # why there is no more, if a failure ended it
    scheduled: float | None = None  # when its first pass began
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True)
class Step:
    """What one step has brought, on its way from the thread to the loop."""

    record: BlocksRecord | None = None  # None: no forward pass was made
    said: Sequence[tuple[str, Token]] = ()
    ended: Sequence[
        tuple[str, str, str | None]
    ] = ()  # who, the finish reason, and the error if it was one


@dataclass(frozen=True)
class _Command:
    """What the thread shall do before its next step, and who wants the result or the error."""

    do: Callable[[], Any]
    reply: Callable[[Any, Exception | None], object]


def _ignore(result: Any, error: Exception | None) -> None:
    if error is not None:
        log.error("a command failed", exc_info=error)


class EngineThread:
    """The one thread that computes, and that has loaded the model too.

    PyTorch keeps a team of threads for each thread that calls it. With two teams there are more threads than processors, and
    then all of them go to sleep between operators and have to be woken: a pass took 40 % longer. So nobody else may compute.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def run(self, do: Callable[[], Any]) -> Future[Any]:
        """Run `do` there, after what was given before it; its result or error."""
        future: Future[Any] = Future()
        self._jobs.put((do, future))
        return future

    def _work(self) -> None:
        while True:
            do, future = self._jobs.get()
            try:
                future.set_result(do())
            except BaseException as error:  # belongs to whoever asked
                future.set_exception(error)


class AsyncEngine:
    """Runs `engine` on `thread`, by default a new one. All methods are for the event loop that calls `start`.

    max_queue: so many sequences are taken in beyond those that can run at once; the surplus is refused.
    """

    def __init__(
        self, engine: AnyEngine, max_queue: int = 64, thread: EngineThread | None = None
    ) -> None:
        self.engine = engine
        self.capacity = engine.scheduler.max_sequences + max_queue
        self.in_flight: dict[str, Ticket] = {}  # all that the engine has not let go of, by id
        self.alive = False
        self.draining = False
        self.rejected = 0  # requests, so far
        self.listeners: list[
            Callable[[Step, list[Ticket], list[Ticket]], None]
        ] = []  # get each step, who said, and who ended
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = EngineThread() if thread is None else thread
        self._running: Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._held = 0  # places of `place`
        self._calls: set[asyncio.Future[Any]] = set()  # of `call`, while somebody waits for them
        self._named = 0
        self._requests: dict[
            str, Request
        ] = {}  # the thread's own: all that it has not yet told the end of

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the thread make steps."""
        self.alive = True
        self._running = self._thread.run(self._run)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        salt: bytes = b"",
    ) -> list[list[Ticket]]:
        """Take in `prompts`, of each as many samples as there are `sampling`; a list of tickets for each prompt. All or none.

        Raises UserError for what can never be answered, Overloaded if there is no place for all of them, EngineDead.
        """
        self._need_life()
        for prompt in prompts:
            for each in sampling:
                self.engine.check(Request(prompt, each))
        self._need_room(len(prompts) * len(sampling))
        news = asyncio.Event()
        groups = [[self._ticket(prompt, each, news) for each in sampling] for prompt in prompts]
        for prompt, group in zip(prompts, groups, strict=True):
            self.in_flight |= {ticket.id: ticket for ticket in group}
            self._command(
                partial(self._add, prompt, sampling, salt, [ticket.id for ticket in group])
            )
        return groups

    @contextlib.contextmanager
    def place(self, count: int) -> Iterator[None]:
        """Hold as many places as `count` sequences would take, for a `call` that is as much work. Raises as `submit` does."""
        self._need_life()
        self._need_room(count)
        self._held += count
        try:
            yield
        finally:
            self._held -= count

    def _need_life(self) -> None:
        if not self.alive or self.draining:
            raise EngineDead(CLOSING if self.alive else DEAD)

    def _need_room(self, count: int) -> None:
        if count > self.capacity:
            raise UserError(
                f"This is {count} sequences, and the server takes in at most {self.capacity}: ask for fewer at a time."
            )
        taken = len(self.in_flight) + self._held
        if taken + count > self.capacity:
            self.rejected += 1
            raise Overloaded(
                f"The server has {taken} sequences in hand, of at most {self.capacity}, and this would be {count} more: try "
                "again in a moment."
            )

    async def tokens(
        self, tickets: Sequence[Ticket], deadline: float | None = None
    ) -> AsyncGenerator[tuple[Ticket, list[Token]], None]:
        """The tokens of `tickets` of one `submit`, as they arrive, until all sequences have ended.

        deadline: event-loop time. Raises Broken, EngineDead, TimeoutError.
        """
        unfinished = list(tickets)
        while unfinished:
            if not any(ticket.fresh or ticket.ended for ticket in unfinished):
                news = unfinished[0].news
                news.clear()
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            for ticket in list(unfinished):
                tokens, ticket.fresh, ended = ticket.fresh, [], ticket.ended
                if tokens:
                    yield ticket, tokens
                if ended:
                    unfinished.remove(ticket)
                    if ticket.reason == "error":
                        dead = ticket.error in (CLOSING, DEAD)
                        raise (EngineDead if dead else Broken)(ticket.error)

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """End a sequence, whatever it is doing; nothing happens if it has ended. The engine hears of it before its next step."""
        if not ticket.ended:
            ticket.reason = ticket.reason or reason
            self._command(partial(self._abort, ticket.id))

    async def call(self, do: Callable[[AnyEngine], Any]) -> Any:
        """Run `do` with the engine on the engine's thread, between two steps; what it returns or raises. Raises EngineDead."""
        if not self.alive:
            raise EngineDead(DEAD)
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # whoever asked has left, or has been told already
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        reply = partial(self._loop.call_soon_threadsafe, settle)
        self._commands.put(_Command(partial(do, self.engine), reply))
        return await future

    async def drain(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take in nothing more, wait up to `grace` seconds for what is in hand, and end the rest with an error; at once if
        `hurry` says so."""
        self.draining = True
        end = self._loop.time() + grace
        while (self.in_flight or self._held) and not hurry() and self._loop.time() < end:
            await asyncio.sleep(min(DRAIN, end - self._loop.time()))
        for name in self.in_flight:
            self._command(partial(self._abort, name))
        self._deliver(Step(ended=[(name, "error", CLOSING) for name in self.in_flight]))
        for future in self._calls:
            if not future.done():
                future.set_exception(EngineDead(CLOSING))

    async def stop(self) -> None:
        """Let the thread end, once its step is done; it is not waited for for ever."""
        self._commands.put(None)
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)], timeout=STUCK)

    def _ticket(
        self, prompt: Sequence[int], sampling: SamplingParams, news: asyncio.Event
    ) -> Ticket:
        self._named += 1
        name = f"sequence-{self._named}"
        return Ticket(name, len(prompt), sampling, time.perf_counter(), news)

    def _command(self, do: Callable[[], Any]) -> None:
        self._commands.put(_Command(do, _ignore))

    def _deliver(self, step: Step) -> None:
        now = time.perf_counter()
        spoke: dict[Ticket, None] = {}
        for name, token in step.said:
            if ticket := self.in_flight.get(name):
                ticket.fresh.append(token)
                ticket.generated += 1
                spoke[ticket] = None
        ended = [self.in_flight[name] for name, *_ in step.ended if name in self.in_flight]
        if step.record is not None:
            begun = {each.request_id for each in step.record.sequences} | {
                name for name, _ in step.said
            }
            for name in begun:  # other samples of a prompt speak in the first one's pass
                ticket = self.in_flight.get(name)
                if ticket is not None and ticket.scheduled is None:
                    ticket.scheduled = step.record.started
        for name, reason, error in step.ended:
            if ticket := self.in_flight.get(name):
                self._end(ticket, reason, error)
        for listener in self.listeners:  # they compare this token's time with the last one's
            listener(step, list(spoke), ended)
        for ticket in spoke:
            ticket.first_token = ticket.first_token or now
            ticket.last_token = now
            ticket.news.set()

    def _end(self, ticket: Ticket, reason: str, error: str | None) -> None:
        ticket.ended, ticket.reason, ticket.error = True, ticket.reason or reason, error
        ticket.news.set()
        self.in_flight.pop(ticket.id, None)

    def _die(self) -> None:
        """The thread has ended: nobody may wait for it."""
        self.alive = False
        self._deliver(Step(ended=[(name, "error", DEAD) for name in self.in_flight]))
        with contextlib.suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command.reply(None, EngineDead(DEAD))

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        try:
            while failures < FAILURES and self._obey():
                try:
                    step = self._step()
                    failures = 0
                except (
                    Exception
                ) as error:  # a pass can fail in any way, and the other requests should outlive it
                    failures += 1
                    log.error("a step failed (%d in a row)", failures, exc_info=error)
                    self.engine.fail(UserError(BROKEN))
                    step = Step(ended=self._ended())
                    if PROBE not in self.engine.requests:
                        self.engine.add(Request([0], SamplingParams(max_tokens=1), PROBE))
                self._loop.call_soon_threadsafe(self._deliver, step)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._die)

    def _obey(self) -> bool:
        """Do what the loop wants; wait for it if there is nothing else to do. False: it wants the thread to end."""
        wait = not self.engine.scheduler.unfinished
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            try:
                command.reply(command.do(), None)
            except Exception as error:  # belongs to whoever asked
                command.reply(None, error)
            wait = not self.engine.scheduler.unfinished

    def _step(self) -> Step:
        before = self.engine.steps[-1] if self.engine.steps else None
        said = self.engine.step()
        record = self.engine.steps[-1] if self.engine.steps else None
        return Step(None if record is before else record, said, self._ended())

    def _ended(self) -> list[tuple[str, str, str | None]]:
        gone = [
            request for name, request in self._requests.items() if name not in self.engine.requests
        ]
        for request in gone:
            del self._requests[request.id]
        return [
            (request.id, request.output.finish_reason or "error", request.output.error)
            for request in gone
        ]

    def _add(
        self,
        prompt: Sequence[int],
        sampling: Sequence[SamplingParams],
        salt: bytes,
        ids: Sequence[str],
    ) -> None:
        try:
            added = self.engine.add_samples(prompt, sampling, salt, ids)
        except (
            Exception
        ):  # `submit` has checked, so this is a defect; still nobody may wait for ever
            self._loop.call_soon_threadsafe(
                self._deliver, Step(ended=[(name, "error", BROKEN) for name in ids])
            )
            raise
        self._requests |= {request.id: request for request in added}

    def _abort(self, name: str) -> None:
        if name in self.engine.requests:
            self.engine.abort(name)
        if not self.engine.scheduler.unfinished:  # no step will tell
            self._loop.call_soon_threadsafe(self._deliver, Step(ended=self._ended()))
