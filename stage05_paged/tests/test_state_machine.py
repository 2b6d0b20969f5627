"""Pool, tables, prefix cache, scheduler, cache and engine together: random lives of a real engine, watched by the sanitizer.

Whatever is done to it, in any order, the memory is in order after each step, everybody ends, and every answer is the naive
engine's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
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

from shared.checkpoint import Config
from shared.course import stages
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.engine import Engine as Naive
from stage01_forward.sampling import SamplingParams
from stage04_continuous.request import Request, State
from stage04_continuous.scheduler import POLICIES
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Scheduler

CONFIG = Config(31, 48, 16, 2, 2, name="small")
MOST = 9  # requests at a time
LONGEST = 16  # prompt and answer together: the smallest pool holds one such
ENOUGH = 1000  # steps: far more than so many requests have tokens


@cache
def the_model():
    """Weights so wide that answers differ. (Hypothesis makes the machines, so they get no fixtures.)"""
    return stages.load_model(random_checkpoint(CONFIG, spread=24), dtype=torch.float64)


@cache
def naive(prompt, sampling):
    (output,) = Naive(the_model()).generate([list(prompt)], sampling)
    return output.token_ids


@cache
def prompt_of(family, length, own):
    """Prompts of a family have their beginning in common; the last `own` tokens are each length's own."""
    shared = random_prompt(LONGEST, CONFIG, f"family {family}")
    return shared[: length - own] + random_prompt(LONGEST, CONFIG, f"own {length}")[:own]


def sampling_of(seed, count):
    """Greedy for seed 0; drawn tokens part the samples of one prompt."""
    return SamplingParams(
        max_tokens=count, temperature=1.0 if seed else 0.0, seed=seed, ignore_eos=True
    )


