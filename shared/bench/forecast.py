"""Predictions: what a workload's passes must cost, from operations, bytes and the scheduler's own
decisions, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.roofline import Cost, Lengths, Part, pass_cost, static_costs
from stage01_forward.generation import Token
from stage04_continuous.request import Request
from stage04_continuous.scheduler import Scheduler

from .kit import greedy
from .rows import Row

STATIC, CONTINUOUS = "stage 03, static", "stage 04, continuous"


def costs(row: Row) -> list[Cost]:
    """The costs of the passes that a row's engine makes: STATIC with the row's "slots", or
    CONTINUOUS with its "budget" too."""
    if row.variant == STATIC:
        return static_costs(row.config, row.kind, row.lengths, row["slots"])
    passes = simulate(Scheduler(row["slots"], row["budget"]), row.lengths)
    return [pass_cost(row.config, row.kind, parts) for parts in passes]


def least(row: Row) -> float:
    """The least seconds for all those passes, by the machine's limits."""
    return row.least(costs(row))


def simulate(
    scheduler: Any,
    arrivals: Sequence[tuple[int, int, int]] | Lengths,
    note: Callable[[], object] = int,
) -> list[list[Part]]:
    """The passes that `scheduler` plans for requests, step by step as in an engine but without a
    model; `note` is called in each.

    arrivals: (step, tokens of prompt, tokens of answer), or without the step: all at the start. All
    tokens of a prompt are the request's number, and those of an answer are 0.
    """
    late = [
        (sum(step), number, Request([number] * prompt, greedy(answer)))
        for number, (*step, prompt, answer) in enumerate(arrivals)
    ]
    late.sort(key=lambda arrival: arrival[:2])
    passes, step = list[list[Part]](), 0
    while late or scheduler.unfinished:
        while late and late[0][0] <= step:
            scheduler.add(late.pop(0)[2])
        if plan := scheduler.schedule():
            parts = ((part.request.prompt_ids[0], part) for part in plan.work)
            passes.append([Part(n, part.start, part.count, bool(part.rows)) for n, part in parts])
            note()
        scheduler.advance(plan)
        for request in [part.request for part in plan.work if part.rows]:
            ended = len(request.output.token_ids) + 1 == request.sampling.max_tokens
            request.output.append(Token(0, None, "length" if ended else None))
            if ended:
                scheduler.finish(request)
        step += 1
    return passes
