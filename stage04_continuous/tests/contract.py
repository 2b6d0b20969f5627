"""The contract of engines that pack their requests into one pass a step. Nothing is edited here: a
stage subclasses it in its own tests, and defines `engine`, which makes its engine, and `spoil`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.errors import UserError
from shared.parity import prove
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request, State

from .oracle import (
    CONFIG,
    PENALIZED,
    answer,
    ask,
    assert_answered,
    finish,
    greedy,
    oracle_of,
    prompt_of,
    the_model,
)

BAD = {
    "empty": ([], SamplingParams(), "prompt is empty"),
    "too long": ([1] * 64, SamplingParams(), "has 64 tokens, but wide sees 64"),
    "no such token": ([1, 101], SamplingParams(), "Token id 101 is not in the vocabulary"),
    "no such stop token": ([1], SamplingParams(stop_token_ids=(101,)), "stop_token_ids"),
}


class EngineContract:
    """Subclass it as `class TestMine(EngineContract)`."""

    token_a_step = True  # of each request that runs; with drafts several
    every = 1  # of the moments at which a request may be aborted
    tight: dict[str, Any] = {}  # options for little memory, where an engine can have little
    unshared: dict[str, Any] = {}  # options under which requests share no memory

    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        """An engine for `the_model()`, or options["model"], with at most `sequences` requests and
        `budget` tokens in a pass. Other options: eos_ids, observers, policy, max_chunk."""
        raise NotImplementedError

    def spoil(self, engine: Any, request: Request) -> None:
        """Set all keys and values of `request` to NaN."""
        raise NotImplementedError

    def assert_idle(self, engine: Any) -> None:
        """No request and no memory is held."""
        assert engine.requests == {}

    def shares(self, record: Any) -> list[tuple[str, int, int, str | None]]:
        """(id, prefill tokens, decode tokens, finish reason) of each request in a pass, by id."""
        names = ("request_id", "prefill_tokens", "decode_tokens", "finish_reason")
        rows = record.shares
        return sorted(tuple(getattr(row, name) for name in names) for row in rows)

    def test_each_token_comes_with_the_id_of_its_request(self):
        """Sampled requests with every option that neighbours could disturb are among them."""
        engine = self.engine(2)
        requests = [
            engine.add(Request(prompt_of(length), sampling, id=id))
            for id, length, sampling in (
                ("a", 9, greedy(4)),
                ("b", 2, replace(PENALIZED, seed=3)),
                ("c", 5, greedy(1)),
                ("d", 23, PENALIZED),
                ("e", 23, replace(PENALIZED, max_tokens=24)),
            )
        ]
        tokens = finish(engine)
        for request in requests:
            mine = [token for id, token in tokens if id == request.id]
            assert [token.id for token in mine] == request.output.token_ids
            assert [token.logprobs for token in mine] == request.output.logprobs
            reasons = [token.finish_reason for token in mine]
            assert reasons == [None] * (len(mine) - 1) + [request.output.finish_reason]
        assert_answered(*requests)
        assert len(set(requests[4].output.token_ids)) > 8  # worth comparing
        self.assert_idle(engine)

    @pytest.mark.parametrize("length", [1, 62, 63])
    def test_prompt_and_answer_fill_the_context_and_no_more(self, length):
        engine = self.engine()
        request = ask(engine, length, 500)
        finish(engine)
        assert_answered(request)
        assert len(request.output.token_ids) == 64 - length

    def test_a_stop_makes_room_at_once(self):
        whole = answer(9, 12)
        engine = self.engine(1)
        first = engine.add(Request(prompt_of(9), greedy(12, stop_token_ids=(whole[4],))))
        second = ask(engine, 5, 3)
        finish(engine)
        end = whole.index(whole[4]) + 1
        assert (first.output.token_ids, first.output.finish_reason) == (whole[:end], "stop")
        assert len(engine.steps) == end + 3 or not self.token_a_step
        assert_answered(second)

    def test_abort_at_any_moment_changes_no_other_request(self):
        """The same crowd again and again, and the victim leaves before another step each time."""
        phases = set()
        for moment in range(0, 24, self.every):
            engine = self.engine(3, 12, max_chunk=5)
            others = [ask(engine, length, 4) for length in (18, 30, 5)]
            victim = ask(engine, 26, 4, "victim")
            others += [ask(engine, length, 4) for length in (12, 22)]
            for _ in range(moment):
                engine.step()
            if "victim" not in engine.requests:
                break
            computed = victim.computed
            phases.add((victim.state.value, 0 < computed < 26, bool(victim.output.token_ids)))
            assert engine.abort("victim") is victim.output
            assert victim.output.finish_reason == "abort" and victim.state is State.FINISHED
            finish(engine)
            assert_answered(victim, aborted=True)
            assert_answered(*others)
            later = [self.shares(record) for record in list(engine.steps)[moment:]]
            assert "victim" not in {row[0] for rows in later for row in rows}
            self.assert_idle(engine)
        waiting, running = ("waiting", False, False), ("running", False, True)
        assert phases == {waiting, ("running", True, False), running}
        assert "victim" not in engine.requests  # the loop reached its end

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

    def test_records_are_timed(self):
        engine = self.engine(2)
        engine.generate([prompt_of(length) for length in (4, 5, 6)], greedy(4))
        for record, later in itertools.pairwise(engine.steps):
            assert record.started < record.started + record.seconds <= later.started

    @pytest.mark.parametrize(
        "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
    )
    def test_all_scenarios(self, dtype):
        """In float32, `prove` raises for a difference that is not at a near tie."""
        model = the_model(dtype)
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

    @pytest.mark.parametrize("prompt, params, message", BAD.values(), ids=BAD)
    def test_generate_keeps_the_order_and_a_bad_prompt_fails_alone(self, prompt, params, message):
        engine = self.engine(2)
        engine.generate([prompt_of(3)], greedy(9))
        prompts = [prompt_of(5), prompt, prompt_of(1), prompt_of(8)]
        outputs = engine.generate(prompts, [greedy(6), params, greedy(1), greedy(4)])
        assert [output.prompt_ids for output in outputs] == prompts
        wrong = outputs.pop(1)
        assert (wrong.finish_reason, wrong.token_ids) == ("error", [])
        assert message in (wrong.error or "")
        wanted = [answer(5, 6), answer(1, 1), answer(8, 4)]
        assert [output.token_ids for output in outputs] == wanted
        assert sum(record.prefill_tokens for record in engine.steps) == 14  # of this call alone
        assert engine.generate([], params) == []

    def test_an_id_is_taken_while_its_request_is_in_the_engine(self):
        """Also one that the engine would have given."""
        engine = self.engine(1)
        first = ask(engine, 3, 12, "request-1")
        with pytest.raises(UserError, match="already has a request 'request-1'"):
            ask(engine, 5, 4, "request-1")
        engine.add(Request(prompt_of(2), greedy(1)))
        assert list(engine.requests) == ["request-1", "request-2"]
        finish(engine)
        with pytest.raises(KeyError):
            engine.abort("request-1")
        again = ask(engine, 5, 4, "request-1")
        finish(engine)
        assert_answered(first, again)

    @pytest.mark.parametrize("when", [1, 2, 3, 6], ids=["chunk", "chunk 2", "prompt", "decode"])
    def test_nan_stays_with_its_request_and_goes_with_it(self, when):
        """The request alone ends with "error"; the next owner of its memory never meets the NaN."""
        engine = self.engine(3, 32, max_chunk=10, **self.unshared, **self.tight)
        sick, *healthy = (ask(engine, length, 12) for length in (26, 9, 17, 4, 30))
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

    def test_a_stream_that_ends_early_leaves_no_trace(self):
        engine = self.engine(1)
        stream = engine.stream(prompt_of(5), greedy(30))
        next(stream)
        other = ask(engine, 9, 4)
        stream.close()
        assert list(engine.requests.values()) == [other]
        finish(engine)
        assert_answered(other)
        self.assert_idle(engine)
