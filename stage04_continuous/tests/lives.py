"""Random lives of a real engine: calls in any order, plans checked, answers the naive engine's.

A stage subclasses Life, defines `make`, and adds rules for what only its engine can do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES

from .oracle import DRAWN, assert_answered, greedy, prompt_of

MOST = 9  # requests at a time
LONGEST = 16  # tokens of prompt and answer together
ENOUGH = 1000  # steps: far more than MOST requests have tokens


@cache
def family_prompt(family: int, length: int, own: int) -> list[int]:
    """Prompts of a family have their beginning in common; the last `own` tokens are their own."""
    shared = prompt_of(LONGEST, f"family {family}")
    return shared[: length - own] + prompt_of(LONGEST, f"own {length}")[:own]


def sampling_of(seed: int, count: int) -> Any:
    """Greedy for seed 0; drawn tokens part the samples of one prompt."""
    return replace(DRAWN, max_tokens=count, seed=seed) if seed else greedy(count)


OPTIONS: dict[str, Any] = {
    "sequences": st.integers(1, 9).map(lambda number: 10 - number),
    "spare": st.integers(0, 20),
    "max_chunk": st.sampled_from((None, 1, 3)),
    "policy": st.sampled_from([*POLICIES]),
    "patience": st.integers(1, 5),
}


class Life(RuleBasedStateMachine):
    """`seen` counts over all lives: that what is promised was really put to the test."""

    seen: Counter[str] = Counter()

    def make(self, sequences: int, token_budget: int, **options: Any) -> Any:
        """An engine with `options` of its scheduler, and the machine as its observer."""
        raise NotImplementedError

    @initialize(**OPTIONS)
    def begin(self, sequences, spare, patience, **options):
        self.engine = self.make(sequences, sequences + spare, **options)
        self.scheduler = self.engine.scheduler
        self.scheduler.patience = patience
        self.asked: list[tuple[Request, int]] = []  # and how much of the answer it began with
        self.sent: dict[str, list[int]] = {}  # by id: what came out of the steps
        self.added: dict[Request, int] = {}  # steps made before it came
        self.aborted: set[Request] = set()
        self.steps = 0

    def accepted(self, request: Request, given: int = 0) -> None:
        self.asked.append((request, given))
        self.sent[request.id] = list(request.output.token_ids)
        self.added[request] = self.steps

    @precondition(lambda self: len(self.engine.requests) < MOST)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 12),
        own=st.integers(0, 2),
        count=st.integers(1, 12),
        seed=st.integers(0, 2),
        priority=st.integers(-1, 1),
    )
    def add(self, family, length, own, count, seed, priority):
        prompt = family_prompt(family, length, min(own, length))
        sampling = sampling_of(seed, min(count, LONGEST - length))
        request = Request(prompt, sampling, priority=priority)
        self.accepted(self.engine.add(request))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, MOST))
    def abort(self, pick):
        request = self.pick(pick)
        self.seen[f"aborted {request.state.value}"] += 1
        self.end(request)

    def end(self, request: Request) -> None:
        self.aborted.add(request)
        self.engine.abort(request.id)

    def pick(self, number: int) -> Request:
        """Those that run come first, because Hypothesis likes small numbers."""
        requests = sorted(
            self.engine.requests.values(), key=lambda request: request.state is State.WAITING
        )
        return requests[number % len(requests)]

    def _step(self) -> None:
        self.steps += 1
        self.inside, self.line = list(self.scheduler.running), list(self.scheduler.waiting)
        self.plan = None
        sent = self.engine.step()
        for id, token in sent:
            self.sent[id].append(token.id)
        if self.plan:
            record, work = self.engine.steps[-1], self.plan.work
            assert record.rows == len(work) and not record.wasted_tokens
            assert sum(share.rows for share in work) == len(sent)
            assert record.prefill_tokens == sum(share.prefill_tokens for share in work)
            tokens = record.prefill_tokens + record.decode_tokens
            assert tokens == sum(share.count for share in work)
            assert record.waiting == len(self.scheduler.waiting)

    def before(self, plan: Any) -> None:
        """As an observer: what may run, how much of it, and in which order."""
        self.plan, scheduler, work = plan, self.scheduler, plan.work
        assert bool(work) == bool(self.engine.requests)  # in every step some request gets on
        shares = {share.request: share.count for share in work}
        spent = sum(shares.values())
        assert spent <= scheduler.token_budget and len(shares) == len(work)
        for share in work:
            request = share.request
            assert request.state is State.RUNNING and 1 <= share.count <= request.remaining
            assert share.start == request.computed
            assert share.rows == (share.count == request.remaining)
            assert share.count <= scheduler.max_chunk

        # Decoding requests first and all of them, then prompts in the middle, both by admission.
        stayed = [request for request in self.inside if request.state is State.RUNNING]
        singles = [request for request in stayed if request.remaining == 1]
        longer = [request for request in stayed if request.remaining > 1]
        served = [share.request for share in work if share.request in self.inside]
        assert served[: len(singles)] == singles
        left = scheduler.token_budget - len(singles)
        for request in longer:
            share = min(request.remaining, scheduler.max_chunk, left)
            assert shares.get(request, 0) == share
            left -= share
        assert served[len(singles) :] == [request for request in longer if request in shares]

        # Then the waiting ones in their order, as far as slots and budget go.
        newcomers = [share.request for share in work[len(served) :]]
        self.line = [request for request in self.line if self.ready(request)]
        for request in newcomers:
            assert request is min(self.line, key=self._turn)
            self.line.remove(request)
            self.seen["overtaken"] += any(other.arrival < request.arrival for other in self.line)
        assert len(scheduler.running) <= scheduler.max_sequences
        if self.line and self.room():
            assert spent == scheduler.token_budget
            self.seen["waits for budget"] += 1
        self.seen["full"] += bool(self.line) and spent < scheduler.token_budget
        self.seen["mixed passes"] += bool(singles and len(work) > len(singles))

    def after(self, plan: Any) -> None:
        """Nothing more to check."""

    def ready(self, request: Request) -> bool:
        """Whether a waiting request may run."""
        return True

    def room(self) -> bool:
        """Whether memory has room for any other request."""
        return len(self.scheduler.running) < self.scheduler.max_sequences

    def _turn(self, request: Request) -> tuple[int, int]:
        if self.scheduler.policy == "fcfs":
            return 0, request.arrival
        waited = self.steps - self.added[request]
        return request.priority - waited // self.scheduler.patience, request.arrival

    @invariant()
    def no_request_is_lost(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.scheduler
        inside = Counter([*scheduler.waiting, *scheduler.running])
        assert inside == Counter(self.engine.requests.values())
        assert scheduler.unfinished == len(self.engine.requests)
        assert all(request.state is State.WAITING for request in scheduler.waiting)
        arrivals = [request.arrival for request in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        for request, _ in self.asked:  # each token once, and none taken back
            assert self.sent[request.id] == request.output.token_ids

    def teardown(self):
        """Every request ends with the naive engine's answer, and nothing is in use then."""
        if not hasattr(self, "engine"):
            return
        for _ in range(ENOUGH):
            if not self.engine.requests:
                break
            self._step()
        self.assert_idle(self.engine)
        for request, given in self.asked:
            assert_answered(request, given=given, aborted=request in self.aborted)

    def assert_idle(self, engine: Any) -> None:
        assert not engine.requests and not engine.scheduler.unfinished


def live(machine: type[Life], examples: int) -> Counter[str]:
    """Run `examples` lives of 50 calls; returns what they have seen. In one thread: the passes are
    so small that several would mostly wait for each other."""
    machine.seen.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = settings(max_examples=examples, stateful_step_count=51)
    try:
        stateful.run_state_machine_as_test(machine, settings=options)
    finally:
        torch.set_num_threads(threads)
    return machine.seen
