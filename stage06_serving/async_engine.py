"""The engine on a thread of its own, and asyncio on the other side of the fence.

A forward pass takes tens of milliseconds, and an event loop that waits for it serves no client in
the meantime. So only the thread touches the engine. The loop sends commands through a queue, which
the thread empties before every step; tokens come back in one call a step. Apart from that the two
share only settings that never change, the engine's status, which is frozen (each step replaces it),
and the scores of prompts, which the thread completes before their first token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request

from .scoring import ScoredRequest, Scores, ScoringRunner

Engine = Any  # stage 05's, or a later one with the same kind of scheduler
Prepare = Callable[[Request], None]  # gives a request its form, before it is queued
BROKEN = "The engine failed in a step of this request: send the request again."
DEAD = "The engine has stopped after repeated failures: restart the server, and read its log."
CLOSING = "The server is shutting down: send the request again later, or to another server."
FAILURES = 3  # failed steps in a row before the engine is given up
STUCK = 5.0  # seconds: a step that takes longer ends with the process
DRAIN = 0.05  # seconds between two checks of what is in flight, while the server shuts down
PROBE = "probe"  # our own request, which shows after a failure whether steps work again

log = logging.getLogger("staircase")


class Overloaded(Exception):
    """The queue has no room for a request now."""


class EngineDead(Exception):
    """The engine has stopped for good, or is about to stop."""


class Broken(Exception):
    """A sequence ended through a failure that was not its own."""


class Refused(str):
    """An output's error whose cause is the request itself, found while it ran: status 400."""


@dataclass(frozen=True)
class Status:
    """An engine at one moment. The engine's thread makes it, and any thread may read it."""

    blocks: int  # in the pool
    owned: int = 0  # blocks
    running: int = 0  # sequences
    preemptions: int = 0  # since the start, as the two below
    lookup_tokens: int = 0  # looked up in the prefix cache
    hit_tokens: int = 0  # found there


@dataclass(eq=False)
class Ticket:
    """One sequence on its way through the engine, as the event loop sees it. Times are
    `time.perf_counter()`.

    `fresh` holds the unread tokens. A slow reader gets more of them at a time and delays no other
    request; they never exceed the answer's `max_tokens`. Their reader sets `news`.
    """

    id: str
    arrived: float
    news: Callable[[], object] = lambda: None  # called when there is something to read
    fresh: list[Token] = field(default_factory=list)
    ended: bool = False  # the engine has released it
    reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str | None = None  # the failure that ended it
    scores: Scores = field(default_factory=lambda: [None])  # of its prompt, if wanted: see `begun`
    cached_tokens: int | None = None  # of the prompt; None before its first step
    last_token: float | None = None  # when it came


@dataclass(frozen=True)
class Step:
    """The results of one step, on their way from the thread to the loop."""

    tokens: Sequence[tuple[str, Token]] = ()
    ended: Sequence[tuple[str, str, str | None]] = ()  # id, finish reason, error if there was one
    # Of the pass: id, prefill and decode tokens, and the position of the first.
    shares: Sequence[tuple[str, int, int, int]] = ()
    seconds: float = 0.0

    @property
    def prefill_tokens(self) -> int:
        return sum(prefill for _, prefill, *_ in self.shares)

    @property
    def decode_tokens(self) -> int:
        return sum(decode for _, _, decode, _ in self.shares)


def failure(ticket: Ticket) -> Exception:
    """The error for the readers of a ticket that has ended with one."""
    if isinstance(ticket.error, Refused):
        return UserError(ticket.error)
    dead = ticket.error in (CLOSING, DEAD)
    return (EngineDead if dead else Broken)(ticket.error or BROKEN)


def fulfil(future: Future[Any], do: Callable[[], Any]) -> None:
    """Give `future` the result of `do`, or its error."""
    if future.set_running_or_notify_cancel():  # else its caller has left
        try:
            future.set_result(do())
        except BaseException as error:  # the future's owner handles it
            future.set_exception(error)


