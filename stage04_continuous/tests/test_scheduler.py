"""The scheduler: its decisions one by one, and then random lives of it, with its promises checked at every step."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.sampling import SamplingParams
from stage04_continuous import scheduler as module
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES, Scheduler, Work

GREEDY = SamplingParams(seed=0)
WORD = Token(1, None, None)


def ask(scheduler, length, id="", priority=0):
    request = Request([1] * length, GREEDY, id=id, priority=priority)
    scheduler.add(request)
    return request


def compute(work):
    """What an engine does with a pass: count what was computed, and append what was sampled."""
    for each in work:
        each.request.computed += each.count
        if each.samples:
            each.request.output.append(WORD)


def step(scheduler):
    """One pass: (id, slot, start, count, samples) of each share, and it counts as computed."""
    work = scheduler.schedule()
    compute(work)
    return [(each.request.id, each.slot, each.start, each.count, each.samples) for each in work]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_sequences": 0}, "at least 1 slot, not 0"),
        (
            {"max_sequences": 8, "token_budget": 7},
            "budget of 7 tokens a step is too small for 8 slots",
        ),
        ({"max_sequences": 1, "token_budget": 0}, "budget of 0 tokens"),
        ({"policy": "lifo"}, "Unknown policy 'lifo': choose one of fcfs, priority"),
        ({"max_chunk": 0}, "at least 1 token, not 0"),
        ({"patience": 0}, "at least 1 step, not 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(UserError, match=message):
        Scheduler(**options)


def test_no_tensors_and_no_clock():
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not names & {"torch", "numpy", "time", "random"}


def test_nothing_to_do():
    assert Scheduler().schedule() == []


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


def test_decodes_go_first_and_prompts_share_the_rest():
    scheduler = Scheduler(max_sequences=4, token_budget=8)
    ask(scheduler, 12, "long")
    ask(scheduler, 2, "b")
    assert step(scheduler) == [("long", 0, 0, 8, False)]
    assert step(scheduler) == [("long", 0, 8, 4, True), ("b", 1, 0, 2, True)]
    ask(scheduler, 9, "c")
    ask(scheduler, 3, "d")
    assert step(scheduler) == [
        ("long", 0, 12, 1, True),
        ("b", 1, 2, 1, True),
        ("c", 2, 0, 6, False),
    ]
    assert step(scheduler) == [
        ("long", 0, 13, 1, True),
        ("b", 1, 3, 1, True),
        ("c", 2, 6, 3, True),
        ("d", 3, 0, 3, True),
    ]


def test_a_decode_overtakes_a_prompt_that_was_admitted_before_it():
    scheduler = Scheduler(max_sequences=2, token_budget=4, max_chunk=3)
    ask(scheduler, 9, "long")
    ask(scheduler, 1, "short")
    assert step(scheduler) == [("long", 0, 0, 3, False), ("short", 1, 0, 1, True)]
    assert step(scheduler) == [("short", 1, 1, 1, True), ("long", 0, 3, 3, False)]


def test_without_chunks_a_prompt_runs_whole_and_nobody_overtakes_it():
    scheduler = Scheduler(max_sequences=4, token_budget=10, chunked=False)
    first = ask(scheduler, 6, "a")
    ask(scheduler, 10, "big")
    ask(scheduler, 1, "small")
    assert step(scheduler) == [("a", 0, 0, 6, True)]
    assert step(scheduler) == [
        ("a", 0, 6, 1, True)
    ]  # there is a slot for "small", but "big" is first in line
    scheduler.finish(first)
    assert step(scheduler) == [("big", 0, 0, 10, True)]
    assert step(scheduler) == [("big", 0, 10, 1, True), ("small", 1, 0, 1, True)]


def test_without_chunks_a_prompt_over_the_budget_is_refused_and_leaves_no_trace():
    scheduler = Scheduler(max_sequences=2, token_budget=10, chunked=False)
    request = Request([1] * 11, GREEDY)
    with pytest.raises(
        UserError,
        match="has 11 tokens and a step has room for 10: allow chunks, or raise the budget",
    ):
        scheduler.add(request)
    assert (request.state, scheduler.unfinished) == (State.NEW, 0)


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


def test_a_waiting_request_can_leave_the_line():
    scheduler = Scheduler(max_sequences=1)
    ask(scheduler, 1, "a")
    waits = ask(scheduler, 1, "b")
    step(scheduler)
    scheduler.finish(waits)
    assert (waits.state, scheduler.waiting, scheduler.free_slots) == (State.FINISHED, [], [])


@pytest.mark.parametrize("state", [State.NEW, State.FINISHED], ids=lambda state: state.value)
def test_only_a_request_that_is_in_can_be_finished(state):
    scheduler = Scheduler()
    request = Request([1], GREEDY)
    request.state = state
    with pytest.raises(RuntimeError, match="cannot go from"):
        scheduler.finish(request)
    assert scheduler.free_slots == list(range(8))


def test_a_request_is_added_once():
    scheduler = Scheduler()
    request = ask(scheduler, 1)
    with pytest.raises(RuntimeError, match="from waiting to waiting"):
        scheduler.add(request)
    assert scheduler.unfinished == 1


def order_of_admission(scheduler, passes):
    """The ids in the order in which they get the only slot; each keeps it for one pass."""
    admitted = []
    for _ in range(passes):
        for each in scheduler.schedule():
            admitted.append(each.request.id)
            scheduler.finish(each.request)
    return admitted


def test_first_come_first_served_does_not_look_at_priority():
    scheduler = Scheduler(max_sequences=1)
    for id, priority in zip("abcd", (5, 0, 3, -7), strict=True):
        ask(scheduler, 1, id, priority)
    assert order_of_admission(scheduler, 4) == list("abcd")


def test_priority_goes_by_priority_and_ties_by_arrival():
    scheduler = Scheduler(max_sequences=1, policy="priority")
    for id, priority in zip("abcdef", (2, 0, 1, 0, -3, 2), strict=True):
        ask(scheduler, 1, id, priority)
    assert order_of_admission(scheduler, 6) == list("ebdcaf")


@pytest.mark.parametrize("priority, patience", [(1, 1), (3, 5), (10, 4)])
def test_nobody_starves_under_a_constant_stream_of_urgent_requests(priority, patience):
    """One slot, one urgent arrival a pass, each answered in one: without ageing the modest one would wait for ever.

    It is level with a newcomer after priority * patience passes, or one later, and then it came first.
    """
    scheduler = Scheduler(max_sequences=1, policy="priority", patience=patience)
    modest = ask(scheduler, 1, "modest", priority)
    for passes in range(priority * patience + 1):
        assert modest.state is State.WAITING or passes == priority * patience
        ask(scheduler, 1, "urgent", 0)
        (work,) = scheduler.schedule()
        scheduler.finish(work.request)
    assert modest.state is State.FINISHED


def test_work_knows_its_prompt_tokens():
    request = Request([1] * 5, GREEDY)
    for start, count, prefill in [
        (0, 5, 5),
        (0, 3, 3),
        (3, 2, 2),
        (5, 1, 0),
        (3, 4, 2),
        (0, 9, 5),
        (7, 2, 0),
    ]:
        assert Work(request, 0, start, count, True).prefill_tokens == prefill


# ---- random lives ------------------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Calls in any order. What the scheduler should do is worked out beside it, from what was asked and nothing else."""

    seen: Counter[str] = (
        Counter()
    )  # over all lives: that what is promised was really put to the test

    @initialize(
        slots=st.integers(1, 4),
        spare=st.integers(0, 9),
        policy=st.sampled_from(POLICIES),
        max_chunk=st.sampled_from([None, 1, 3]),
        chunked=st.booleans(),
        patience=st.integers(1, 5),
    )
    def begin(self, slots, spare, policy, max_chunk, chunked, patience):
        self.options = {
            "max_sequences": slots,
            "token_budget": slots + spare,
            "policy": policy,
            "max_chunk": max_chunk,
            "chunked": chunked,
            "patience": patience,
        }
        self.slots, self.budget, self.policy, self.chunked, self.patience = (
            slots,
            slots + spare,
            policy,
            chunked,
            patience,
        )
        self.longest = max_chunk or self.budget
        self.scheduler = Scheduler(**self.options)
        self.passes = 0
        self.accepted: list[Request] = []
        self.line: list[Request] = []  # those that wait, by arrival
        self.inside: list[Request] = []  # those that run, by admission
        self.added: dict[Request, int] = {}  # how many passes there had been
        self.wanted: dict[Request, int] = {}  # length of the answer
        self.calls: list[tuple[Any, ...]] = []  # for the replay
        self.decisions: list[list[tuple[int, ...]]] = []
        self.length = 0  # calls of the rules below

    @rule(
        length=st.integers(1, 16),
        answer=st.integers(1, 6),
        priority=st.integers(-1, 3),
        copies=st.integers(1, 3),
    )
    def add(self, length, answer, priority, copies):
        self.length += 1
        for _ in range(copies):
            request = Request([1] * length, GREEDY, priority=priority)
            if not self.chunked and length > self.budget:
                with pytest.raises(UserError):
                    self.scheduler.add(request)
                assert request.state is State.NEW
                self.seen["refused"] += 1
                return
            self.scheduler.add(request)
            self.calls.append(("add", length, priority))
            self.accepted.append(request)
            self.line.append(request)
            self.added[request], self.wanted[request] = self.passes, answer

    @rule(passes=st.integers(1, 4))
    def step(self, passes):
        self.length += 1
        for _ in range(passes):
            self._pass()

    @precondition(lambda self: self.line or self.inside)
    @rule(pick=st.integers(0, 30))
    def abort(self, pick):
        """At any moment, wherever it is."""
        self.length += 1
        everybody = self.line + self.inside
        request = everybody[pick % len(everybody)]
        self.seen["aborted in " + request.state.value] += 1
        self._finish(request)

    @precondition(lambda self: self.inside)
    @rule(pick=st.integers(0, 3))
    def finish(self, pick):
        """A stop token: the answer is shorter than was allowed."""
        self.length += 1
        self._finish(self.inside[pick % len(self.inside)])

    @precondition(lambda self: self.inside and self.chunked)
    @rule(pick=st.integers(0, 3))
    def recompute(self, pick):
        """Its keys are lost, and all that it has must be computed again: nobody may take it for a decode."""
        self.length += 1
        request = self.inside[pick % len(self.inside)]
        request.computed = 0
        self.calls.append(("recompute", self.accepted.index(request)))
        self.seen["recomputed with an answer"] += bool(request.output.token_ids)

    def _finish(self, request):
        self.scheduler.finish(request)
        self.calls.append(("finish", self.accepted.index(request)))
        (self.line if request in self.line else self.inside).remove(request)
        assert (request.state, request.slot) == (State.FINISHED, -1)

    def _pass(self):
        before = {request: request.remaining for request in self.inside}
        free = sorted(set(range(self.slots)) - {request.slot for request in self.inside})
        self.passes += 1
        work = self.scheduler.schedule()
        self.calls.append(("pass",))
        self.decisions.append(
            [
                (each.request.arrival, each.slot, each.start, each.count, each.samples)
                for each in work
            ]
        )

        # What each gets: in one piece, from where it stands, within the chunk and the budget.
        spent = sum(each.count for each in work)
        assert spent <= self.budget
        for each in work:
            request = each.request
            assert 1 <= each.count <= request.remaining
            assert (each.start, each.slot) == (request.computed, request.slot)
            assert each.samples == (each.count == request.remaining)
            assert each.count <= self.longest if self.chunked else each.count == request.remaining
        shares = {each.request: each.count for each in work}
        assert len(shares) == len(work)  # nobody twice

        # Decodes first, and all of them; then what was in the middle of a prompt; both by admission.
        singles = [request for request in self.inside if before[request] == 1]
        longer = [request for request in self.inside if before[request] > 1]
        served = [each.request for each in work if each.request in before]
        assert served == singles + longer[: len(served) - len(singles)]
        left = self.budget - len(singles)
        for request in longer:
            assert shares.get(request, 0) == min(before[request], self.longest, left)
            left -= shares.get(request, 0)

        # Then the line, in its order, into the lowest free slots.
        newcomers = [each.request for each in work[len(served) :]]
        assert [request.slot for request in newcomers] == free[: len(newcomers)]
        for request in newcomers:
            assert request is min(self.line, key=self._turn)
            self._check_overtaking(request)
            self.line.remove(request)
            self.inside.append(request)
        # Nobody waits beside a free slot while there is budget for him.
        if self.line and len(self.inside) < self.slots:
            first = min(self.line, key=self._turn)
            assert spent == self.budget if self.chunked else first.remaining > self.budget - spent
            self.seen["waits for budget"] += 1

        self.seen["passes"] += 1
        self.seen["mixed passes"] += bool(singles and len(work) > len(singles))
        self.seen["full"] += bool(self.line and len(self.inside) == self.slots)
        compute(work)
        for each in work:
            if len(each.request.output.token_ids) == self.wanted[each.request] and each.samples:
                self._finish(each.request)

    def _turn(self, request):
        """The lower, the sooner."""
        if self.policy == "fcfs":
            return (0, self.accepted.index(request))
        aged = (self.passes - self.added[request]) // self.patience
        return (request.priority - aged, self.accepted.index(request))

    def _check_overtaking(self, request):
        """No starvation: whoever comes so late that the difference in priority is waited off overtakes nobody."""
        for other in self.line:
            if self.accepted.index(other) < self.accepted.index(request):
                assert self.policy == "priority"
                waited = self.added[request] - self.added[other]
                assert waited < (other.priority - request.priority) * self.patience
                self.seen["overtaken"] += 1
            elif other.priority < request.priority:
                self.seen["aged past a more urgent one"] += self.policy == "priority"

    @invariant()
    def no_slot_has_two_owners_and_none_is_lost(self):
        scheduler = self.scheduler
        owned = [request.slot for request in scheduler.running]
        assert sorted(owned + scheduler.free_slots) == list(range(self.slots))
        assert (scheduler.waiting, scheduler.running) == (self.line, self.inside)
        assert scheduler.unfinished == len(self.line) + len(self.inside)

    def teardown(self):
        """Every accepted request ends, nothing is in use then, and the same calls lead to the same decisions."""
        if not hasattr(self, "scheduler"):
            return
        self.seen["lives of 50 calls"] += self.length >= 50
        to_do = sum(request.remaining + self.wanted[request] for request in self.line + self.inside)
        for _ in range(to_do):  # at least one token a pass
            if not self.scheduler.unfinished:
                break
            self._pass()
        assert all(
            request.state is State.FINISHED and request.slot == -1 for request in self.accepted
        )
        assert (self.scheduler.unfinished, self.scheduler.schedule()) == (0, [])
        assert sorted(self.scheduler.free_slots) == list(range(self.slots))
        assert self._replay() == self.decisions

    def _replay(self):
        scheduler = Scheduler(**self.options)
        requests, decisions = [], []
        for what, *details in self.calls:
            if what == "add":
                requests.append(ask(scheduler, details[0], priority=details[1]))
            elif what == "finish":
                scheduler.finish(requests[details[0]])
            elif what == "recompute":
                requests[details[0]].computed = 0
            else:
                work = scheduler.schedule()
                decisions.append(
                    [
                        (each.request.arrival, each.slot, each.start, each.count, each.samples)
                        for each in work
                    ]
                )
                compute(work)
        return decisions


def lives(examples):
    """Run so many random lives, and look whether what is promised was put to the test."""
    Life.seen.clear()
    # One call more, because the beginning counts; more examples, because Hypothesis cuts some of them short.
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples * 3 // 2,
            stateful_step_count=51,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    assert Life.seen["lives of 50 calls"] >= examples
    for event in (
        "mixed passes",
        "full",
        "waits for budget",
        "refused",
        "overtaken",
        "aged past a more urgent one",
        "aborted in waiting",
        "aborted in running",
        "recomputed with an answer",
    ):
        assert Life.seen[event] > examples / 10, event


def test_two_hundred_lives_of_fifty_calls_keep_every_promise():
    """Catches: requests run one after the other, a slot given twice or lost, a decode that waits for a prompt, a budget
    that is exceeded, a line that is jumped, a request that never ends."""
    lives(200)


@pytest.mark.slow
def test_a_thousand_lives_of_fifty_calls_keep_every_promise():
    lives(1000)
