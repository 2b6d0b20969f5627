"""Predictions: what the passes of a workload must cost, by operations, bytes and the scheduler's
own decisions, before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shared.checkpoint import PRESETS
from shared.roofline import Cost, Lengths, Part, pass_cost, static_costs
from stage04_continuous.engine import Engine
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.scheduler import Scheduler

from .kit import greedy
from .rows import Row

STATIC, CONTINUOUS = "stage 03, static", "stage 04, continuous"


def costs(row: Row) -> list[Cost]:
    """Of the passes that the engine of a row makes, STATIC with the row's "slots", or CONTINUOUS
    with its "budget" too."""
    if row.variant == STATIC:
        return static_costs(row.config, row.kind, row.lengths, row["slots"])
    passes = simulate(Scheduler(row["slots"], row["budget"]), row.lengths)
    return [pass_cost(row.config, row.kind, parts) for parts in passes]


def least(row: Row) -> float:
    """Seconds of all those passes, by the machine's limits."""
    return row.least(costs(row))


class Idle:
    """A runner that computes nothing: every logit is 0."""

    def __init__(self, requests: int) -> None:
        self.config = replace(PRESETS["tiny"], n_positions=2**20, vocab_size=requests + 1)

    def move(self, moves: Sequence[Any]) -> None:
        """There is no memory."""

    def run(self, ids: Sequence[int], shares: Sequence[Any], rows: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(rows), self.config.vocab_size)


class Watch:
    """An engine's observer that notes what each pass computes, and calls `note` in it. A request is
    known by the first token of its prompt."""

    def __init__(self, note: Callable[[], object]) -> None:
        self.note = note
        self.passes: list[list[Part]] = []

    def before(self, plan: Plan) -> None:
        if plan:
            parts = ((one.request.prompt_ids[0], one) for one in plan.work)
            self.passes.append(
                [Part(number, one.start, one.count, bool(one.rows)) for number, one in parts]
            )
            self.note()

    def after(self, plan: Plan) -> None:
        """The pass has been noted."""


def simulate(
    scheduler: Any,
    arrivals: Sequence[tuple[int, int, int]] | Lengths,
    note: Callable[[], object] = int,
) -> list[list[Part]]:
    """The passes that `scheduler` plans of requests, by the real engine without a model; `note` is
    called in each.

    arrivals: (step, tokens of prompt, tokens of answer), or without the step: all at the start. All
    tokens of a prompt are the request's number.
    """
    watch, steps = Watch(note), 0
    engine = Engine(Idle(len(arrivals)), scheduler, observers=[watch])
    late = [
        (sum(step), number, Request([number] * prompt, greedy(answer)))
        for number, (*step, prompt, answer) in enumerate(arrivals)
    ]
    late.sort(key=lambda arrival: arrival[:2])
    while late or engine.requests:
        while late and late[0][0] <= steps:
            engine.add(late.pop(0)[2])
        engine.step()
        steps += 1
    return watch.passes
