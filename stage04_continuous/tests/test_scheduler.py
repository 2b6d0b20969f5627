"""The scheduler: its decisions one by one. Random lives of it are in test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Wipe, Work
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import Scheduler

GREEDY = SamplingParams(seed=0)
WORD = Token(1, None, None)


def ask(scheduler, length, id="", priority=0):
    request = Request([1] * length, GREEDY, id=id, priority=priority)
    scheduler.add(request)
    return request


def step(scheduler):
    """One pass: (id, slot, start, count, samples) of each share, and it counts as computed."""
    plan = scheduler.schedule()
    scheduler.advance(plan)
    for work in plan.work:
        if work.rows:
            work.request.output.append(WORD)
    return [
        (work.request.id, work.table, work.start, work.count, work.rows == 1) for work in plan.work
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_sequences": 0}, "at least 1 (slot|sequence at a time), not 0"),
    ({"max_sequences": 8, "token_budget": 7}, "budget of 7 tokens a step is too small for 8 s"),
    ({"max_sequences": 1, "token_budget": 0}, "budget of 0 tokens"),
    ({"policy": "lifo"}, "Unknown policy 'lifo': choose one of fcfs, priority"),
    ({"max_chunk": 0}, "at least 1 token, not 0"),
    ({"patience": 0}, "at least 1 step, not 0"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=str)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(**options)


def test_a_long_prompt_goes_in_chunks_and_samples_after_the_last():
    scheduler = Scheduler(max_sequences=1, token_budget=20, max_chunk=4)
    ask(scheduler, 10, "a")
    assert [step(scheduler) for _ in range(5)] == [
        [("a", 0, 0, 4, False)],
        [("a", 0, 4, 4, False)],
        [("a", 0, 8, 2, True)],
        [("a", 0, 10, 1, True)],
        [("a", 0, 11, 1, True)],
    ]
    assert scheduler.step == 5


def test_decodes_go_first_and_prompts_share_the_rest():
    scheduler = Scheduler(max_sequences=4, token_budget=8)
    ask(scheduler, 12, "long")
    ask(scheduler, 2, "b")
    assert step(scheduler) == [("long", 0, 0, 8, False)]
    assert step(scheduler) == [("long", 0, 8, 4, True), ("b", 1, 0, 2, True)]
    ask(scheduler, 9, "c")
    ask(scheduler, 3, "d")
    decodes = [("long", 0, 12, 1, True), ("b", 1, 2, 1, True)]
    assert step(scheduler) == [*decodes, ("c", 2, 0, 6, False)]
    assert step(scheduler)[2:] == [("c", 2, 6, 3, True), ("d", 3, 0, 3, True)]


def test_a_decode_overtakes_a_prompt_that_was_admitted_before_it():
    scheduler = Scheduler(max_sequences=2, token_budget=4, max_chunk=3)
    ask(scheduler, 9, "long")
    ask(scheduler, 1, "short")
    assert step(scheduler) == [("long", 0, 0, 3, False), ("short", 1, 0, 1, True)]
    assert step(scheduler) == [("short", 1, 1, 1, True), ("long", 0, 3, 3, False)]


def test_without_chunks_a_prompt_runs_whole_and_none_overtakes_it():
    scheduler = Scheduler(max_sequences=4, token_budget=10, chunked=False)
    first = ask(scheduler, 6, "a")
    ask(scheduler, 10, "big")
    ask(scheduler, 1, "small")
    assert step(scheduler) == [("a", 0, 0, 6, True)]
    # There is a slot for "small", but "big" is first in line.
    assert step(scheduler) == [("a", 0, 6, 1, True)]
    scheduler.finish(first)
    assert step(scheduler) == [("big", 0, 0, 10, True)]
    assert step(scheduler) == [("big", 0, 10, 1, True), ("small", 1, 0, 1, True)]
    with pytest.raises(UserError, match="has 11 tokens and a step has room for 10: allow chunks"):
        ask(scheduler, 11)
    assert scheduler.unfinished == 2


def test_the_lowest_free_slot_is_taken_and_a_freed_one_is_filled_in_the_next_pass():
    scheduler = Scheduler(max_sequences=3)
    a, b, c, *_ = [ask(scheduler, 1, id) for id in "abcdef"]
    assert [(id, slot) for id, slot, *_ in step(scheduler)] == [("a", 0), ("b", 1), ("c", 2)]
    scheduler.finish(c)
    scheduler.finish(b)
    assert (b.slot, b.state, scheduler.free_slots) == (-1, State.FINISHED, [1, 2])
    assert [(id, slot) for id, slot, *_ in step(scheduler)] == [("a", 0), ("d", 1), ("e", 2)]
    scheduler.finish(a)
    assert [(id, slot) for id, slot, *_ in step(scheduler)] == [("d", 1), ("e", 2), ("f", 0)]


@pytest.mark.parametrize("priority, patience", [(1, 1), (3, 5), (10, 4)])
def test_no_request_starves_under_a_constant_stream_of_urgent_ones(priority, patience):
    """One slot, one urgent arrival a pass: the modest one runs when it is level with a newcomer, to
    the pass. The newcomer's one step of waiting counts when patience is 1."""
    scheduler = Scheduler(max_sequences=1, policy="priority", patience=patience)
    modest, passes = ask(scheduler, 1, "modest", priority), 0
    while modest.state is State.WAITING and passes < 99:
        ask(scheduler, 1, "urgent", 0)
        (work,) = scheduler.schedule().work
        scheduler.finish(work.request)
        passes += 1
    assert passes == priority * patience + (patience == 1)


@pytest.mark.parametrize("policy, order", [("fcfs", "abcd"), ("priority", "bdac")])
def test_the_policy_decides_who_is_next_and_ties_go_by_arrival(policy, order):
    scheduler, served = Scheduler(max_sequences=1, policy=policy), ""
    for id, priority in zip("abcd", (1, 0, 1, 0), strict=True):
        ask(scheduler, 1, id, priority)
    while scheduler.unfinished:
        served += step(scheduler)[0][0]
        scheduler.finish(scheduler.running[0])
    assert served == order


def test_work_knows_its_prompt_tokens():
    request = Request([1] * 5, GREEDY)
    shares = [(0, 5), (0, 3), (3, 2), (5, 1), (3, 4), (0, 9), (7, 2)]
    prefill = [Work(request, 0, *share, rows=1).prefill_tokens for share in shares]
    assert prefill == [5, 3, 2, 0, 2, 5, 0]


def test_a_slot_is_wiped_as_far_as_its_last_sequence_came():
    """One wipe a new sequence, before the pass; a sequence that goes on keeps what it has."""
    scheduler = Scheduler(max_sequences=1)
    first = ask(scheduler, 5)
    plan = scheduler.schedule()
    assert plan.moves == [Wipe(0, 0)]
    scheduler.advance(plan)
    first.output.append(WORD)
    assert scheduler.schedule().moves == []
    scheduler.finish(first)
    ask(scheduler, 3)
    assert scheduler.schedule().moves == [Wipe(0, 6)]
