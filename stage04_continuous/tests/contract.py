"""The contract of an engine that packs its requests into one pass a step, with add, abort, step,
fail, generate, stream and run.

A stage subclasses EngineContract in its own tests and defines `engine`, which makes its engine, and
`spoil`, which breaks a request's memory; nothing is edited here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import prove
from stage01_forward.model import load_model
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

from .oracle import (
    CONFIG,
    answer,
    ask,
    assert_answered,
    finish,
    greedy,
    oracle_of,
    prompt_of,
    the_model,
)
from .steps import StepContract, bad


class EngineContract(StepContract):
    """Subclass it as `class TestMine(EngineContract)`."""

    tight: dict[str, Any] = {}  # options for little memory, where an engine can have little
    unshared: dict[str, Any] = {}  # options under which requests share no memory

    def spoil(self, engine: Any, request: Request) -> None:
        """Set all keys and values of `request` to NaN."""
        raise NotImplementedError

    @pytest.fixture
    def passes(self) -> Iterator[Any]:
        """What went through the model: for each forward pass, (tokens, rows of logits)."""
        tokens: list[int] = []
        rows: list[int] = []
        model = the_model()
        handles = [
            model.register_forward_pre_hook(lambda _, given: tokens.append(given[0].numel())),
            model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0]))),
        ]
        yield lambda: list(zip(tokens, rows, strict=True))
        for handle in handles:
            handle.remove()

    # ---- what was run ----

    def test_the_whole_record_of_a_small_crowd(self, passes):
        """Two at a time, a budget of 8, and every pass of it worked out by hand."""
        engine = self.engine(2, 8)
        for id, length, count in (("a", 5, 2), ("b", 6, 3), ("c", 3, 2), ("d", 1, 1)):
            ask(engine, length, count, id)
        finish(engine)
        assert [self.shares(record) for record in engine.steps] == [
            [("a", 5, 0, None), ("b", 3, 0, None)],
            [("a", 0, 1, "length"), ("b", 3, 0, None)],
            [("b", 0, 1, None), ("c", 3, 0, None)],  # c runs in the step after a's end
            [("b", 0, 1, "length"), ("c", 0, 1, "length")],
            [("d", 1, 0, "length")],
        ]
        assert [record.waiting for record in engine.steps] == [2, 2, 1, 1, 0]
        assert passes() == [(8, 1), (4, 2), (4, 2), (2, 2), (1, 1)]

    @pytest.mark.parametrize(
        "sequences, budget, max_chunk", [(1, 1, None), (3, 5, 2), (8, 16, 7), (5, 64, 64)]
    )
    def test_tokens_through_the_model_are_those_of_the_records(
        self, sequences, budget, max_chunk, passes
    ):
        """Packed: no padding, one pass a step, and logits of no row that is not sampled."""
        engine = self.engine(sequences, budget, max_chunk=max_chunk)
        requests = [ask(engine, 1 + 5 * i % 17, 1 + 3 * i % 8) for i in range(14)]
        sampled = []
        while engine.requests:
            sampled.append(len(engine.step()))
        spent = [record.prefill_tokens + record.decode_tokens for record in engine.steps]
        assert passes() == list(zip(spent, sampled, strict=True))
        assert max(spent) <= budget and max(record.rows for record in engine.steps) == sequences
        prefill = sum(record.prefill_tokens for record in engine.steps)
        decode = sum(record.decode_tokens for record in engine.steps)
        assert prefill == sum(len(request.output.prompt_ids) for request in requests)
        assert decode == sum(len(request.output.token_ids) - 1 for request in requests)
        assert sum(sampled) == sum(len(request.output.token_ids) for request in requests)
        for record, tokens in zip(engine.steps, spent, strict=True):
            rows = self.shares(record)
            assert (
                record.rows == len(rows) == len({row[0] for row in rows})
                and not record.wasted_tokens
            )
            assert record.prefill_tokens == sum(row[1] for row in rows)
            assert not record.waiting or record.rows == sequences or tokens == budget
        ends = [row[3] for record in engine.steps for row in self.shares(record) if row[3]]
        assert ends == ["length"] * 14
        assert_answered(*requests)

    def test_a_mixed_pass_is_one_pass(self, passes):
        """A prompt that arrives while others decode runs beside them, and they do not wait."""
        engine = self.engine(4, 16)
        for length in (3, 4, 5):
            ask(engine, length, 20)
        for _ in range(4):
            engine.step()
        before = len(passes())
        ask(engine, 30, 5)
        tokens = [len(engine.step()) for _ in range(3)]
        assert passes()[before:] == [(16, 3), (16, 3), (7, 4)]
        assert tokens == [3, 3, 4]
        assert [record.prefill_tokens for record in engine.steps][-3:] == [13, 13, 4]

    def test_records_are_timed_and_limited(self):
        engine = self.engine(2, steps_kept=3)
        engine.generate([prompt_of(length) for length in (4, 5, 6)], greedy(4))
        first, second, third = engine.steps
        assert all(0 < record.bookkeeping_seconds <= record.seconds for record in engine.steps)
        assert first.started + first.seconds <= second.started < third.started

    def test_a_step_without_requests_runs_nothing(self, passes):
        engine = self.engine()
        assert (engine.step(), list(engine.run()), len(engine.steps), passes()) == ([], [], 0, [])

    # ---- tokens ----

    def test_all_scenarios(self, tiny_model):
        engine = self.engine(4, 32, model=tiny_model)
        parity = prove(engine, oracle_of(tiny_model), SamplingParams)
        assert parity.sequences > 20 and not parity.near_ties
        self.assert_idle(engine)

    def test_scenarios_in_float32_differ_at_near_ties_only(self, tiny):
        model = load_model(tiny, dtype=torch.float32)
        assert (
            prove(self.engine(model=model), oracle_of(model), SamplingParams).sequences > 10
        )  # raises otherwise

    def test_other_neighbours_of_equal_lengths_leave_every_bit_as_it_was(self):
        """In float32, where another shape of the batch may round differently."""
        answers, others = [], set()
        for seed in range(3):
            engine = self.engine(4, 12, model=the_model(torch.float32), **self.tight)
            prompts = [prompt_of(length, seed) for length in (5, 17, 9, 2, 12)]
            first, needle, *_ = engine.generate(
                [prompts[0], prompt_of(7), *prompts[1:]], greedy(12)
            )
            answers.append((needle.token_ids, needle.logprobs))
            others.add(tuple(first.token_ids))
        assert answers == [answers[0]] * 3 and len(others) == 3

    def test_each_of_several_end_ids_ends_its_own_request(self):
        """The model's config has one; the engine is given two others."""
        one, two = answer(9, 12), answer(5, 12)
        engine = self.engine(eos_ids=(one[3], two[5]))
        assert engine.eos_ids == (one[3], two[5])
        ending = SamplingParams(max_tokens=12)
        first, second, third = engine.generate(
            [prompt_of(9), prompt_of(5), prompt_of(9)], [ending, ending, greedy(12)]
        )
        for output, whole in ((first, one), (second, two)):
            end = min(whole.index(id) for id in engine.eos_ids if id in whole) + 1
            assert (output.token_ids, output.finish_reason) == (whole[:end], "stop")
        assert (third.token_ids, third.finish_reason) == (one, "length")
        assert self.engine().eos_ids == CONFIG.eos_ids

    def test_generate_keeps_the_order_of_the_prompts_and_drops_old_records(self):
        engine = self.engine(2)
        engine.generate([prompt_of(3)], greedy(9))
        prompts = [prompt_of(i) for i in (5, 1, 8)]
        outputs = engine.generate(prompts, [greedy(1), greedy(6), greedy(3)])
        assert [output.prompt_ids for output in outputs] == prompts
        assert [len(output.token_ids) for output in outputs] == [1, 6, 3]
        assert sum(record.prefill_tokens for record in engine.steps) == 14

    def test_priority_decides_who_runs_first(self):
        engine = self.engine(1, policy="priority")
        for id, priority in (("a", 2), ("b", 0), ("c", 1)):
            ask(engine, 2, 1, id, priority=priority)
        assert [id for id, _ in finish(engine)] == ["b", "c", "a"]

    def test_random_arrivals_and_aborts(self):
        """50 requests join at random steps and 10 of them leave; all others get every token."""
        rng, engine = random.Random(4), self.engine(7, 24, max_chunk=16)
        requests = [Request(prompt_of(1 + 7 * i % 30), greedy(32), id=str(i)) for i in range(50)]
        arrivals = {request.id: rng.randrange(150) for request in requests}
        aborts = {str(i): arrivals[str(i)] + rng.randrange(60) for i in range(0, 50, 5)}
        for step in range(400):
            for request in requests:
                if arrivals[request.id] == step:
                    engine.add(request)
                if aborts.get(request.id) == step and request.id in engine.requests:
                    engine.abort(request.id)
            engine.step()
        reasons = Counter(request.output.finish_reason for request in requests)
        assert reasons["abort"] > 5 and reasons["length"] >= 40
        assert_answered(*requests, aborted=True)
        self.assert_idle(engine)
        assert sum(record.prefill_tokens > 0 < record.decode_tokens for record in engine.steps) > 30

    # ---- invalid requests ----

    @bad
    def test_one_bad_prompt_among_good_ones(self, prompt, params, message):
        prompts = [prompt_of(5), prompt, prompt_of(9)]
        first, wrong, last = self.engine(2).generate(prompts, [greedy(6), params, greedy(6)])
        assert (wrong.finish_reason, wrong.token_ids) == ("error", [])
        assert message in (wrong.error or "")
        assert (first.token_ids, last.token_ids) == (answer(5, 6), answer(9, 6))
        assert (first.error, last.error, first.finish_reason) == (None, None, "length")

    def test_only_bad_prompts_or_none(self, passes):
        outputs = self.engine().generate([[], [1] * 64], SamplingParams())
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert passes() == []
        with pytest.raises(UserError, match="There are no prompts: give at least one"):
            self.engine().generate([], SamplingParams())
        with pytest.raises(UserError, match="2 prompts and 1 sampling settings"):
            self.engine().generate([[1], [2]], [SamplingParams()])

    def test_without_chunks_a_prompt_over_the_budget(self):
        engine = self.engine(2, 8, chunked=False)
        wrong, fits = engine.generate([prompt_of(9), prompt_of(8)], greedy(4))
        assert wrong.finish_reason == "error"
        assert "allow chunks, or raise the budget" in (wrong.error or "")
        assert fits.token_ids == answer(8, 4)

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_an_id_is_taken_while_its_request_is_in_the_engine(self, steps):
        engine = self.engine(1)
        first = ask(engine, 3, 4, "twin")
        for _ in range(steps):
            engine.step()
        with pytest.raises(UserError, match="request 'twin' in the engine already"):
            ask(engine, 5, 4, "twin")
        finish(engine)
        again = ask(engine, 5, 4, "twin")  # the first has gone
        finish(engine)
        assert_answered(first, again)

    def test_ids_that_the_engine_gives_are_not_taken(self):
        engine = self.engine()
        requests = [
            ask(engine, 2, 1, "request-1"),
            *(engine.add(Request(prompt_of(2), greedy(1))) for _ in range(4)),
        ]
        assert len({"", *(request.id for request in requests)}) == 6

    # ---- failures ----

    @pytest.mark.parametrize("before", ["a pass", "a pass that failed"])
    def test_a_failure_outside_of_a_pass_ends_all(self, before, broken, monkeypatch):
        """Here the preparation of memory fails."""
        engine = self.engine(1)
        requests = [ask(engine, 8, 2), ask(engine, 5, 8), ask(engine, 4, 8)]
        if before == "a pass":
            finish_one = [engine.step(), engine.step()]
            assert [len(tokens) for tokens in finish_one] == [1, 1]
            requests.pop(0)
        else:
            broken()
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
            assert engine.fail(UserError("The pass failed.")) == [requests.pop(0)]

        def fail(moves):
            assert moves
            raise RuntimeError("no memory to move to")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "move", fail)
            with pytest.raises(RuntimeError, match="no memory to move to"):
                engine.step()
        assert engine.fail(UserError("Memory failed.")) == requests
        self.assert_idle(engine)
        assert engine.generate([prompt_of(9)], greedy(8))[0].token_ids == answer(9, 8)

    @pytest.mark.parametrize("when", [1, 2, 3, 6], ids=["chunk", "chunk 2", "prompt", "decode"])
    def test_nan_stays_with_its_request_and_goes_with_it(self, when):
        """The request alone ends with "error"; the next owner of its memory never meets the NaN."""
        engine = self.engine(3, 32, max_chunk=10, **self.unshared, **self.tight)
        sick, *healthy = (ask(engine, length, 20) for length in (26, 9, 17, 4, 30))
        for _ in range(when):
            engine.step()
        sampled = len(sick.output.token_ids)
        self.spoil(engine, sick)
        finish(engine)
        assert (sick.output.finish_reason, len(sick.output.token_ids)) == ("error", sampled)
        assert "NaN or infinite" in (sick.output.error or "")
        assert_answered(*healthy)
        self.assert_idle(engine)

    def test_all_sick_end_and_the_engine_lives(self):
        engine = self.engine(2, **self.unshared)
        sick = [ask(engine, length, 20) for length in (4, 9)]
        engine.step()
        for request in sick:
            self.spoil(engine, request)
        assert engine.step() == []
        assert [request.output.finish_reason for request in sick] == ["error"] * 2
        assert engine.generate([prompt_of(5)], greedy(9))[0].token_ids == answer(5, 9)

    # ---- streams ----

    def test_several_streams_read_in_turn(self):
        """Reading one moves all of them on, and none misses a token."""
        engine = self.engine(2)
        asked = [(5, 8), (9, 3), (2, 12), (14, 5)]
        streams = {
            i: engine.stream(prompt_of(n), greedy(count)) for i, (n, count) in enumerate(asked)
        }
        tokens: dict[int, list[Any]] = {i: [] for i in streams}
        while streams:
            for i in list(streams):
                if (token := next(streams[i], None)) is None:
                    del streams[i]
                else:
                    tokens[i].append(token)
        for i, (length, count) in enumerate(asked):
            assert [token.id for token in tokens[i]] == answer(length, count)
            assert all(token.logprobs is not None for token in tokens[i])
            reasons = [token.finish_reason for token in tokens[i]]
            assert reasons == [None] * (count - 1) + ["length"]
        assert max(record.rows for record in engine.steps) == 2
        self.assert_idle(engine)

    def test_a_stream_that_others_moved_on_yields_all(self):
        engine = self.engine()
        slow = engine.stream(prompt_of(5), greedy(6))
        first = next(slow).id
        list(engine.stream(prompt_of(2), greedy(20)))  # by now the slow one has ended, too
        assert engine.requests == {}
        assert [first, *(token.id for token in slow)] == answer(5, 6)

    def test_a_closed_stream_is_aborted(self):
        engine = self.engine(1)
        closed = engine.stream(prompt_of(5), greedy(30))
        next(closed)
        waits = ask(engine, 9, 4)
        assert len(engine.requests) == 2
        closed.close()
        assert list(engine.requests.values()) == [waits]
        finish(engine)
        assert_answered(waits)
        self.assert_idle(engine)

    def test_closing_a_stream_that_has_ended_aborts_no_request_of_the_same_id(self):
        engine = self.engine()
        stream = engine.stream(prompt_of(5), greedy(2))
        next(stream)
        (id,) = engine.requests
        engine.step()
        other = ask(engine, 9, 4, id)
        stream.close()
        finish(engine)
        assert_answered(other)

    def test_a_stream_aborted_from_outside_ends(self):
        engine = self.engine()
        stream = engine.stream(prompt_of(5), greedy(30))
        next(stream)
        (id,) = engine.requests
        engine.abort(id)
        assert list(stream) == []

    def test_a_bad_stream_is_an_error_and_leaves_no_trace(self):
        engine = self.engine(**self.unshared)
        with pytest.raises(UserError, match="empty"):
            next(engine.stream([], greedy(3)))
        sick = engine.stream(prompt_of(4), greedy(30))
        next(sick)
        self.spoil(engine, *engine.requests.values())
        with pytest.raises(UserError, match="NaN or infinite"):
            next(sick)
        self.assert_idle(engine)
