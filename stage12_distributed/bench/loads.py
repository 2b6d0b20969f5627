"""Loads that the simulator must predict: requests of stage 07 at stage 06's server, and the times
of its passes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from shared.measure import process
from stage06_serving.inside import Inside
from stage07_loadtest import schedule, workload
from stage07_loadtest.load import load

from ..simulation.passes import Meter
from ..simulation.replay import Times, times_of
from ..simulation.simulator import Ask

TURNS = 3  # of each load, in turn: a machine speeds up and slows down from minute to minute


@dataclass(frozen=True)
class Run:
    """A load as stage 07 measured it, and the engine's passes during the load."""

    share: float  # of the capacity; 0: the closed loop that found it
    rate: float  # requests a second
    asks: list[Ask]
    times: list[Times]
    steps: list[tuple[float, ...]]


async def serve(
    options: list[str], shares: Sequence[float], users: int, count: int, client: Executor
) -> list[Run]:
    inside, runs, most = Inside(options), list[Run](), 0.0
    meter = Meter(inside.engine)
    async with inside.serving() as url:
        turns = [(share, turn) for turn in range(TURNS) for share in shares]
        for share, turn in [(0.0, 0), *turns]:
            warm, many = (0, count // TURNS) if share else (users, 3 * users)
            asks = workload.make("short", warm + many, f"stage 12, {share}, {turn}")
            when = schedule.closed(users, many)
            if share:
                when = schedule.poisson(share * most, many, seed=round(100 * share) + turn)
            meter.steps.clear()
            job = client.submit(load, url, asks, when, warmup=warm)
            records = (result := await asyncio.wrap_future(job)).records
            if failed := [record.detail for record in records if record.failure]:
                raise AssertionError(f"{len(failed)} requests failed, such as: {failed[0]}")
            most = most or many / result.duration
            pairs = list(zip(asks[warm:], records, strict=True))
            sent = [Ask(list(map(int, a.prompt)), a.max_tokens, r.intended) for a, r in pairs]
            runs.append(Run(share, share * most, sent, times_of(records), list(meter.steps)))
    return runs


def loads(options: list[str], shares: Sequence[float], users: int, count: int) -> list[Run]:
    """Run a closed loop of `users`, whose throughput is the capacity, then `count` random arrivals
    at each of `shares` of it, in TURNS alternating parts. The client is a process of its own.

    options: of `python -m stage06_serving`. Raises AssertionError if a request fails.
    """
    with process() as client:
        return asyncio.run(serve(options, shares, users, count, client))
