"""Proposers for tests: drafts of any quality, from a model of their own."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

from stage04_continuous.tests import oracle
from stage04_continuous.tests.oracle import CONFIG
from stage11_speculative.drafts import Drafts


@cache
def _oracle(model: Any) -> oracle.Oracle:
    """The naive engine over a copy of `model`, so that tests can watch the passes of `model`."""
    return oracle.Oracle(copy.deepcopy(model))


class Guess:
    """Drafts of random lengths, each right with the probability `right`: what plain decode would
    take, sampled or greedy. right None: no drafts."""

    def __init__(self, right: float | None) -> None:
        self.rng, self.right = random.Random(1), right

    def propose(self, requests: Any, most: Any) -> list[Drafts]:
        return [self._of(request, count) for request, count in zip(requests, most, strict=True)]

    def forget(self, request: Any) -> None:
        """Nothing is kept."""

    def _of(self, request: Any, count: int) -> Drafts:
        if self.right is None:
            return []
        naive, prompt = _oracle(oracle.the_model()), list(request.prompt_ids)
        (whole,) = naive.generate([prompt], [request.sampling])
        start = len(request.output.token_ids)
        drafts = [
            id if self.rng.random() < self.right else self.rng.randrange(CONFIG.vocab_size)
            for id in whole.token_ids[start : start + count]
        ]
        return drafts if self.right == 1 else drafts[: self.rng.randint(0, len(drafts))]
