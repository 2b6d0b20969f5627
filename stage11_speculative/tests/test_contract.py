"""The contract of engines, with drafts of every quality: every answer is that of plain decode."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stage04_continuous.tests import oracle
from stage04_continuous.tests.contract import EngineContract
from stage04_continuous.tests.oracle import CONFIG, answer, ask, assert_answered, finish
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import engine_of
from stage11_speculative.make import with_drafts
from stage11_speculative.proposers import NGram, Recorded


class Guess:
    """Drafts of any number: right where the naive engine's greedy answer is the request's, and
    wrong in every other way."""

    def __init__(self, right: float = 0.6) -> None:
        self.rng, self.right, self.forgotten = random.Random(1), right, []

    def propose(self, requests, most):
        return [self._of(request, count) for request, count in zip(requests, most, strict=True)]

    def _of(self, request, count):
        whole = oracle.naive(list(request.prompt_ids), request.sampling).token_ids
        start = len(request.output.token_ids)
        coming = [
            id if self.rng.random() < self.right else self.rng.randrange(CONFIG.vocab_size)
            for id in whole[start : start + count]
        ]
        return coming[: self.rng.randint(0, len(coming))]

    def forget(self, request):
        self.forgotten.append(request)


PROPOSERS: dict[str, Any] = {
    "right": lambda: Guess(1.0),
    "mixed": Guess,
    "wrong": lambda: Guess(0.0),
    "n-gram": lambda: NGram(3, 1),
}


@pytest.fixture(scope="module", autouse=True, params=PROPOSERS)
def proposer(request):
    """`engine` makes its engine with this proposer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TestDrafts, "proposer", staticmethod(PROPOSERS[request.param]))
        yield


class TestDrafts(paged.TestPaged):
    proposer: Any = Guess

    @classmethod
    def engine(cls, *args: Any, **options: Any) -> Any:
        return with_drafts(engine_of(*args, **options), cls.proposer(), most=5)
