"""Loads that stage 07 has measured, beside the same loads as simulated."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from stage07_loadtest import results
from stage07_loadtest.client import Record

from .passes import VOCABULARY, PassTime
from .simulator import Ask, Cell, Fleet

Times = tuple[float, Sequence[float]]  # a request's arrival, and those of its tokens


def times_of(records: Iterable[Record]) -> list[Times]:
    return [(r.intended, np.repeat(r.chunks, r.chunk_tokens).tolist()) for r in records]


def stored(folder: Path) -> Iterator[tuple[str, list[Ask], list[Times]]]:
    """The points of a run that stage 07 has kept: the load, its requests, and their times. Prompts
    keep only their lengths, and have nothing in common. Raises UserError for a folder without a
    run."""
    run, rng = results.load(folder), random.Random("replay")
    for point, records in zip(run.points, results.load_requests(folder), strict=True):
        good = [record for record in records if record.failure is None]
        prompts = (rng.choices(range(VOCABULARY), k=r.prompt_tokens or 1) for r in good)
        pairs = zip(prompts, good, strict=True)
        asks = [Ask(prompt, r.asked_tokens, r.intended) for prompt, r in pairs]
        yield point.load, asks, times_of(good)


def lines(folder: Path, pass_time: PassTime, cell: Cell) -> Iterator[str]:
    """For each point and latency of a stored run: p50 and p99 in ms, measured and simulated. What
    HTTP adds to the first token is taken from the first point."""
    yield f"{'load':<18}latency{'p50':>10}{'simulated':>19}{'p99':>10}{'simulated':>19}"
    http = None
    for name, asks, times in stored(folder):
        requests = Fleet(cell, pass_time, asks).run().requests
        real, simulated = quantiles(times), quantiles((s.ask.at, s.tokens) for s in requests)
        http = real["ttft"][0] - simulated["ttft"][0] if http is None else http
        for latency, values in real.items():
            others = [value + http * (latency != "itl") for value in simulated[latency]]
            cells = (
                f"{a * 1e3:>10,.1f}{f'{b * 1e3:,.1f} ({b / a - 1:+.0%})':>19}"
                for a, b in zip(values, others, strict=True)
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
    return {name: np.percentile(row, (50, 99)).tolist() for name, row in values.items()}
