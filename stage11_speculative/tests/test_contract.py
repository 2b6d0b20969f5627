"""The contract of engines: with drafts the answers are the same, and only what counts passes is
another. Drafts of other qualities: test_engine.py, in random lives."""

from __future__ import annotations

from typing import Any

import pytest

from stage04_continuous.tests.oracle import ask, finish
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

    @pytest.mark.parametrize("when", [1, 2, 3], ids=["chunk", "chunk 2", "prompt"])
    def test_nan_stays_with_its_request_and_goes_with_it(self, when):
        """The contract's, before the answer can have ended."""
        super().test_nan_stays_with_its_request_and_goes_with_it(when)
