"""The contract of engines, for this stage's: see stage04_continuous/tests/contract.py and lives.py.

Every engine here is watched by the sanitizer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from shared.errors import UserError
from stage04_continuous.request import State
from stage04_continuous.tests import lives
from stage04_continuous.tests.contract import EngineContract
from stage04_continuous.tests.lives import LONGEST, MOST
from stage05_paged.fork import add_samples, fork

from .engines import assert_idle, engine_of, evict, preempt


class TestPaged(EngineContract):
    engine = staticmethod(engine_of)
    assert_idle = staticmethod(assert_idle)
    tight = {"blocks": 14, "size": 5}
    unshared = {"prefix_caching": False}

    def spoil(self, engine, request):
        blocks = engine.scheduler.tables[request].blocks
        engine.runner.cache.memory.poison(blocks)


class PagedLife(lives.Life):
    """Prefix cache, swapping, samples and forks, in memory for hardly more than one request."""

    @initialize(
        size=st.sampled_from((2, 3, 4, 1, 16)),
        spare_tokens=st.integers(0, 16),
        swap_tokens=st.sampled_from((64, 16, 3, 0)),
        prefix_caching=st.sampled_from((True, True, True, False)),
        watermark=st.sampled_from((0, 0.01, 0.3)),
        **lives.OPTIONS,
    )
    def begin(self, size, spare_tokens, swap_tokens, **options):
        self.blocks = -(-LONGEST // size) + spare_tokens // size, size, swap_tokens // size
        super().begin(**options)

    def make(self, sequences, token_budget, **options):
        return engine_of(sequences, token_budget, None, *self.blocks, observers=(self,), **options)

    @precondition(lambda self: len(self.engine.requests) < MOST)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 10),
        count=st.integers(1, 6),
        samples=st.integers(2, 4),
    )
    def add_samples(self, family, length, count, samples):
        several = [lives.sampling_of(seed, count) for seed in range(samples)]
        for request in add_samples(self.engine, lives.family_prompt(family, length, 0), several):
            self.accepted(request)

    @precondition(lambda self: 0 < len(self.engine.requests) < MOST)
    @rule(pick=st.integers(0, MOST), seed=st.integers(0, 3))
    def fork(self, pick, seed):
        parent = self.pick(pick)
        given = len(parent.output.token_ids)
        room = min(given + 4, LONGEST - len(parent.output.prompt_ids))
        sampling = None if seed == 3 else lives.sampling_of(seed, room)
        if sampling is not None and given >= sampling.max_tokens:
            with pytest.raises(UserError, match="larger max_tokens"):
                fork(self.engine, parent.id, sampling)
            return
        if sampling is not None:  # the parent's answer so far has its own log-probabilities
            sampling = replace(sampling, logprobs=parent.sampling.logprobs)
        owned = self.scheduler.pool.owned
        self.accepted(fork(self.engine, parent.id, sampling), given)
        assert self.scheduler.pool.owned == owned  # a fork costs nothing until it runs
        self.seen[f"forked {parent.state.value}, {'with' if given else 'without'} an answer"] += 1

    @precondition(lambda self: self.scheduler.swapped)
    @rule()
    def abort_a_swapped_one(self):
        self.end(next(iter(self.scheduler.swapped)))
        self.seen["aborted in the swap pool"] += 1

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=st.integers(0, MOST))
    def preempt(self, pick):
        """Out of turn: any request, with an answer or without."""
        request = self.scheduler.running[pick % len(self.scheduler.running)]
        preempt(self.engine, request)
        self.seen["swapped_out" if request in self.scheduler.swapped else "recomputed"] += 1

    @precondition(lambda self: self.scheduler.pool.cached)
    @rule(share=st.floats(0, 1))
    def evict(self, share):
        evict(self.engine, int(share * len(self.scheduler.pool.cached)))

    def _step(self):
        scheduler = self.scheduler
        counts, evictions = replace(scheduler.counts), scheduler.pool.evictions
        super()._step()
        for name in ("hit_tokens", "copies", "recomputed", "swapped_out", "swapped_in"):
            self.seen[name] += getattr(self.scheduler.counts, name) > getattr(counts, name)
        self.seen["evicted"] += scheduler.pool.evictions > evictions
        if self.plan:
            assert self.engine.steps[-1].memory == self.owned

    def before(self, plan):
        """Memory: the most junior give way, and no other request comes in beside them."""
        super().before(plan)
        scheduler = self.scheduler
        held = {block for table in scheduler.tables.values() for block in table.blocks}
        self.owned = len(held)
        for work in plan.work:
            tokens = work.request.token_count
            assert len(work.table) == scheduler.pool.blocks_for(tokens)
        gone = [request for request in self.inside if request.state is not State.RUNNING]
        if gone:
            stayed = [request for request in self.inside if request.state is State.RUNNING]
            assert max(map(self._rank, stayed)) < min(map(self._rank, gone))
            assert {work.request for work in plan.work} <= set(stayed)
            self.seen["preempted"] += 1

    def ready(self, request):
        """A sample of a prompt that another one is still to compute is not."""
        parent = self.scheduler.parents.get(request)
        if parent is None or parent.state is State.FINISHED:
            return True
        return parent.computed >= request.token_count - 1

    def room(self):
        return False  # the scheduler's own tests work out by hand what fits

    def _rank(self, request):
        priority = request.priority if self.scheduler.policy == "priority" else 0
        return priority, request.arrival

    assert_idle = staticmethod(assert_idle)


EVENTS = ["mixed passes", "preempted", "hit_tokens", "recomputed", "swapped_out", "swapped_in"]
EVENTS += ["copies", "evicted", "aborted waiting", "aborted running"]
EVENTS += ["forked running, with an answer"]
RARE = ["full", "overtaken", "aborted in the swap pool"]
RARE += ["forked running, without an answer", "forked waiting, with an answer"]
RARE += ["forked waiting, without an answer"]


@pytest.mark.parametrize(
    "examples, least, events",
    [(25, 1, EVENTS), pytest.param(1500, 30, EVENTS + RARE, marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_lives_of_fifty_calls(examples, least, events):
    seen = lives.live(PagedLife, examples)
    assert not [event for event in events if seen[event] < least]
