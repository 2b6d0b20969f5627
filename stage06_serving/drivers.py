"""What grading calls in the tasks of this stage: see shared/course/driver.py.

No thread and no clock: the engine's loop runs in the driver, which puts commands into its queue
between two steps, and calls what it sends to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import groupby
from random import Random
from types import SimpleNamespace
from typing import Any

from shared.course.driver import Clock, outcome, tiny
from stage01_forward.drivers import prompt_of
from stage01_forward.params import SamplingParams
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make

from . import app, async_engine, text, writer
from .async_engine import AsyncEngine, Step, Ticket
from .connection import LEFT, WRITE
from .engines import Paged
from .errors import ApiError
from .sse import START

LETTERS = "aab"


def timeless(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, on a clock of its own."""
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(work)


def letters(draw: Random, least: int, most: int) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(draw.randint(least, most)))


# ---- tasks ----


def overlaps(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(60):
        texts = letters(draw, 0, 7), letters(draw, 1, 6)
        seen.append({"call": f"overlap{texts}", "length": text.overlap(*texts)})
    return seen


class Pieces:
    """A tokenizer's decoder in place of the real one: each token is a piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.pieces[-1]


def releases(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(40):
        pieces = [letters(draw, 0, 4) for _ in range(draw.randint(1, 8))]
        stops = [letters(draw, 1, 5) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
        keep, least = draw.random() < 0.5, draw.choice([0, 0, 2])
        stream = text.TextStream(None, (), stops, keep, least)  # type: ignore[arg-type]
        stream._decoder = Pieces(pieces)  # type: ignore[assignment]
        shown: list[Any] = []
        for token in range(len(pieces) - 1):
            if stream.stop is None:
                shown.append((stream.push(token), stream._held, stream.stop))
        shown.append((stream.flush(), stream.stop))
        call = f"the pieces {pieces}, stops {stops}, keep_stop={keep}, min_tokens={least}"
        seen.append({"call": call, "shown": shown})
    return seen


class Commands:
    """The queue of commands. `next_event` is asked whenever it is empty and the engine is idle."""

    def __init__(self, next_event: Callable[[], bool]) -> None:
        self.waiting: list[Any] = []
        self.next_event = next_event

    def put(self, command: Any) -> None:
        self.waiting.append(command)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while block and not self.waiting:
            if not self.next_event():
                return None  # the thread must end
        if not self.waiting:
            raise async_engine.queue.Empty
        return self.waiting.pop(0)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self.waiting

    def qsize(self) -> int:
        return len(self.waiting)


class Loop:
    """An event loop that calls what it gets at the next turn, and writes it down."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_soon(self, call: Any, *arguments: Any) -> None:
        self.calls.append(partial(call, *arguments))

    call_soon_threadsafe = call_soon

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()

    def create_future(self) -> Any:
        return SimpleNamespace(cancel=lambda: None, done=lambda: False)


async def built(draw: Random, queued: int, next_event: Callable[[], bool]) -> Any:
    """An AsyncEngine without a thread, and its loop."""
    pool = BlockPool(40, 4)
    engine = Paged(make(tiny(draw), pool=pool, max_sequences=3, token_budget=30))
    running: Any = AsyncEngine(engine, queued, thread=SimpleNamespace(run=None))  # type: ignore
    running._commands, running._loop = Commands(next_event), Loop()
    running.alive = True
    return running, engine


def ticket_of(ticket: Ticket) -> Any:
    times = ticket.scheduled, ticket.first_token, ticket.last_token
    known = [at is not None for at in times]
    in_order = all(known) and ticket.arrived <= times[0] <= times[1] <= times[2]  # type: ignore
    text = [token.id for token in ticket.fresh]
    ends = ticket.ended, ticket.reason, ticket.error
    return [ticket.id, ticket.prompt_tokens, text, ticket.generated, ends, known, in_order]


def words_of(draw: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw.randint(1, 6),
        temperature=draw.choice([0, 1.0]),
        seed=draw.randrange(99),
        ignore_eos=draw.random() < 0.5,
    )


def submits(draw: Random) -> Any:
    """Submissions, some of which are refused; then their commands, and steps to their end."""

    async def work() -> Any:
        seen: list[Any] = []
        running, engine = await built(draw, draw.choice([0, 2, 4]), lambda: False)
        groups: list[list[Ticket]] = []
        for _ in range(8):
            prompts = [prompt_of(draw, 12) for _ in range(draw.choice([1, 1, 2, 3]))]
            sampling = [words_of(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
            # One reason to refuse at a time: which of two is found first is open.
            crowded = len(running.in_flight) + len(prompts) * len(sampling) > running.capacity
            running.alive = crowded or draw.random() < 0.95
            running.draining = running.alive and not crowded and draw.random() < 0.05
            if running.alive and not running.draining and not crowded and draw.random() < 0.4:
                prompts[-1] = draw.choice([[], [1] * 64, [101]])
            submitted = outcome_of(running.submit, prompts, sampling, b"salt")
            call = f"submit {len(prompts)} prompts of {[len(p) for p in prompts]} tokens, "
            call += f"{len(sampling)} samples, {len(running.in_flight)} in flight"
            seen.append({"call": call, "flying": sorted(running.in_flight)})
            commands, running._commands.waiting = running._commands.waiting, []
            seen[-1] |= {"commands": len(commands), "rejected": running.rejected}
            if isinstance(submitted, Exception):
                seen[-1]["error"] = submitted
            else:
                seen[-1]["tickets"] = [
                    [ticket_of(ticket) for ticket in group] for group in submitted
                ]
                groups += submitted
            for command in commands:
                command.reply(command.do(), None)
            queued = [(r.id, r.parent is not None, r.salt) for r in engine.requests.values()]
            seen[-1] |= {"asked": queued, "waiting": engine.status.waiting}
            for _ in range(draw.choice([0, 2])):
                running._deliver(running._step())
                running._loop.turn()
        while engine.requests:
            running._deliver(running._step())
            running._loop.turn()
        ends = [ticket_of(ticket) for group in groups for ticket in group]
        return [*seen, {"call": "in the end", "tickets": ends, "steps": len(engine.steps)}]

    return asyncio.run(work())


def outcome_of(call: Callable[..., Any], *arguments: Any) -> Any:
    """As `outcome`, with the errors of this stage."""
    try:
        return outcome(call, *arguments)
    except (async_engine.Overloaded, async_engine.EngineDead, async_engine.Broken) as error:
        return error


class Scene:
    """A life of the engine's thread: before each step, and when it is idle, something happens."""

    def __init__(self, draw: Random, running: Any, engine: Any) -> None:
        self.draw, self.running, self.engine = draw, running, engine
        self.log: list[Any] = []
        self.left, self.tickets = draw.randint(5, 20), list[Ticket]()
        self.failing = draw.choice([0.0, 0.0, 0.2, 0.6])
        step, fail = engine.step, engine.fail

        def stepped() -> Any:
            self.log.append({"call": f"before step {len(engine.steps)}", **self.state()})
            self.happens()
            if draw.random() < self.failing:
                raise RuntimeError("it failed")
            return step()

        def failed(error: Any) -> Any:
            ended = fail(error)
            self.log.append({"call": "fail", "error": str(error), "ended": [r.id for r in ended]})
            return ended

        engine.step, engine.fail = stepped, failed
        running.listeners.append(self.listen)

    def listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        if not emitted and not ended and step.record is None:
            return  # whether an empty step is sent is open
        last = [ticket.last_token is not None for ticket in emitted]
        ids = [t.id for t in emitted], sorted(t.id for t in ended)
        record = step.record is not None
        ends = sorted(t.ended for t in ended)
        self.log.append({"call": "a step", "tickets": ids, "last": last, "more": [record, ends]})

    def state(self) -> dict[str, Any]:
        return {"names": [sorted(self.running.in_flight), sorted(self.engine.requests)]}

    def news(self, name: str) -> None:
        self.log.append({"call": "news", "for": name})

    def happens(self) -> bool:
        """Something on the event loop; returns whether anything will ever happen again."""
        self.running._loop.turn()
        self.left -= 1
        if self.left < 0:
            if self.running.in_flight and self.left > -200:
                return False
            self.running._commands.put(None)
            return True
        for _ in range(self.draw.choice([0, 1, 1, 2])):
            self.something()
        return True

    def something(self) -> None:
        what = self.draw.choice(["submit", "submit", "submit", "abort", "call", "read"])
        if what == "submit":
            sampling = [words_of(self.draw) for _ in range(self.draw.choice([1, 1, 2]))]
            submitted = outcome_of(self.running.submit, [prompt_of(self.draw, 9)], sampling)
            for ticket in submitted[0] if isinstance(submitted, list) else ():
                shared = self.draw.random() < 0.5
                ticket.news = partial(self.news, "all" if shared else ticket.id)
                self.tickets.append(ticket)
        elif what == "abort" and self.tickets:
            self.running.abort(self.draw.choice(self.tickets))
        elif what == "call":
            fails = self.draw.random() < 0.3
            self.running._commands.put(
                async_engine._Command(partial(self.called, fails), self.reply)
            )
        elif self.tickets:
            ticket = self.draw.choice(self.tickets)
            read = outcome_of(self.running.read, ticket)
            self.log.append({"call": f"read {ticket.id}", "tokens": read})

    def called(self, fails: bool) -> int:
        if fails:
            raise ValueError("no")
        return len(self.engine.steps)

    def reply(self, result: Any, error: Exception | None) -> None:
        self.log.append({"call": "a reply", "result": result, "error": error})


def lives(draw: Random) -> Any:
    async def work() -> Any:
        async_engine.log.disabled = True
        scenes: list[Scene] = []
        running, engine = await built(draw, 4, lambda: scenes[0].happens())
        scenes.append(Scene(draw, running, engine))
        running._run()
        running._loop.turn()
        running._die()
        for _ in range(3):
            running._loop.turn()
        tickets = [ticket_of(ticket) for ticket in scenes[0].tickets]
        runs = groupby(scenes[0].log, key=lambda entry: entry["call"])  # readers in any order
        log = [e for _, run in runs for e in sorted(run, key=lambda e: str(e.get("for")))]
        return [*log, {"call": "in the end", "tickets": tickets, **scenes[0].state()}]

    return [asyncio.run(work()) for _ in range(3)]


class Source:
    """The events of a stream: bytes that the driver adds."""

    def __init__(self, interval: bool) -> None:
        self.choices = [SimpleNamespace(ticket=SimpleNamespace(news=None)) for _ in range(2)]
        self.ended, self.fresh, self.last, self.due = False, b"", False, True
        self.behind = False  # what has come is read at once
        self.interval = interval

    def read(self) -> bytes:
        data, self.fresh = self.fresh, b""
        self.ended = self.last
        return data + (b"END" if self.ended else b"")

    def fail(self, error: Exception) -> bytes:
        self.ended = True
        return type(error).__name__.encode()


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def streams(draw: Random) -> Any:
    """Streams whose connection is now and then full or slow: what has arrived after each step."""

    async def work() -> Any:
        ending = draw.choice(["late", "left", *["whole"] * 4])
        # In the others, whether the end comes before tokens that are not due is open.
        source = Source(interval=ending == "whole" and draw.random() < 0.4)
        seen, arrived = list[Any](), bytearray()
        released, leave, open_gate = list[int](), list[Any](), asyncio.Event()
        slow, full = draw.random() < 0.5, draw.choice([0.0, 0.0, 0.4])
        room, settled = Random(draw.randrange(2**40)), True
        open_gate.set()

        def write(data: bytes) -> bool:
            if room.random() < full:  # how often it is called must not change what comes next
                return False
            arrived.extend(data)
            return True

        async def send(message: Any) -> None:
            await open_gate.wait()
            if message["type"] == "http.response.start":
                arrived.extend(b"START" if message == START else b"?")
            else:
                arrived.extend(message["body"] + (b"" if message["more_body"] else b"#"))

        deadline = asyncio.get_running_loop().time() + (0.02 if ending == "late" else 600)
        released_once = partial(released.append, 1)
        stream = writer.Stream(source, released_once, deadline)  # type: ignore[arg-type]
        scope: Any = {"extensions": {WRITE: write, LEFT: leave.append}}
        task = asyncio.create_task(stream(scope, None, send))  # type: ignore[arg-type]
        await turns()
        for number in range(draw.randint(2, 9)):
            if slow and draw.random() < 0.4:
                open_gate.clear() if open_gate.is_set() else open_gate.set()
            for _ in range(draw.choice([1, 1, 2])):
                source.fresh += b"%d," % number
                source.due = not source.interval or draw.random() < 0.6
                stream.news()
                if settled and full == 0.0 and open_gate.is_set():
                    seen.append({"call": f"news {number}", "at once": bytes(arrived).decode()})
            settled = draw.random() < 0.5
            await turns(8 if settled else 1)
        open_gate.set()
        await turns()
        if ending == "late":
            await asyncio.sleep(0.05)
        elif ending == "left":
            leave[0]()
        else:
            source.last = source.due = True
            stream.news()
        await turns(30)
        known = [choice.ticket.news == stream.news for choice in source.choices]
        seen.append({"call": "in the end", "arrived": bytes(arrived).decode(), "known": known})
        seen[-1] |= {"released": len(released), "done": task.done()}
        task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        seen[-1] |= {"error": type(end).__name__ if isinstance(end, Exception) else None}
        return seen

    return [timeless(work()) for _ in range(10)]


class Client:
    """A request whose client leaves at a chosen turn."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def leaving(draw: Random) -> Any:
    async def waits(log: list[str], turns_: int, error: Exception | None, tidy: int) -> str:
        try:
            await turns(turns_)
            if error is not None:
                raise error
            log.append("worked")
            return "result"
        finally:
            await turns(tidy)
            log.append("tidy")

    async def watched(work: Coroutine[Any, Any, Any], client: Client, leaves: int) -> Any:
        async def away() -> None:
            await turns(leaves)
            client.left.set()

        leaver = asyncio.create_task(away())
        try:
            return await work
        except (ApiError, ValueError, TimeoutError) as error:
            return [type(error).__name__, getattr(error, "status", None)]
        finally:
            leaver.cancel()

    async def one() -> Any:
        client, log = Client(), list[str]()
        length, leaves = draw.choice([0, 5, 40]), draw.choice([2, 20, 400])
        error = draw.choice([None, None, ValueError("no")])
        work = waits(log, length, error, draw.choice([0, 3]))
        guarded = app.unless_gone(client, work)  # type: ignore[arg-type]
        result = await watched(guarded, client, leaves)
        left = len(asyncio.all_tasks())
        call = f"unless_gone: work of {length} turns, {error!r}, the client leaves after {leaves}"
        return {"call": call, "result": result, "log": log, "tasks": left}

    async def respond() -> Any:
        client, aborted = Client(), list[str]()
        length, leaves = draw.choice([0, 10, 40]), draw.choice([2, 400])
        # Whether an answer that is there at once is too late is open.
        streams_, late = draw.random() < 0.4, length > 0 and draw.random() < 0.3
        long = [0] * draw.choice([1, 200])  # tokens of each answer
        fails = draw.random() < 0.3
        service: Any = SimpleNamespace(stream_interval=3)
        service.engine = SimpleNamespace(abort=aborted.append)
        api = app.Api(service)
        choices: Any = [SimpleNamespace(ticket=f"ticket {n}", index=n) for n in range(2)]

        async def answers(chosen: Any) -> Any:
            await turns(length)
            if fails:
                raise ValueError("no")
            return [SimpleNamespace(ticket=choice.ticket, tokens=long) for choice in chosen]

        async def in_turn(work: Any) -> Any:
            return work()

        service.in_turn = in_turn
        setattr(api, "_answers", answers)  # noqa: B010
        form: Any = SimpleNamespace(whole=lambda answers: {"answers": [a.ticket for a in answers]})
        deadline = asyncio.get_running_loop().time() + (-1.0 if late else 600)
        work = api._respond(client, choices, form, streams_, deadline)  # type: ignore[arg-type]
        response = await watched(work, client, leaves)
        call = f"_respond: stream={streams_}, {length} turns, leaves after {leaves}, late={late}"
        entry: dict[str, Any] = {"call": call, "aborted": list(aborted)}
        if isinstance(response, writer.Stream):
            response.release()
            same = response.deadline == deadline, response.events.choices == choices
            entry |= {"stream": [same, response.events.interval], "released": list(aborted)}
        else:
            entry["body"] = response if isinstance(response, list) else response.body.decode()
        return entry

    return [timeless(kind()) for _ in range(10) for kind in (one, respond)]


DRIVERS = {1: overlaps, 2: releases, 3: submits, 4: streams, 5: lives, 6: leaving}
