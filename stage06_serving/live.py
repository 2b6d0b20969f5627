"""What the page shows of the engine's inner life: frames over server-sent events, from the step records and the block map."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypedDict

from stage05_paged.blockmap import blockmap

from .async_engine import AsyncEngine, EngineDead, Overloaded, Step, Ticket
from .engines import AnyEngine, Line
from .sse import event

FRAMES = 8  # a second, at most
PULSE = 1.0  # seconds between two frames, at most: so a page can tell a server that is idle from one that is gone
STEPS = 256  # of the newest steps in one frame, at most
MOST_BLOCKS = 2**16  # on the map
MOST_WATCHERS = 16  # pages: each costs the loop a frame FRAMES times a second
RECENT = 3.0  # seconds that the rate of tokens is taken over


class View(TypedDict):
    """What only the engine's thread may look at: the scheduler's tables and counts, between two steps."""

    map: list[
        tuple[int, int]
    ]  # runs of blocks that are alike: their state, as `blockmap` has it, and how many they are
    running: list[tuple[str, int]]  # of each sequence: its id, and its number on the map
    waiting: int  # sequences
    hit_rate: float  # of the prefix cache, from 0 to 1
    preemptions: int


class StepFrame(TypedDict):
    """One forward pass."""

    number: int
    rows: list[
        tuple[str, int, int]
    ]  # of each sequence: its id, and its tokens of prefill and of decode
    preempted: int  # sequences that lost their memory before it


class Frame(View):
    """One event of /live: all that a page needs to draw, and the steps since the last one."""

    alive: bool  # the engine; if not, the view is the last that there was
    blocks: int
    block_size: int  # tokens
    step: int  # number of the newest one
    steps: list[StepFrame]
    tokens_per_second: float
    ttft: float | None  # seconds, median of the newest requests
    itl: float | None  # seconds, median of the newest tokens


def look(engine: AnyEngine) -> View:
    """To be called on the engine's thread."""
    scheduler = engine.scheduler
    states = (scheduler.slots() if isinstance(scheduler, Line) else blockmap(scheduler))[
        :MOST_BLOCKS
    ]
    return {
        "map": [(state, len(list(run))) for state, run in groupby(states)],
        "running": [(each.id, each.arrival) for each in scheduler.running],
        "waiting": scheduler.unfinished - len(scheduler.running),
        "hit_rate": scheduler.counts.hit_rate,
        "preemptions": scheduler.counts.preemptions,
    }


@dataclass(eq=False)
class Watcher:
    """A page that is open: `news` is set when there is something to show."""

    news: asyncio.Event


class Live:
    """Keeps the last seconds of the engine's life for those who watch; costs next to nothing while nobody does."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.watchers: set[Watcher] = set()
        self.steps: deque[StepFrame] = deque(maxlen=STEPS)
        self.tokens: deque[tuple[float, int]] = deque(maxlen=256)  # when, and how many were said
        self.first: deque[float] = deque(
            maxlen=64
        )  # seconds to the first token, of the newest requests
        self.between: deque[float] = deque(maxlen=512)  # seconds between tokens
        self.count = 0  # steps so far
        self._view: View = {
            "map": [],
            "running": [],
            "waiting": 0,
            "hit_rate": 0.0,
            "preemptions": 0,
        }
        self._happened = 0  # what the engine has told so far, and
        self._viewed = -1  # how much of that the view knows
        self._looking = asyncio.Lock()
        engine.listeners.append(self._listen)

    def watch(self) -> Watcher:
        """Raises Overloaded if too many are open."""
        if len(self.watchers) >= MOST_WATCHERS:
            raise Overloaded(
                f"{MOST_WATCHERS} pages watch the engine already: close one, or try again later."
            )
        watcher = Watcher(asyncio.Event())
        self.watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self.watchers.discard(watcher)

    async def events(self, watcher: Watcher) -> AsyncIterator[str]:
        """A frame at once, and then one whenever something has happened, until the server has nothing more to do for good."""
        sent = 0
        while True:
            with contextlib.suppress(
                EngineDead, TimeoutError
            ):  # in a step that takes long: the view stays as it was
                await asyncio.wait_for(self._look(), PULSE)
            frame = self.frame(sent)
            sent = frame["step"]
            yield event({**frame})
            if self.engine.draining and not self.engine.in_flight:
                return  # a stream that stays open would hold up the shutdown
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watcher.news.wait(), PULSE)
            watcher.news.clear()
            await asyncio.sleep(1 / FRAMES)

    async def _look(self) -> None:
        """Bring the view up to date, once for all who watch: it takes time from the steps. Raises EngineDead."""
        async with self._looking:
            happened = self._happened
            if self._viewed < happened:
                self._view = await self.engine.call(look)
                self._viewed = happened

    def _listen(self, step: Step, spoke: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        for ticket in spoke:
            if ticket.last_token is None:
                self.first.append(now - ticket.arrived)
            else:
                self.between.append(now - ticket.last_token)
        self.tokens.append((now, len(step.said)))
        if step.record is not None:
            self.count += 1
            rows = [
                (each.request_id, each.prefill_tokens, each.decode_tokens)
                for each in step.record.sequences
            ]
            self.steps.append(
                {"number": self.count, "rows": rows, "preempted": step.record.preempted}
            )
        self._happened += 1
        for watcher in self.watchers:
            watcher.news.set()

    def frame(self, after: int) -> Frame:
        """A frame with the steps behind number `after`."""
        now = time.perf_counter()
        recent = [(when, count) for when, count in self.tokens if now - when < RECENT]
        span = max(0.2, now - recent[0][0]) if recent else 1.0
        pool = self.engine.engine.scheduler.pool
        return {
            **self._view,
            "alive": self.engine.alive,
            "blocks": pool.count,
            "block_size": pool.block_size,
            "step": self.count,
            "steps": [step for step in self.steps if step["number"] > after],
            "tokens_per_second": sum(count for _, count in recent) / span,
            "ttft": median(self.first),
            "itl": median(self.between),
        }


def median(values: deque[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
