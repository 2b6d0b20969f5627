"""The contract of engines, for this stage's: see contract.py and lives.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from stage04_continuous.make import make
from stage04_continuous.request import Request

from .contract import EngineContract
from .lives import Life, live
from .oracle import DRAWN, ask, assert_answered, finish, greedy, naive, prompt_of, the_model


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

    @precondition(lambda self: self.scheduler.running and self.scheduler.chunked)
    @rule(pick=st.integers(0, 3))
    def recompute(self, pick):
        """Catches: a request with an answer taken for a decode, although nothing is computed."""
        request = self.scheduler.running[pick % len(self.scheduler.running)]
        request.computed = 0
        self.seen["recomputed with an answer"] += bool(request.output.token_ids)

    assert_idle = staticmethod(assert_idle)


def test_lives_of_fifty_calls():
    seen = live(SlotLife, 120)  # enough that each event occurs, whatever Hypothesis draws
    for event in (
        "mixed passes",
        "full",
        "waits for budget",
        "refused",
        "overtaken",
        "aborted waiting",
        "aborted running",
        "recomputed with an answer",
    ):
        assert seen[event], event


@pytest.mark.slow
def test_a_thousand_lives_of_fifty_calls():
    live(SlotLife, 1000)


def test_the_answers_are_worth_comparing():
    """One token repeated would be the same whatever was wrong."""
    answers = [naive(prompt_of(length), greedy(24)) for length in (1, 5, 9, 17, 26, 30)]
    assert sum(len(set(output.token_ids)) for output in answers) > 10 * len(answers)


# ---- slots ----


def test_a_freed_slot_is_filled_in_the_next_pass():
    """No pass of one row while others wait: short answers leave, and the line moves up."""
    engine = engine_of(2, 16)
    ask(engine, 4, 30, "long")
    for i in range(9):
        ask(engine, 2, 3, f"short {i}")
    finish(engine)
    assert all(record.rows == 2 for record in engine.steps if record.waiting)
    beside = [share.request_id for record in engine.steps for share in record.slots if share.slot]
    assert beside == [f"short {i}" for i in range(9) for _ in range(3)]
    assert len(engine.steps) == 30  # 10 requests in the time of the longest


def test_positions_start_again_in_a_slot_used_again():
    """One slot, one sequence after another: the longer before the shorter, and the other way."""
    engine, asked = engine_of(1), []
    handle = the_model().register_forward_pre_hook(lambda _, given: asked.extend(given[1].tolist()))
    try:
        for length in (30, 1, 14, 30):
            asked.clear()
            request = ask(engine, length, 5)
            finish(engine)
            assert asked == list(range(length + 4))
            assert_answered(request)
    finally:
        handle.remove()


@pytest.mark.parametrize("max_chunk", [None, 1, 7])
@pytest.mark.parametrize("answered", [1, 10])
def test_computing_again_goes_on_where_the_answer_was(answered, max_chunk):
    """As after a preemption: no token comes twice, and a drawn answer goes on drawing."""
    engine = engine_of(3, 24, max_chunk=max_chunk)
    requests = [ask(engine, 30, 40), ask(engine, 7, 30), engine.add(Request(prompt_of(9), DRAWN))]
    lost = requests[1:]
    while min(len(request.output.token_ids) for request in lost) < answered:
        engine.step()
    for request in lost:
        request.computed = 0
        assert request.remaining == request.token_count
    before = len(engine.steps)
    finish(engine)
    assert_answered(*requests)
    # The records call a prompt token a prompt token the second time, too.
    for request in lost:
        rows = [row for record in list(engine.steps)[before:] for row in record.slots]
        rows = [row for row in rows if row.request_id == request.id]
        assert sum(row.prefill_tokens for row in rows) == len(request.output.prompt_ids)
        assert sum(row.decode_tokens for row in rows) == len(request.output.token_ids) - 1
