"""Stage 07's load on stage 06's server, whose passes are timed: what the simulator must predict."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shared.measure import process
from stage06_serving.inside import Inside
from stage07_loadtest import results, schedule, workload
from stage07_loadtest.client import Record
from stage07_loadtest.load import load

from .passes import VOCABULARY, Meter, PassTime
from .simulator import Ask, Cell, Fleet

TURNS = 3  # of each load, in turn: a machine speeds up and slows down from minute to minute
Times = tuple[float, Sequence[float]]  # a request's arrival, and those of its tokens


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
            runs.append(Run(share, share * most, own, times_of(records), list(meter.steps)))
    return runs


def measure(options: list[str], shares: Sequence[float], users: int, count: int) -> list[Run]:
    """Run a closed loop of `users`, whose throughput is the capacity, then `count` random arrivals
    at each of `shares` of it, in TURNS alternating parts. The client is a process of its own.

    options: of `python -m stage06_serving`. Raises AssertionError if a request fails.
    """
    with process() as client:
        return asyncio.run(serve(options, shares, users, count, client))


def times_of(records: Iterable[Record]) -> list[Times]:
    return [(one.intended, np.repeat(one.chunks, one.chunk_tokens).tolist()) for one in records]


def stored(folder: Path) -> Iterator[tuple[str, list[Ask], list[Times]]]:
    """The points of a run that stage 07 has kept: the load, its requests, and their times. Prompts
    keep only their lengths, and have nothing in common. Raises UserError for a folder without a
    run."""
    run, chance = results.load(folder), random.Random("replay")
    for point, records in zip(run.points, results.load_requests(folder), strict=True):
        good = [one for one in records if one.failure is None]
        prompts = (chance.choices(range(VOCABULARY), k=one.prompt_tokens or 1) for one in good)
        pairs = zip(prompts, good, strict=True)
        asks = [Ask(prompt, one.asked_tokens, one.intended) for prompt, one in pairs]
        yield point.load, asks, times_of(good)


def lines(folder: Path, pass_time: PassTime, cell: Cell) -> Iterator[str]:
    """For each point and latency of a stored run: p50 and p99 in ms, measured and simulated. What
    HTTP adds to the first token is taken from the first point."""
    yield f"{'load':<18}latency{'p50':>10}{'simulated':>19}{'p99':>10}{'simulated':>19}"
    http = None
    for name, asks, times in stored(folder):
        lives = Fleet(cell, pass_time, asks).run().lives
        real, made = quantiles(times), quantiles((one.ask.at, one.tokens) for one in lives)
        http = real["ttft"][0] - made["ttft"][0] if http is None else http
        for latency, found in real.items():
            own = [value + http * (latency != "itl") for value in made[latency]]
            cells = (
                f"{a * 1e3:>10,.1f}{f'{b * 1e3:,.1f} ({b / a - 1:+.0%})':>19}"
                for a, b in zip(found, own, strict=True)
            )
            yield f"{name:<18}{latency.upper():<7}{''.join(cells)}"


def quantiles(requests: Iterable[Times]) -> dict[str, list[float]]:
    """p50 and p99 in seconds, of each latency."""
    requests = list(requests)
    values = {
        "ttft": [tokens[0] - arrived for arrived, tokens in requests],
        "itl": [b - a for _, tokens in requests for a, b in pairwise(tokens)],
        "e2e": [tokens[-1] - arrived for arrived, tokens in requests],
    }
    return {name: np.percentile(own, (50, 99)).tolist() for name, own in values.items()}
