"""The contract of an engine with add, abort, step and fail, which may run one request at a time.

A later stage or an adapter subclasses StepContract in its own tests and defines `engine`, which
makes its engine; nothing is edited here. Engines that pack requests take EngineContract instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request, State

from .oracle import PENALIZED, answer, ask, assert_answered, finish, greedy, prompt_of, the_model

BAD = {
    "empty": ([], SamplingParams(), "prompt is empty"),
    "too long": ([1] * 64, SamplingParams(), "has 64 tokens, and wide sees 64"),
    "no such token": ([1, 101], SamplingParams(), "Token id 101 is not in the vocabulary"),
    "no such stop token": ([1], SamplingParams(stop_token_ids=(101,)), "stop_token_ids"),
}
bad = pytest.mark.parametrize("prompt, params, message", BAD.values(), ids=BAD)


class StepContract:
    """Subclass it as `class TestMine(StepContract)`."""

    together: int = 3  # how many of three requests the engine runs at once
    phases = {("waiting", False, False), ("running", True, False), ("running", False, True)}

    def engine(self, sequences: int = 4, budget: int = 32, **options: Any) -> Any:
        """An engine for `the_model()`, or options["model"], with at most `sequences` requests and
        `budget` tokens in a pass. Other options: eos_ids, observers, steps_kept, policy, max_chunk,
        chunked."""
        raise NotImplementedError

    def assert_idle(self, engine: Any) -> None:
        """No request and no memory is held."""
        assert engine.requests == {}

    def shares(self, record: Any) -> list[tuple[str, int, int, str | None]]:
        """(id, prefill tokens, decode tokens, finish reason) of each request in a pass, by id."""
        names = ("request_id", "prefill_tokens", "decode_tokens", "finish_reason")
        rows = record.slots if hasattr(record, "slots") else record.sequences
        return sorted(tuple(getattr(row, name) for name in names) for row in rows)

    @pytest.fixture
    def broken(self) -> Iterator[Any]:
        """broken(): the next pass of the model raises an error."""
        handles: list[Any] = []

        def fail(module, given):
            handles.pop().remove()
            raise RuntimeError("out of memory")

        yield lambda: handles.append(the_model().register_forward_pre_hook(fail))
        for handle in handles:
            handle.remove()

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
        assert len(engine.steps) == end + 3
        assert_answered(second)

    @bad
    def test_a_bad_request_is_refused_and_the_others_go_on(self, prompt, params, message):
        engine = self.engine(2)
        good = [ask(engine, length, 6) for length in (5, 9, 2)]
        engine.step()
        request = Request(prompt, params, id="bad")
        with pytest.raises(UserError, match=message):
            engine.add(request)
        assert request.state is State.NEW and len(engine.requests) == 3
        finish(engine)
        assert_answered(*good)

    def test_abort_at_any_moment_changes_no_other_request(self):
        """The same crowd again and again, and the victim leaves before another step each time."""
        phases = set()
        for moment in range(22):
            engine = self.engine(3, 12, max_chunk=5)
            others = [ask(engine, length, 8) for length in (18, 30, 5)]
            victim = ask(engine, 26, 8, "victim")
            others += [ask(engine, length, 8) for length in (12, 22)]
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
        assert phases == self.phases
        assert "victim" not in engine.requests  # the loop reached its end

    def test_abort_of_a_request_that_is_not_there(self):
        engine = self.engine()
        other = ask(engine, 5, 6)
        ask(engine, 2, 1, "finished")
        ask(engine, 2, 9, "aborted")
        engine.abort("aborted")
        while "finished" in engine.requests:
            engine.step()
        for id in ("unknown", "finished", "aborted"):
            with pytest.raises(UserError, match=f"There is no request '{id}' in the engine"):
                engine.abort(id)
        finish(engine)
        assert_answered(other)

    def test_a_pass_that_fails_ends_its_requests_and_no_other(self, broken):
        engine = self.engine(3)
        requests = [ask(engine, length, 8) for length in (9, 11, 5, 7)]
        broken()
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        inside, waiting = requests[: self.together], requests[self.together :]
        assert engine.fail(UserError("The pass failed.")) == inside
        errors = {(request.output.finish_reason, request.output.error) for request in inside}
        assert errors == {("error", "The pass failed.")}
        assert list(engine.requests.values()) == waiting
        finish(engine)
        again = ask(engine, 9, 8)
        finish(engine)
        assert_answered(*waiting, again)
        self.assert_idle(engine)
