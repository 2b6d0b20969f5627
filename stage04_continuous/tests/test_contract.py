"""The contract of engines, for this stage's: see contract.py and lives.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from stage04_continuous.engine import make

from .contract import EngineContract
from .lives import Life, live
from .oracle import the_model


def engine_of(sequences=4, budget=32, model=None, **options):
    return make(model or the_model(), sequences, token_budget=budget, **options)


def assert_idle(engine):
    scheduler = engine.scheduler
    assert (scheduler.waiting, scheduler.running, engine.requests) == ([], [], {})
    assert sorted(scheduler.free_slots) == list(range(scheduler.max_sequences))


class TestSlots(EngineContract):
    engine = staticmethod(engine_of)
    assert_idle = staticmethod(assert_idle)

    def spoil(self, engine, request):
        engine.runner.cache.kv[:, :, request.slot, :, : request.computed] = torch.nan


class SlotLife(Life):
    def make(self, sequences, token_budget, **options):
        return engine_of(min(sequences, 4), token_budget, observers=(self,), **options)

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=st.integers(0, 3))
    def recompute(self, pick):
        """Catches: a request with an answer taken for a decode, although nothing is computed."""
        request = self.scheduler.running[pick % len(self.scheduler.running)]
        request.computed = 0
        self.seen["recomputed with an answer"] += bool(request.output.token_ids)

    assert_idle = staticmethod(assert_idle)


EVENTS = ["mixed passes", "full", "waits for budget", "overtaken"]
EVENTS += ["aborted waiting", "aborted running", "recomputed with an answer"]


@pytest.mark.parametrize("examples", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_lives_of_fifty_calls(examples):
    seen = live(SlotLife, examples)
    assert not [event for event in EVENTS if not seen[event]]