class Life(RuleBasedStateMachine):
    """Calls in any order. What everybody should say is known from what was asked and nothing else."""

    seen: Counter[str] = (
        Counter()
    )  # over all lives: that what is promised was really put to the test

    @initialize(
        size=st.sampled_from((2, 3, 4, 1, 16)),
        spare=st.integers(0, 16),
        swap_tokens=st.sampled_from((64, 16, 3, 0)),
        sequences=st.integers(1, 9).map(lambda number: 10 - number),
        budget=st.integers(0, 20),
        max_chunk=st.sampled_from((None, 1, 3)),
        chunked=st.booleans(),
        policy=st.sampled_from(POLICIES),
        preemption=st.sampled_from(("swap", "auto", "recompute")),
        prefix_caching=st.sampled_from((True, True, True, False)),
        watermark=st.sampled_from((0, 0.01, 0.3)),
    )
    def begin(
        self,
        size,
        spare,
        swap_tokens,
        sequences,
        budget,
        max_chunk,
        chunked,
        policy,
        preemption,
        prefix_caching,
        watermark,
    ):
        pool, swap_blocks = (
            BlockPool(-(-LONGEST // size) + spare // size, size),
            swap_tokens // size,
        )
        self.scheduler = Scheduler(
            pool,
            max_sequences=sequences,
            token_budget=min(sequences, pool.count) + budget,
            policy=policy,
            max_chunk=max_chunk,
            chunked=chunked,
            patience=5,
            prefix_caching=prefix_caching,
            watermark=watermark,
            preemption="recompute" if preemption == "swap" and not swap_blocks else preemption,
            swap_pool=BlockPool(swap_blocks, size) if swap_blocks else None,
        )
        self.engine = Engine(the_model(), scheduler=self.scheduler, sanitize=True)
        # What is measured differs each time: with costs that do not, the same calls lead to the same life.
        self.scheduler.cheaper = lambda tokens: "swap" if tokens % 2 else "recompute"
        self.asked: list[
            tuple[Request, int]
        ] = []  # and how much of the answer was given from the start
        self.told: dict[str, list[int]] = {}  # by id: what came out of the steps
        self.calls = 0

    def _accepted(self, request, given=0):
        self.asked.append((request, given))
        self.told[request.id] = list(request.output.token_ids)

    @precondition(lambda self: len(self.engine.requests) < MOST)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 12),
        own=st.integers(0, 2),
        count=st.integers(1, 12),
        seed=st.integers(0, 2),
        priority=st.integers(-1, 1),
        salt=st.sampled_from((b"", b"", b"other")),
    )
    def add(self, family, length, own, count, seed, priority, salt):
        self.calls += 1
        count = min(count, LONGEST - length)
        request = Request(
            prompt_of(family, length, min(own, length)), sampling_of(seed, count), priority=priority
        )
        if not self.scheduler.chunked and length > self.scheduler.token_budget:
            with pytest.raises(UserError, match="allow chunks"):
                self.engine.add(request, salt)
            self.seen["refused"] += 1
        else:
            self._accepted(self.engine.add(request, salt))

    @precondition(lambda self: len(self.engine.requests) < MOST)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 10),
        count=st.integers(1, 6),
        samples=st.integers(2, 4),
    )
    def add_samples(self, family, length, count, samples):
        self.calls += 1
        if not self.scheduler.chunked:
            length = min(length, self.scheduler.token_budget)
        several = [sampling_of(seed, count) for seed in range(samples)]
        for request in self.engine.add_samples(prompt_of(family, length, 0), several):
            self._accepted(request)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        self.calls += 1
        for _ in range(steps):
            self._step()

    @precondition(lambda self: 0 < len(self.engine.requests) < MOST)
    @rule(pick=st.integers(0, MOST), seed=st.integers(0, 3))
    def fork(self, pick, seed):
        self.calls += 1
        parent = self._pick(self._everybody(), pick)
        said = len(parent.output.token_ids)
        sampling = (
            None
            if seed == 3
            else sampling_of(seed, min(said + 4, LONGEST - len(parent.output.prompt_ids)))
        )
        if sampling is not None and said >= sampling.max_tokens:
            with pytest.raises(UserError, match="let its fork say more"):
                self.engine.fork(parent.id, sampling)
            return
        owned, child = self.scheduler.pool.owned, self.engine.fork(parent.id, sampling)
        assert self.scheduler.pool.owned == owned  # a fork costs nothing until it writes
        self._accepted(child, said)
        self.seen[f"forked, {parent.state.value}, {'with' if said else 'without'} an answer"] += 1

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, MOST))
    def abort(self, pick):
        self.calls += 1
        request = self._pick(self._everybody(), pick)
        self.seen[
            "aborted in "
            + ("the swap pool" if request in self.scheduler.swapped else request.state.value)
        ] += 1
        self.engine.abort(request.id)

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=st.integers(0, MOST))
    def preempt(self, pick):
        """Out of turn: whoever it is, with an answer or without."""
        self.calls += 1
        request = self._pick(self.scheduler.running, pick)
        self.scheduler.preempt(request)
        self.seen["preempted out of turn"] += 1
        self.seen["swapped out" if request in self.scheduler.swapped else "recomputed"] += 1

    @precondition(lambda self: self.engine.requests)
    @rule()
    def run_until_somebody_ends(self):
        """To the next finish."""
        self.calls += 1
        before = set(self.engine.requests)
        for _ in range(ENOUGH):
            if not before <= set(self.engine.requests):
                break
            self._step()
        else:
            raise AssertionError("a live-lock")

    @precondition(lambda self: self.scheduler.pool.cached)
    @rule(share=st.floats(0, 1))
    def evict(self, share):
        """Memory is needed: all that is free, and a share of what is cached."""
        self.calls += 1
        pool = self.scheduler.pool
        for block in [pool.take() for _ in range(len(pool.free) + int(share * len(pool.cached)))]:
            pool.give_back(block)

    def _everybody(self):
        """Those that run come first, because Hypothesis likes small numbers."""
        return sorted(self.engine.requests.values(), key=lambda each: each.state is State.WAITING)

    @staticmethod
    def _pick(requests, pick):
        return requests[pick % len(requests)]

    def _step(self):
        counts, evictions = replace(self.scheduler.counts), self.scheduler.pool.evictions
        for id, token in self.engine.step():
            self.told[id].append(token.id)
        after = self.scheduler.counts
        self.seen["steps"] += 1
        self.seen["hits"] += after.hit_tokens > counts.hit_tokens
        self.seen["copies"] += after.copies > counts.copies
        self.seen["recomputed"] += after.recomputed > counts.recomputed
        self.seen["swapped out"] += after.swapped_out > counts.swapped_out
        self.seen["swapped in"] += after.swapped_in > counts.swapped_in
        self.seen["evicted"] += self.scheduler.pool.evictions > evictions

    @invariant()
    def the_memory_is_in_order(self):
        """After every call, whether or not it made a step."""
        if self.scheduler.moves:
            return  # those of a preemption out of turn: blocks that are free are still to be read
        assert self.engine.sanitizer is not None
        self.engine.sanitizer.after()

    @invariant()
    def nobody_is_lost(self):
        scheduler = self.scheduler
        waiting = [
            *scheduler.waiting,
            *(request for samples in scheduler.samples.values() for request in samples),
        ]
        assert {id(each) for each in [*waiting, *scheduler.running]} == {
            id(each) for each in self.engine.requests.values()
        }
        assert (
            len(waiting) + len(scheduler.running)
            == scheduler.unfinished
            == len(self.engine.requests)
        )
        assert all(request.state is State.WAITING for request in waiting)
        assert len(scheduler.running) <= scheduler.max_sequences
        for request, _ in self.asked:
            assert (
                self.told[request.id] == request.output.token_ids
            )  # each token once, and none taken back

    def teardown(self):
        """Everybody ends, with the naive engine's answer, and nothing is in use then."""
        if not hasattr(self, "engine"):
            return
        self.seen["lives of 50 calls"] += self.calls >= 50
        for _ in range(ENOUGH):
            if not self.engine.requests:
                break
            self._step()
        assert not self.engine.requests and not self.scheduler.unfinished
        pools = [
            self.scheduler.pool,
            *([self.scheduler.swap_pool] if self.scheduler.swap_pool else []),
        ]
        assert [pool.owned for pool in pools] == [0] * len(pools)
        self.nobody_is_lost()
        for request, given in self.asked:
            output, beginning = request.output, tuple(request.output.token_ids[:given])
            rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - given)
            answer = naive((*output.prompt_ids, *beginning), rest)
            if output.finish_reason == "abort":
                answer = answer[: len(output.token_ids) - given]
            assert output.token_ids[given:] == answer
            assert output.finish_reason in ("length", "abort")


EVENTS = (
    "hits",
    "copies",
    "recomputed",
    "swapped out",
    "swapped in",
    "evicted",
    "preempted out of turn",
    "aborted in running",
)
RARE = (
    "aborted in the swap pool",
    "forked, waiting, without an answer",
    "forked, waiting, with an answer",
    "forked, running, without an answer",
    "forked, running, with an answer",
)


def live(examples):
    Life.seen.clear()
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples,
            stateful_step_count=51,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )


def test_lives_of_fifty_calls():
    """A few of those of the next test, which takes minutes."""
    live(45)
    assert Life.seen["lives of 50 calls"] >= 15
    assert not [
        event for event in EVENTS if not Life.seen[event]
    ]  # how often varies with what else Hypothesis has read


@pytest.mark.slow
def test_a_thousand_lives_of_fifty_calls():
    live(2500)  # more than are counted, because Hypothesis cuts some of them short
    assert Life.seen["lives of 50 calls"] >= 1000
    assert not [event for event in EVENTS if Life.seen[event] < 100]
    assert not [event for event in RARE if Life.seen[event] < 50]
