"""Predictions: what the passes of a workload must cost, by operations, bytes and the scheduler's
own decisions, before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shared.checkpoint import PRESETS, Config
from shared.roofline import Cost, Lengths, Part, pass_cost, static_costs
from stage04_continuous.engine import Engine
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.scheduler import Scheduler

from .kit import greedy
from .rows import Row

SINGLE, STATIC, CONTINUOUS = "stage 02, one request", "stage 03, static", "stage 04, continuous"
EXAMPLE = replace(PRESETS["tiny"], n_positions=2**20)  # nothing of it but its size is used


def costs(row: Row) -> list[Cost]:
    """Of the passes that the engine of a row makes: SINGLE, STATIC with the row's "slots", or
    CONTINUOUS with its "budget" too."""
    if row.variant == CONTINUOUS:
        passes = simulate(Scheduler(row["slots"], row["budget"]), row.lengths).passes
        return [pass_cost(row.config, row.kind, parts) for parts in passes]
    size = row["slots"] if row.variant == STATIC else 1
    return static_costs(row.config, row.kind, row.lengths, size)


def least(row: Row) -> float:
    """Seconds of all those passes, by the machine's limits."""
    return row.least(costs(row))


class Idle:
    """A runner that computes nothing: every logit is 0."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def move(self, moves: Sequence[Any]) -> None:
        """There is no memory."""

    def run(self, ids: Sequence[int], shares: Sequence[Any], rows: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(rows), self.config.vocab_size)


class Watch:
    """Notes what each pass computes, and what `reserved` returns during it."""

    def __init__(self, scheduler: Any, reserved: Callable[[], int]) -> None:
        self.scheduler, self.reserved = scheduler, reserved
        self.passes: list[list[Part]] = []
        self.memory = [0, 0]  # tokens reserved and used, added up over the passes

    def before(self, plan: Plan) -> None:
        if plan:
            self.passes.append(
                [
                    Part(one.request.prompt_ids[0], one.start, one.count, bool(one.rows))
                    for one in plan.work
                ]
            )
            self.memory[0] += self.reserved()
            self.memory[1] += sum(request.computed for request in self.scheduler.running)
            self.memory[1] += sum(one.count for one in plan.work)

    def after(self, plan: Plan) -> None:
        """The pass has been noted."""


def simulate(
    scheduler: Any,
    arrivals: Sequence[tuple[int, int, int]] | Lengths,
    reserved: Callable[[], int] = int,
) -> Watch:
    """The passes that `scheduler` plans of requests, by the real engine without a model.

    arrivals: (step, tokens of prompt, tokens of answer), or without the step: all at the start. All
    tokens of a prompt are the request's number.
    """
    watch = Watch(scheduler, reserved)
    runner = Idle(replace(EXAMPLE, vocab_size=len(arrivals) + 1))
    engine = Engine(runner, scheduler, observers=[watch])
    late = [
        (sum(step), number, Request([number] * prompt, greedy(answer)))
        for number, (*step, prompt, answer) in enumerate(arrivals)
    ]
    late.sort(key=lambda arrival: arrival[:2])
    steps = 0
    while late or engine.requests:
        while late and late[0][0] <= steps:
            engine.add(late.pop(0)[2])
        engine.step()
        steps += 1
    return watch
