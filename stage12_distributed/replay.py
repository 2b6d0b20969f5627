"""Stage 07's load on stage 06's server, whose passes are timed: what the simulator must predict."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shared.measure import process
from stage06_serving.inside import Inside
from stage07_loadtest import schedule, workload
from stage07_loadtest.load import load

from .passes import Meter
from .simulator import Ask

TURNS = 3  # of each load, in turn: a machine gets slower and faster in the course of minutes
Times = tuple[float, Sequence[float]]  # a request's arrival, and those of its tokens


@dataclass(frozen=True)
class Run:
    """A load as stage 07 measured it, and the passes of the engine in the meantime."""

    share: float  # of the capacity; 0: the closed loop that found it
    rate: float  # requests a second
    asks: list[Ask]
    times: list[Times]
    steps: list[tuple[float, ...]]


async def serve(
    options: list[str], shares: Sequence[float], users: int, count: int, client: Executor
) -> list[Run]:
    made, runs, most = Inside(options), list[Run](), 0.0
    meter = Meter(made.engine)
    async with made.serving() as url:
        turns = [(share, turn) for turn in range(TURNS) for share in shares]
        for share, turn in [(0.0, 0), *turns]:
            warm, many = (0, count // TURNS) if share else (users, 3 * users)
            asks = workload.make("short", warm + many, f"stage 12, {share}, {turn}")
            when = schedule.closed(users, many)
            if share:
                when = schedule.poisson(share * most, many, seed=round(100 * share) + turn)
            meter.steps.clear()
            job = client.submit(load, url, asks, when, warmup=warm)
            records = (found := await asyncio.wrap_future(job)).records
            if failed := [record.detail for record in records if record.failure]:
                raise AssertionError(f"{len(failed)} requests failed, such as: {failed[0]}")
            most = most or many / found.duration
            pairs = list(zip(asks[warm:], records, strict=True))
            own = [Ask(list(map(int, a.prompt)), a.max_tokens, r.intended) for a, r in pairs]
            tokens = [np.repeat(r.chunks, r.chunk_tokens).tolist() for r in records]
            times: list[Times] = [(r.intended, t) for r, t in zip(records, tokens, strict=True)]
            runs.append(Run(share, share * most, own, times, list(meter.steps)))
    return runs


def measure(options: list[str], shares: Sequence[float], users: int, count: int) -> list[Run]:
    """A closed loop of `users`, whose throughput is the capacity; then `count` random arrivals at
    each of `shares` of it, in TURNS parts that alternate. The client is a process of its own.

    options: of `python -m stage06_serving`. Raises AssertionError if a request fails.
    """
    with process() as client:
        return asyncio.run(serve(options, shares, users, count, client))


def quantiles(requests: Iterable[Times]) -> dict[str, list[float]]:
    """p50 and p99 in seconds, of each latency."""
    requests = list(requests)
    values = {
        "ttft": [tokens[0] - arrived for arrived, tokens in requests],
        "itl": [b - a for _, tokens in requests for a, b in pairwise(tokens)],
        "e2e": [tokens[-1] - arrived for arrived, tokens in requests],
    }
    return {name: np.percentile(own, (50, 99)).tolist() for name, own in values.items()}
