"""The live view of the page: frames over server-sent events, made of statuses and step records."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

from stage05_paged.records import BlocksRecord

from .async_engine import AsyncEngine, EngineDead, Overloaded, Step, Ticket
from .sse import event
from .status import AnyEngine, Status

FRAMES = 8  # a second, at most
PULSE = 1.0  # most seconds between two frames: a page can tell an idle server from a dead one
STEPS = 256  # most steps in a frame, the newest
MOST_BLOCKS = 2**16  # on the map
MOST_WATCHERS = 16  # pages: each costs the loop a frame FRAMES times a second
RECENT = 3.0  # seconds over which the token rate is taken


def look(engine: AnyEngine) -> tuple[Status, list[tuple[int, int]]]:
    """The status and the block map that goes with it. Runs on the engine's thread."""
    runs = groupby(engine.map()[:MOST_BLOCKS])
    return engine.status, [(state, len(list(run))) for state, run in runs]


class Live:
    """Keeps the engine's last seconds for the pages that watch; cheap while no page does."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.watchers: set[asyncio.Event] = set()  # open pages; set if there is something to show
        self.steps: deque[tuple[int, BlocksRecord]] = deque(maxlen=STEPS)  # with their numbers
        self.tokens: deque[tuple[float, int]] = deque(maxlen=256)  # times, and tokens generated
        self.first: deque[float] = deque(maxlen=64)  # seconds to the first token, newest requests
        self.between: deque[float] = deque(maxlen=512)  # seconds between tokens
        self.count = 0  # steps since the start
        self._status = engine.status
        self._map: list[tuple[int, int]] = []
        self._changes = 0  # reported by the engine
        self._seen = -1  # changes that `_status` and `_map` show
        self._looking = asyncio.Lock()
        engine.listeners.append(self._listen)

    def watch(self) -> asyncio.Event:
        """Raises Overloaded if too many pages are open."""
        if len(self.watchers) >= MOST_WATCHERS:
            raise Overloaded(
                f"{MOST_WATCHERS} pages already watch the engine: close one, or try again later."
            )
        watcher = asyncio.Event()
        self.watchers.add(watcher)
        return watcher

    def leave(self, watcher: asyncio.Event) -> None:
        self.watchers.discard(watcher)

    async def events(self, watcher: asyncio.Event) -> AsyncIterator[bytes]:
        """A frame at once, and one after each change, until the server has drained."""
        sent = 0
        while True:
            # In a long step, or without an engine, the last status is shown again.
            with contextlib.suppress(EngineDead, TimeoutError):
                await asyncio.wait_for(self._look(), PULSE)
            frame = self.frame(sent)
            sent = frame["step"]
            yield event(frame)
            if self.engine.draining and not self.engine.in_flight:
                return  # an open stream would hold up the shutdown
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watcher.wait(), PULSE)
            watcher.clear()
            await asyncio.sleep(1 / FRAMES)

    async def _look(self) -> None:
        """Update status and map, once for all watchers: it delays the steps. Raises EngineDead."""
        async with self._looking:
            changes = self._changes
            if self._seen < changes:
                self._status, self._map = await self.engine.call(look)
                self._seen = changes

    def _listen(self, step: Step, emitted: list[Ticket], ended: list[Ticket]) -> None:
        now = time.perf_counter()
        for ticket in emitted:
            if ticket.last_token is None:
                self.first.append(now - ticket.arrived)
            else:
                self.between.append(now - ticket.last_token)
        self.tokens.append((now, len(step.tokens)))
        if step.record is not None:
            self.count += 1
            self.steps.append((self.count, step.record))
        self._changes += 1
        for watcher in self.watchers:
            watcher.set()

    def frame(self, after: int) -> dict[str, Any]:
        """An event of /live: all that a page draws, and the steps after number `after`."""
        now, status = time.perf_counter(), self._status
        recent = [(when, count) for when, count in self.tokens if now - when < RECENT]
        span = max(0.2, now - recent[0][0]) if recent else 1.0
        return {
            "map": self._map,  # runs of equal blocks: state, as in `blockmap`, and length
            "running": list(status.running),  # of each sequence: id, and number on the map
            "waiting": status.waiting,  # sequences
            "hit_rate": status.hit_rate,  # of the prefix cache, 0 to 1
            "preemptions": status.preemptions,
            "alive": self.engine.alive,  # if not, the status is the last one
            "blocks": status.blocks,
            "block_size": status.block_size,  # tokens
            "step": self.count,  # number of the newest
            "steps": [step_frame(*step) for step in self.steps if step[0] > after],
            "tokens_per_second": sum(count for _, count in recent) / span,
            "ttft": median(self.first),  # seconds, of the newest requests
            "itl": median(self.between),  # seconds, of the newest tokens
        }


def step_frame(number: int, record: BlocksRecord) -> dict[str, Any]:
    """One forward pass: each sequence with its prefill and decode tokens, and how many lost their
    memory before it."""
    rows = [
        (sequence.request_id, sequence.prefill_tokens, sequence.decode_tokens)
        for sequence in record.sequences
    ]
    return {"number": number, "rows": rows, "preempted": record.preempted}


def median(values: deque[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