class EngineThread:
    """The only thread that computes; it also loads the model.

    PyTorch keeps a team of threads for each thread that calls it. Two teams have more threads than
    there are processors: all sleep between operators and must be woken, and a step took 40 %
    longer. So no other thread may compute.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def run(self, do: Callable[[], Any]) -> Future[Any]:
        """Run `do` on the thread, after all earlier jobs. Returns its future."""
        future: Future[Any] = Future()
        self._jobs.put(partial(fulfil, future, do))
        return future

    def _work(self) -> None:
        while True:
            self._jobs.get()()


class AsyncEngine:
    """Runs `engine` on `thread`, by default a new one. After `start`, all methods are for the event
    loop that calls it.

    max_queue: sequences accepted beyond those that can run at once; the rest are refused.
    """

    def __init__(
        self, engine: Engine, max_queue: int = 64, thread: EngineThread | None = None
    ) -> None:
        scheduler = engine.scheduler
        self.capacity = scheduler.max_sequences + max_queue
        self.in_flight: dict[str, Ticket] = {}  # all that the engine has not released, by id
        self.alive = False
        self.draining = False
        # Called with each step, the tickets that got tokens, and the tickets that ended.
        self.listeners: list[Callable[[Step, list[Ticket], list[Ticket]], None]] = []
        # The engine's newest status: the thread replaces it before and after each step.
        self.status = Status(scheduler.pool.count)
        self._engine = engine
        engine.runner = self._scoring = ScoringRunner(engine.runner)
        engine.observers.append(self)
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = EngineThread() if thread is None else thread
        self._finished: asyncio.Future[None] | None = None  # the thread no longer steps
        self._loop: asyncio.AbstractEventLoop  # that called `start`
        self._names = itertools.count(1)
        self._requests: dict[str, Request] = {}  # the thread's: all with an unreported end

    # ---- on the event loop ----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences accepted but not running."""
        return max(0, len(self.in_flight) - self.status.running)

    @property
    def awaited(self) -> int:
        """Sequences in flight whose end the server has not already decided on."""
        return sum(ticket.reason is None for ticket in self.in_flight.values())

    def start(self) -> None:
        """Let the thread run steps."""
        self.alive, self._loop = True, asyncio.get_running_loop()
        self._finished = asyncio.wrap_future(self._thread.run(self._run))
        self._finished.add_done_callback(self._die)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        salt: bytes = b"",
        score: int | None = None,
        prepare: Prepare | None = None,
    ) -> list[list[Ticket]]:
        """Accept `prompts`, each with one sample per `sampling`. Returns a list of tickets per
        prompt.

        score: likeliest tokens beside each token of a prompt, in the scores of its first ticket.
        prepare: called with each request on the engine's thread.
        All or none are accepted. Raises UserError for a request that can never be answered,
        Overloaded without room for all of them, EngineDead.
        """
        if not self.alive or self.draining:
            raise EngineDead(CLOSING if self.alive else DEAD)
        for prompt in prompts:
            for params in sampling:
                self._engine.check(prompt, params)
        self._need_room(len(prompts) * len(sampling))
        names, now = self._names, time.perf_counter()
        groups = [[Ticket(f"sequence-{next(names)}", now) for _ in sampling] for prompt in prompts]
        for prompt, group in zip(prompts, groups, strict=True):
            self.in_flight |= {ticket.id: ticket for ticket in group}
            self._commands.put(partial(self._add, prompt, sampling, salt, score, prepare, group))
        return groups

    async def begun(self, ticket: Ticket) -> None:
        """Wait for the first token of `ticket`: its `scores` are complete by then. Raises Broken,
        EngineDead."""
        news = asyncio.Event()
        ticket.news = news.set
        while not (ticket.fresh or ticket.ended):
            await news.wait()
            news.clear()
        if not ticket.fresh:
            raise failure(ticket)

    def _need_room(self, count: int) -> None:
        if count > self.capacity:
            raise UserError(
                f"The request has {count} sequences, and the server accepts at most "
                f"{self.capacity}: ask for fewer at a time."
            )
        taken = len(self.in_flight)
        if taken + count > self.capacity:
            raise Overloaded(
                f"The server has {taken} of at most {self.capacity} sequences in flight, and this "
                f"request needs {count} more: try again in a moment."
            )

    def read(self, ticket: Ticket) -> list[Token]:
        """Take the unread tokens of `ticket`. If there are none and an error has ended it, raises
        Broken, EngineDead, or UserError for its own."""
        tokens, ticket.fresh = ticket.fresh, []
        if not tokens and ticket.reason == "error":
            raise failure(ticket)
        return tokens

    def abort(self, ticket: Ticket, reason: str = "abort") -> None:
        """End a sequence, waiting or running, before the engine's next step. Does nothing if it
        has ended."""
        if not ticket.ended:
            ticket.reason = ticket.reason or reason
            self._commands.put(partial(self._abort, ticket.id))

    async def call(self, do: Callable[[Engine], Any]) -> Any:
        """Run `do` with the engine on its thread, between two steps. Returns or raises what `do`
        does. Raises EngineDead."""
        if self.alive and self._finished:
            future: Future[Any] = Future()
            self._commands.put(partial(fulfil, future, partial(do, self._engine)))
            result = asyncio.wrap_future(future)
            await asyncio.wait((result, self._finished), return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
        raise EngineDead(DEAD)

    async def drain(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Accept nothing more, wait up to `grace` seconds for what is in flight, and end the rest
        with an error; at once if `hurry` returns true."""
        self.draining = True
        end = self._loop.time() + grace
        while self.in_flight and not hurry() and self._loop.time() < end:
            await asyncio.sleep(min(DRAIN, end - self._loop.time()))
        for name in self.in_flight:
            self._commands.put(partial(self._abort, name))
        self._deliver(Step(ended=[(name, "error", CLOSING) for name in self.in_flight]))

    async def stop(self) -> None:
        """Let the thread end after its step; wait for it, but not longer than STUCK seconds."""
        self._commands.put(None)
        if self._finished is not None:
            await asyncio.wait([self._finished], timeout=STUCK)

    def _deliver(self, step: Step) -> None:
        """Hand the tokens and ends of a step to their tickets, and the step to the listeners; then
        call the readers. If the loop is slower than the engine, they run after all steps that wait,
        read several steps' tokens at a time, and so catch up."""
        now = time.perf_counter()
        for name, *_, start in step.shares:
            if (ticket := self.in_flight.get(name)) and ticket.cached_tokens is None:
                ticket.cached_tokens = start  # its first step computes the rest
        emitted: dict[Ticket, None] = {}
        for name, token in step.tokens:
            if ticket := self.in_flight.get(name):
                ticket.fresh.append(token)
                emitted[ticket] = None
        ended = list[Ticket]()
        for name, reason, error in step.ended:
            if ticket := self.in_flight.pop(name, None):
                ticket.ended, ticket.reason, ticket.error = True, ticket.reason or reason, error
                ended.append(ticket)
        for listener in self.listeners:  # before these tokens' times replace the last ones
            listener(step, list(emitted), ended)
        for ticket in emitted:
            ticket.last_token = now
        for news in {ticket.news: None for ticket in (*emitted, *ended)}:  # once for each reader
            news()

    def _die(self, finished: asyncio.Future[None]) -> None:
        """The thread has ended, in whatever way: answer everything that waits for it."""
        self.alive = False
        if error := finished.exception():
            log.error("the engine's thread has ended", exc_info=error)
        self._deliver(Step(ended=[(name, "error", DEAD) for name in self.in_flight]))

    # ---- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        """Obey and step until the loop asks for an end, or FAILURES steps in a row fail."""
        failures = 0
        while failures < FAILURES and self._obey():
            try:
                step = self._step()
                failures = 0
            except Exception as error:  # whatever failed, requests outside the step go on
                failures += 1
                log.error("a step failed (%d in a row)", failures, exc_info=error)
                self._fail()
                step = Step(ended=self._ended())
                if PROBE not in self._requests:
                    self._enter(Request([0], SamplingParams(max_tokens=1), PROBE))
            self._loop.call_soon_threadsafe(self._deliver, step)

    def _obey(self) -> bool:
        """Run the loop's commands; wait for one while there is nothing to compute. Returns False if
        the thread must end."""
        while True:
            try:
                command = self._commands.get(block=self._idle())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _idle(self) -> bool:
        return all(request.output.finish_reason for request in self._requests.values())

    def _step(self) -> Step:
        self._scoring.plan, started = Plan(), time.perf_counter()
        tokens = self._engine.step()
        self._report()
        seconds = time.perf_counter() - started
        shares = [
            (work.request.id, work.prefill_tokens, work.count - work.prefill_tokens, work.start)
            for work in self._scoring.plan.work
            if work.request.id != PROBE
        ]
        return Step(tokens, self._ended(), shares, seconds)

    def _fail(self) -> None:
        """After a step that has raised, end the requests of its pass, or all if the pass had not
        begun, because then no memory can be trusted."""
        inside = [work.request for work in self._scoring.plan.work]
        for request in inside or list(self._engine.requests.values()):
            if request.id in self._engine.requests:
                if request.output.finish_reason is None:
                    request.output.fail(UserError(BROKEN))
                self._engine.abort(request.id)

    def before(self, plan: Plan) -> None:
        """The engine's observer: what the step computes."""
        self._report()
        self._scoring.plan = plan

    def after(self, plan: Plan) -> None:
        """The step's own report follows."""

    def _report(self) -> None:
        """Replace the status."""
        scheduler = self._engine.scheduler
        pool, counts = scheduler.pool, scheduler.counts
        self.status = Status(
            *(pool.count, pool.owned, len(scheduler.running)),
            *(counts.preemptions, counts.lookup_tokens, counts.hit_tokens),
        )

    def _ended(self) -> list[tuple[str, str, str | None]]:
        """Forget the requests that have ended: id, finish reason and error of each."""
        ended = [
            (name, request.output.finish_reason, request.output.error)
            for name, request in self._requests.items()
            if request.output.finish_reason
        ]
        for name, *_ in ended:
            del self._requests[name]
        return ended

    def _enter(self, request: Request) -> None:
        self._engine.enqueue(request)
        self._requests[request.id] = request

    def _add(
        self,
        prompt: Sequence[int],
        sampling: Sequence[SamplingParams],
        salt: bytes,
        score: int | None,
        prepare: Prepare | None,
        group: Sequence[Ticket],
    ) -> None:
        """Queue the samples of one prompt; all but the first share its blocks, and its scores."""
        first: Request | None = None
        if score is not None:  # a token that is found in the prefix cache would not be scored
            salt = b"for one prompt: " + group[0].id.encode() + b"\0" + salt
        try:
            for ticket, params in zip(group, sampling, strict=True):
                request = Request(prompt, params, ticket.id)
                if score is not None and first is None:
                    scores = ticket.scores
                    request = ScoredRequest(prompt, params, ticket.id, top=score, scores=scores)
                if prepare is not None:
                    prepare(request)
                self._enter(request)
                if first is None:
                    first, self._engine.scheduler.tables[request].salt = request, salt
                else:
                    self._engine.scheduler.follow(request, first)
        except Exception as error:  # a defect, as `submit` has checked: its readers must not wait
            log.error("a prompt could not be added", exc_info=error)
            step = Step(ended=[(ticket.id, "error", BROKEN) for ticket in group])
            self._loop.call_soon_threadsafe(self._deliver, step)
            for ticket in group:
                self._abort(ticket.id)

    def _abort(self, name: str) -> None:
        """End a request, if it has not ended, before the next step."""
        request = self._requests.get(name)
        if request is not None and request.output.finish_reason is None:
            self._engine.abort(name)
            self._report()
        if self._idle():  # no step will report it
            self._loop.call_soon_threadsafe(self._deliver, Step(ended=self._ended()))
