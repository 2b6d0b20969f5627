"""Where drafts come from. None of them needs a second model: text repeats itself."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from stage04_continuous.request import Request

from .drafts import Drafts


class NGram:
    """Prompt lookup (Saxena, 2023): if the last tokens occurred before, propose what followed them.

    longest, shortest: tokens that must match, the longest first. Each request has a dictionary from
    its n-grams to where they ended last, so a lookup takes constant time.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.ends: dict[Request, dict[tuple[int, ...], int]] = {}  # n-gram -> place behind it
        self.indexed: dict[Request, int] = {}  # tokens whose n-grams are in `ends`

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        return [self._of(request, count) for request, count in zip(requests, most, strict=True)]

    def forget(self, request: Request) -> None:
        self.ends.pop(request, None)
        self.indexed.pop(request, None)

    def _of(self, request: Request, count: int) -> Drafts:
        tokens = request.tokens(0, request.token_count)
        ends = self.ends.setdefault(request, {})
        # All n-grams but those at the end: nothing follows them yet.
        for end in range(self.indexed.get(request, 1), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        self.indexed[request] = max(1, len(tokens))
        for size in self.sizes:
            if place := ends.get(tuple(tokens[-size:]), 0):
                return tokens[place : place + count]
        return []


class Recorded:
    """The benchmark's dial: drafts from answers known in advance, each wrong with the probability
    1 - alpha.

    answers: by prompt. vocab_size: a wrong draft is another id below it.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], alpha: float, vocab_size: int
    ) -> None:
        self.answers, self.alpha, self.vocab_size = answers, alpha, vocab_size
        self.rng = random.Random(0)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        return [self._of(request, count) for request, count in zip(requests, most, strict=True)]

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def _of(self, request: Request, count: int) -> Drafts:
        answer = self.answers.get(tuple(request.prompt_ids), ())
        start = len(request.output.token_ids)
        return [
            id if self.rng.random() < self.alpha else (id + 1) % self.vocab_size
            for id in answer[start : start + count]
        ]
