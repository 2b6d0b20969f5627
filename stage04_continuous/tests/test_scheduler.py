"""The scheduler: its decisions one by one. Random lives of it are in test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import UserError
from stage04_continuous.plan import Wipe
from stage04_continuous.request import State
from stage04_continuous.scheduler import Scheduler

from .traces import WORD, Trace

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_sequences": 0}, "at least 1 (slot|sequence) at a time, not 0"),
    ({"max_sequences": 8, "token_budget": 7}, "budget of 7 tokens a step is too small for 8 s"),
    ({"max_sequences": 1, "token_budget": 0}, "budget of 0 tokens"),
    ({"policy": "lifo"}, "Unknown policy 'lifo': choose one of fcfs, priority"),
    ({"max_chunk": 0}, "at least 1 token, not 0"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=str)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(**options)


TRACES: dict[str, tuple[Any, ...]] = {  # settings, and what happens (see traces.py)
    "a long prompt goes in chunks and samples after the last": (
        {"max_sequences": 1, "token_budget": 20, "max_chunk": 4},
        *("a9 > a0-4", "a4-8", "a8-9!", "a9-10!", "a10-11!"),
    ),
    "decodes go first and prompts share the rest": (
        {"max_sequences": 4, "token_budget": 8},
        "a12 b2 > a0-8 | b",
        "a8-12! b0-2!",
        "c9 d3 > a12-13! b2-3! c0-6 | d",
        "a13-14! b3-4! c6-9! d0-3!",
    ),
    "a decode overtakes a prompt that was admitted before it": (
        {"max_sequences": 2, "token_budget": 4, "max_chunk": 3},
        *("a9 b1 > a0-3 b0-1!", "b1-2! a3-6"),
    ),
}
ORDERS: dict[str, tuple[Any, ...]] = {
    "first come, first served, whatever the priorities": (
        {"max_sequences": 1},
        *("a1:1 b1 c1:1 d1 > a0-1!", "-a > b0-1!", "-b > c0-1!", "-c > d0-1!"),
    ),
    "the lowest priority is next, and ties go by arrival": (
        {"max_sequences": 1, "policy": "priority"},
        *("a1:1 b1 c1:1 d1 > b0-1!", "-b > d0-1!", "-d > a0-1!", "-a > c0-1!"),
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_plans_step_by_step(name):
    options, *lines = TRACES[name]
    Trace(Scheduler(**options)).play(*lines)


@pytest.mark.parametrize("name", ORDERS)
def test_the_policy_decides_who_is_next_and_ties_go_by_arrival(name):
    options, *lines = ORDERS[name]
    Trace(Scheduler(**options)).play(*lines)


def test_the_lowest_free_slot_is_taken_and_a_freed_one_is_filled_in_the_next_pass():
    trace = Trace(scheduler := Scheduler(max_sequences=3))
    for line, slots in (
        ("a1 b1 c1 d1 e1 f1 g1 > a0-1! b0-1! c0-1!", {"a": 0, "b": 1, "c": 2}),
        ("-c -b > a1-2! d0-1! e0-1!", {"a": 0, "d": 1, "e": 2}),
        ("-a > d1-2! e1-2! f0-1!", {"d": 1, "e": 2, "f": 0}),
    ):
        trace.play(line)
        assert {request.id: request.slot for request in scheduler.running} == slots
    ended = trace.requests["b"]
    assert (ended.slot, ended.state) == (-1, State.FINISHED)
    assert (scheduler.step, scheduler.unfinished) == (3, 4)


@pytest.mark.parametrize("priority, patience", [(1, 1), (3, 5), (10, 4)])
def test_no_request_starves_under_a_constant_stream_of_urgent_ones(priority, patience):
    """One slot, one urgent arrival a pass: the modest one runs when it is level with a newcomer, to
    the pass. The newcomer's one step of waiting counts when patience is 1."""
    trace = Trace(scheduler := Scheduler(max_sequences=1, policy="priority"))
    scheduler.patience = patience
    modest, passes = trace.ask("m", 1, priority), 0
    while modest.state is State.WAITING and passes < 99:
        trace.ask("u", 1)
        (work,) = scheduler.schedule().work
        scheduler.finish(work.request)
        passes += 1
    assert passes == priority * patience + (patience == 1)


def test_a_slot_is_wiped_as_far_as_its_last_sequence_came():
    """One wipe a new sequence, before the pass; a sequence that goes on keeps what it has."""
    trace = Trace(scheduler := Scheduler(max_sequences=1))
    first = trace.ask("a", 5)
    plan = scheduler.schedule()
    assert plan.moves == [Wipe(0, 0)]
    scheduler.advance(plan)
    first.output.append(WORD)
    assert scheduler.schedule().moves == []
    scheduler.finish(first)
    trace.ask("b", 3)
    assert scheduler.schedule().moves == [Wipe(0, 6)]
