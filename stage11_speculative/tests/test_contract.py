"""The contract of engines: with drafts the answers are the same, and only what counts passes is
another. Drafts of other qualities: test_engine.py, in random lives."""

from __future__ import annotations

from typing import Any

import pytest

from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import engine_of
from stage11_speculative.engine import with_drafts

from .guesses import Guess

MOST = 2  # so few that the answers of the contract take several passes


class TestDrafts(paged.TestPaged):
    token_a_step = False

    def engine(self, *args: Any, **options: Any) -> Any:
        return with_drafts(engine_of(*args, **options), Guess(1.0), MOST)

    # With drafts it is another one: test_engine.py has what they take and save, pass by pass.
    test_the_whole_record_of_a_small_crowd = None  # type: ignore[assignment]

    @pytest.mark.parametrize("when", [1, 2, 3], ids=["chunk", "chunk 2", "prompt"])
    def test_nan_stays_with_its_request_and_goes_with_it(self, when):
        """The contract's, before the answer can have ended."""
        super().test_nan_stays_with_its_request_and_goes_with_it(when)
