"""The contract of an engine that packs its requests into one pass a step, with add, abort, step,
fail, generate, stream and run.

A stage subclasses EngineContract in its own tests and defines `engine`, which makes its engine, and
`spoil`, which breaks a request's memory; nothing is edited here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import prove
from stage01_forward.families import load_model
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
        assert (engine.step(), list(engine.run())) == ([], [])
        assert len(engine.steps) == len(passes()) == 5

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
        assert sum(spent) == sum(request.token_count - 1 for request in requests)
        for record, tokens in zip(engine.steps, spent, strict=True):
            rows = self.shares(record)
            assert record.rows == len({row[0] for row in rows}) and not record.wasted_tokens
            assert record.prefill_tokens == sum(row[1] for row in rows)
            assert not record.waiting or record.rows == sequences or tokens == budget
        ends = [row[3] for record in engine.steps for row in self.shares(record) if row[3]]
        assert ends == ["length"] * 14
        assert_answered(*requests)

    def test_records_are_timed_and_limited(self):
        engine = self.engine(2, steps_kept=3)
        engine.generate([prompt_of(length) for length in (4, 5, 6)], greedy(4))
        first, second, third = engine.steps
        assert all(0 < record.bookkeeping_seconds < record.seconds for record in engine.steps)
        assert first.started + first.seconds <= second.started < third.started

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_all_scenarios(self, tiny, dtype):
        """In float32, `prove` raises for a difference that is not at a near tie."""
        model = load_model(tiny, dtype=dtype)
        engine = self.engine(4, 32, model=model)
        parity = prove(engine, oracle_of(model), SamplingParams)
        assert parity.sequences > 20 and (dtype == torch.float32 or not parity.near_ties)
        self.assert_idle(engine)

    def test_each_of_several_end_ids_ends_its_own_request(self):
        """The model's config has one; the engine is given two others."""
        one, two = answer(9, 12), answer(5, 12)
        engine = self.engine(eos_ids=(one[3], two[5]))
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

    @bad
    def test_one_bad_prompt_among_good_ones(self, prompt, params, message):
        prompts = [prompt_of(5), prompt, prompt_of(9)]
        first, wrong, last = self.engine(2).generate(prompts, [greedy(6), params, greedy(6)])
        assert (wrong.finish_reason, wrong.token_ids) == ("error", [])
        assert message in (wrong.error or "")
        assert (first.token_ids, last.token_ids) == (answer(5, 6), answer(9, 6))
        with pytest.raises(UserError, match="There are no prompts: give at least one"):
            self.engine().generate([], params)

    def test_an_id_is_taken_while_its_request_is_in_the_engine(self):
        """Also one that the engine would have given."""
        engine = self.engine(1)
        first = ask(engine, 3, 4, "request-1")
        for count in range(2, 5):
            with pytest.raises(UserError, match="request 'request-1' in the engine already"):
                ask(engine, 5, 4, "request-1")
            engine.add(Request(prompt_of(2), greedy(1)))
            assert len(engine.requests) == count and "" not in engine.requests
            engine.step()
        finish(engine)
        again = ask(engine, 5, 4, "request-1")  # the first has gone
        finish(engine)
        assert_answered(first, again)

    def test_a_failure_outside_of_a_pass_ends_all(self, monkeypatch):
        """Here the preparation of memory fails."""
        engine = self.engine(1)
        first, *requests = [ask(engine, 8, 2), ask(engine, 5, 8), ask(engine, 4, 8)]
        while first.output.finish_reason is None:
            engine.step()

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

    def test_several_streams_read_in_turn(self):
        """Reading one moves all of them on, and none misses a token or repeats one."""
        engine = self.engine(4, **self.tight)  # where memory is little, they preempt each other
        asked = [(5, 16), (9, 3), (12, 18), (2, 20), (14, 15)]
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
        assert max(record.rows for record in engine.steps) == 4
        self.assert_idle(engine)

    @pytest.mark.parametrize("how", ["closed", "aborted from outside"])
    def test_a_stream_that_ends_early_leaves_no_trace(self, how):
        engine = self.engine(1)
        stream = engine.stream(prompt_of(5), greedy(30))
        next(stream)
        (id,) = engine.requests
        waits = ask(engine, 9, 4)
        if how == "closed":
            stream.close()
        else:
            engine.abort(id)
        assert list(stream) == [] and list(engine.requests.values()) == [waits]
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
