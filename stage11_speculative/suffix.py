"""Drafts from the longest match with text seen before: the request's own, and past answers.

A suffix automaton (Blumer et al., 1985; for drafts: Hu et al., "SAM Decoding", 2024) knows every
piece of a text in at most 2 n states. One token more, and the longest piece that ends there and
came before, take constant time on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stage04_continuous.request import Request

from .drafts import Drafts

END = -1  # between past answers: no token
SHORTEST, MOST_TOKENS = 2, 1_000_000  # that must match; of past answers


class Automaton:
    """The pieces of a growing text. A state stands for pieces that end in the same places:
    `length` is that of its longest, `end` the place behind its first, `link` the state of its
    longest shorter piece that also ends elsewhere."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.following: list[dict[int, int]] = [{}]  # state -> token -> state
        self.link, self.length, self.end = [-1], [0], [0]
        self.last = 0  # the state of the whole text

    def append(self, token: int) -> None:
        self.tokens.append(token)
        state = self._state({}, 0, self.length[self.last] + 1, len(self.tokens))
        place, self.last = self.last, state
        while place >= 0 and token not in self.following[place]:
            self.following[place][token] = state
            place = self.link[place]
        if place < 0:
            return
        known = self.following[place][token]
        if self.length[known] == self.length[place] + 1:
            self.link[state] = known
            return
        clone = self._state(  # the shorter pieces of `known` now end here too
            dict(self.following[known]), self.link[known], self.length[place] + 1, self.end[known]
        )
        self.link[known] = self.link[state] = clone
        while place >= 0 and self.following[place].get(token) == known:
            self.following[place][token] = clone
            place = self.link[place]

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.link) - 1

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """From the longest piece (its state, its length) that ends a text, to the longest that ends
        it with one token more."""
        while state and token not in self.following[state]:
            state = self.link[state]
            matched = self.length[state]
        state = self.following[state].get(token, 0)
        return state, matched + 1 if state else 0

    def after(self, state: int, count: int) -> Drafts:
        """At most `count` tokens that followed the first occurrence of a state's pieces."""
        drafts = self.tokens[self.end[state] : self.end[state] + count]
        return drafts[: drafts.index(END)] if END in drafts else drafts


@dataclass
class _Match:
    """How far a request was read, and the longest pieces that end there."""

    text: Automaton = field(default_factory=Automaton)
    past: Automaton | None = None
    state: int = 0  # in the past answers
    matched: int = 0


class Suffix:
    """The continuation of the longest match, in the request itself or in past answers; at most as
    long as the match: what has agreed for long will go on to.

    Past answers are kept for each salt, so that no tenant's text shows in another's speed; after
    MOST_TOKENS of a salt they begin anew, and a request under way keeps those that it has. salt_of:
    the salt of a request; stage 05's table of blocks has it.
    """

    def __init__(self, salt_of: Callable[[Request], bytes] = lambda request: b"") -> None:
        self.salt_of = salt_of
        self.past: dict[bytes, Automaton] = {}
        self.matches: dict[Request, _Match] = {}

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        return [self._of(request, count) for request, count in zip(requests, most, strict=True)]

    def forget(self, request: Request) -> None:
        """Keep the answer for later requests."""
        self.matches.pop(request, None)
        if not request.output.token_ids or request.output.error is not None:
            return
        salt = self.salt_of(request)
        past = self.past.setdefault(salt, Automaton())
        if len(past.tokens) > MOST_TOKENS:
            past = self.past[salt] = Automaton()
        for token in [*request.output.token_ids, END]:
            past.append(token)

    def _of(self, request: Request, count: int) -> Drafts:
        match = self.matches.get(request)
        if match is None:
            match = self.matches[request] = _Match(past=self.past.get(self.salt_of(request)))
        text, past = match.text, match.past
        read = len(text.tokens)
        for token in request.tokens(read, request.token_count - read):
            text.append(token)
            if past is not None:
                match.state, match.matched = past.step(match.state, match.matched, token)
        state = text.link[text.last]  # the longest piece at the end that ended elsewhere, too
        length, source = text.length[state], text
        if past is not None and match.matched > length:
            length, source, state = match.matched, past, match.state
        if length < SHORTEST:
            return []
        return source.after(state, min(count, length))
