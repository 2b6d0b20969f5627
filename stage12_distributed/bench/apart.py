"""Prefill and decode in two processes, measured: `python -m stage12_distributed disaggregated`.

Some streams decode while long prompts arrive, on one engine with all threads, and on two processes
with half the threads each.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shared import cli
from shared.errors import UserError
from stage04_continuous.request import Request
from stage05_paged.engine import make

from ..disaggregated.processes import Job, disaggregated
from ..simulation.passes import VOCABULARY, greedy

TOGETHER, APART = "together", "apart"  # in results, too
ABOUT = (
    "Prefill and decode in two processes over one memory, against one engine that does both: how "
    "long streams wait between tokens while long prompts arrive, and what that costs."
)
EXAMPLE = "  python -m stage12_distributed disaggregated --model gpt2 --random-weights"


@dataclass(frozen=True)
class Load:
    """`streams` requests that decode, and `long` prompts that arrive one after the other. All other
    fields are numbers of tokens."""

    streams: int = 4
    prompt: int = 32
    answer: int = 96
    long: int = 4
    long_prompt: int = 512
    long_answer: int = 4

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of the streams, then the long ones."""
        rng, lengths = random.Random(0), [self.prompt] * self.streams
        lengths += [self.long_prompt] * self.long
        return [rng.choices(range(VOCABULARY), k=length) for length in lengths]


def run(engine: Any, load: Load) -> dict[str, Any]:
    """Run a load. Returns its seconds, the seconds between two tokens of a stream ("itl"), and the
    tokens of each request ("ids"). Raises UserError if one fails."""
    prompts = load.prompts
    long = iter(prompts[load.streams :])
    engine.generate([[1] * 40], greedy(2))  # warms up
    times: dict[str, list[float]] = {}
    requests, started = [], time.perf_counter()

    def add(prompt: Sequence[int], tokens: int) -> str:
        requests.append(engine.add(Request(prompt, greedy(tokens))))
        return str(requests[-1].id)

    for prompt in prompts[: load.streams]:
        times[add(prompt, load.answer)] = []
    arriving = add(next(long), load.long_answer) if load.long else ""
    while engine.requests:
        for name, token in engine.step():
            if name in times:
                times[name].append(time.perf_counter())
            elif name == arriving and token.finish_reason:
                with contextlib.suppress(StopIteration):
                    arriving = add(next(long), load.long_answer)
    seconds = time.perf_counter() - started
    for error in filter(None, (request.output.error for request in requests)):
        raise UserError(str(error))
    return {
        "seconds": seconds,
        "itl": [b - a for stream in times.values() for a, b in pairwise(stream)],
        "ids": [request.output.token_ids for request in requests],
    }


def compare(job: Job, load: Load, threads: int) -> dict[str, dict[str, Any]]:
    """Run the load on one engine with all `threads`, and two processes with half of them each."""
    half = replace(job, threads=max(1, threads // 2))
    with disaggregated(half) as engine:
        model, apart = engine.engine.runner.model, run(engine, load)
    torch.set_num_threads(threads)
    together = make(model, contexts=job.decode, **cli.cache_options(job.kv_dtype))
    return {TOGETHER: run(together, load), APART: apart}


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed disaggregated", ABOUT, EXAMPLE)
    cli.add_model_options(parser)
    cli.add_format_options(parser)
    options = parser.parse_args(argv)
    dtype = str(cli.choose_dtype(options.dtype, torch.device("cpu"))).removeprefix("torch.")
    formats: Any = {"weights": options.weights, "kv_dtype": options.kv_dtype}
    job = Job(options.model, options.random_weights, dtype, **formats)
    results = compare(job, Load(), options.threads or torch.get_num_threads())
    print(f"{'':10} {'ITL p50':>10} {'ITL p99':>10} {'tok/s':>10}")
    for name, result in results.items():
        low, high = (1e3 * float(np.percentile(result["itl"], percent)) for percent in (50, 99))
        rate = sum(map(len, result["ids"])) / result["seconds"]
        print(f"{name:10} {low:7.1f} ms {high:7.1f} ms {rate:10.1f}")
    same = results[TOGETHER]["ids"] == results[APART]["ids"]
    print(f"{'The same' if same else 'Different'} tokens in both.")
    return 0


if __name__ == "__main__":
    cli.run(main)
