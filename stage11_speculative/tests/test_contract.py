"""The contract of engines: with drafts the answers are the same, and only what counts passes is
another. Drafts of other qualities: test_engine.py, in random lives."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import UserError
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import ask, assert_answered, finish, greedy, prompt_of
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import engine_of
from stage11_speculative.engine import with_drafts

from .guesses import Guess

MOST = 2  # so few that the answers of the contract take several passes


class TestDrafts(paged.TestPaged):
    token_a_step = False

    def engine(self, *args: Any, **options: Any) -> Any:
        return with_drafts(engine_of(*args, **options), Guess(1.0), MOST)

    def test_a_stop_makes_room_at_once(self):
        """Also one inside of the drafts, which may have gone on."""
        super().test_a_stop_makes_room_at_once()

    def test_the_whole_record_of_a_small_crowd(self, passes):
        """Two at a time, a budget of 8. Right drafts take what is left of it, in order."""
        engine = self.engine(2, 8)
        for id, length, count in (("a", 5, 2), ("b", 6, 3), ("c", 3, 2), ("d", 1, 1)):
            ask(engine, length, count, id)
        finish(engine)
        records = [self.shares(record) for record in engine.steps]
        assert all(sum(row[1] + row[2] for row in rows) <= 8 for rows in records)
        computed = sum(tokens for tokens, _ in passes())
        wasted = sum(record.wasted_tokens for record in engine.steps)
        assert computed - wasted == 5 + 6 + 3 + 1 + 1 + 2 + 1  # the last token is never computed
        assert not wasted
        assert records == [
            [("a", 5, 0, None), ("b", 3, 0, None)],
            [("a", 0, 1, "length"), ("b", 3, 2, "length")],
            [("c", 3, 1, "length"), ("d", 1, 0, "length")],
        ]

    def test_records_are_timed_and_limited(self):
        engine = self.engine(2, steps_kept=3)
        engine.generate([prompt_of(length) for length in (4, 5, 6, 7, 8)], greedy(4))
        assert len(engine.steps) == 3
        assert all(record.seconds > 0 for record in engine.steps)

    @pytest.mark.parametrize("when", [1, 2, 3], ids=["chunk", "chunk 2", "prompt"])
    def test_nan_stays_with_its_request_and_goes_with_it(self, when):
        """The contract's, before the answer can have ended."""
        super().test_nan_stays_with_its_request_and_goes_with_it(when)

    def test_an_id_is_taken_while_its_request_is_in_the_engine(self):
        engine = self.engine(1)
        first = ask(engine, 3, 12, "request-1")
        with pytest.raises(UserError, match="already has a request 'request-1'"):
            ask(engine, 5, 4, "request-1")
        engine.add(Request(prompt_of(2), greedy(1)))
        assert list(engine.requests) == ["request-1", "request-2"]
        finish(engine)
        again = ask(engine, 5, 4, "request-1")  # the first has gone
        finish(engine)
        assert_answered(first, again)

    def test_a_stream_that_ends_early_leaves_no_trace(self):
        engine = self.engine(1)
        stream = engine.stream(prompt_of(5), greedy(30))
        next(stream)
        other = ask(engine, 9, 4)
        stream.close()
        assert list(stream) == [] and list(engine.requests.values()) == [other]
        finish(engine)
        assert_answered(other)
        self.assert_idle(engine)
