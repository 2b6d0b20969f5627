"""One point of a load test: warm up, send each request when the schedule says, record the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from .client import Record, Target, open_session, send
from .schedule import Schedule
from .server import Counters, settled
from .workload import Ask

SAMPLING = 0.01  # seconds between two samples of the requests in flight


@dataclass
class Point:
    """One load, measured once."""

    schedule: Schedule
    records: list[Record]  # without warm-up, by index
    duration: float  # seconds, to the end of the last request
    client_cpu: float  # share of one core that this process took
    # The server's counters over the measured part; None: it has no /metrics that we know.
    server: Counters | None
    in_flight: list[tuple[float, int]]  # (seconds, requests in flight), sampled at even intervals
    interrupted: bool = False  # by Ctrl-C: unfinished requests are left out


async def run_point(
    target: Target,
    asks: Sequence[Ask],
    schedule: Schedule,
    *,
    warmup: int = 0,
    seconds: float | None = None,
) -> Point:
    """Measure one point: the first `warmup` requests at once and unrecorded, the rest as scheduled.

    No request starts later than `seconds` after the start; requests in flight are awaited. When
    cancelled it returns what was measured so far, marked as interrupted. An open loop needs exactly
    one request per start.
    """
    measured = asks[warmup:]
    async with open_session(target) as session:
        await asyncio.gather(
            *(send(session, target, ask, 0.0, time.perf_counter) for ask in asks[:warmup])
        )
        before = await settled(session, target)
        after, interrupted, run = None, False, Run(session, target, measured, seconds)
        try:
            await run.through(schedule)
            after = await settled(session, target) if before is not None else None
        except asyncio.CancelledError:  # Ctrl-C: keep what there is
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            interrupted = True
    return Point(
        schedule=schedule,
        records=sorted(run.records, key=lambda record: record.index),
        duration=run.duration,
        client_cpu=run.cpu / run.duration if run.duration else 0.0,
        server=after.since(before) if before and after else None,
        in_flight=run.in_flight,
        interrupted=interrupted,
    )


class Run:
    """The measured part of a point."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        asks: Sequence[Ask],
        seconds: float | None,
    ) -> None:
        self.session, self.target, self.asks, self.seconds = session, target, asks, seconds
        self.records: list[Record] = []  # in the order in which they ended
        self.in_flight: list[tuple[float, int]] = []
        self.duration = self.cpu = self._origin = 0.0
        self._now = 0  # requests in flight

    def clock(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._origin

    async def through(self, schedule: Schedule) -> None:
        """Send all requests and wait for their ends. When cancelled, keep the records so far."""
        sampling = asyncio.create_task(self._sample())
        cpu, self._origin = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                if schedule.users is not None:
                    turns = enumerate(self.asks)
                    for _ in range(schedule.users):
                        group.create_task(self._user(turns))
                else:
                    await self._dispatch(schedule.starts or [], group)
        finally:
            sampling.cancel()
            self.cpu, self.duration = time.process_time() - cpu, self.clock()

    async def _user(self, turns: Iterator[tuple[int, Ask]]) -> None:
        """A closed loop: send the next request when the last one has ended."""
        free = 0.0
        for index, ask in turns:
            free = (await self._one(index, ask, free)).end
            if self.seconds is not None and free > self.seconds:
                break

    async def _dispatch(self, starts: Sequence[float], group: asyncio.TaskGroup) -> None:
        """An open loop: send each request at its time, whether or not others have ended."""
        for index, (start, ask) in enumerate(zip(starts, self.asks, strict=True)):
            if self.seconds is not None and start > self.seconds:
                break
            if (early := start - self.clock()) > 0:
                await asyncio.sleep(early)
            group.create_task(self._one(index, ask, start))

    async def _one(self, index: int, ask: Ask, intended: float) -> Record:
        self._now += 1
        try:
            record = await send(self.session, self.target, ask, intended, self.clock, index)
        finally:
            self._now -= 1
        self.records.append(record)
        return record

    async def _sample(self) -> None:
        due = 0.0
        while True:
            self.in_flight.append((self.clock(), self._now))
            due += SAMPLING
            await asyncio.sleep(max(0.0, due - self.clock()))
