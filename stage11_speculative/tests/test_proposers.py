"""Proposers, against slow and obvious versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import greedy
from stage11_speculative.suffix import Automaton, Suffix

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def longest(text, end):
    """(length, place behind its first occurrence) of the longest end of `end` that is in `text`,
    by trying all."""
    for length in range(len(end), 0, -1):
        for place in range(length, len(text) + 1):
            if text[place - length : place] == end[len(end) - length :]:
                return length, place
    return 0, 0


@given(TOKENS, TOKENS)
def test_an_automaton_finds_the_longest_piece(text, other):
    automaton, state, matched = Automaton(), 0, 0
    for token in text:
        automaton.append(token)
    for count, token in enumerate(other, 1):
        state, matched = automaton.step(state, matched, token)
        length, place = longest(text, other[:count])
        assert (matched, automaton.end[state] if matched else 0) == (length, place)
    assert len(automaton.link) <= max(2, 2 * len(text))


@given(TOKENS)
def test_the_longest_repetition_in_a_text_of_its_own(text):
    automaton = Automaton()
    for count, token in enumerate(text, 1):
        automaton.append(token)
        state = automaton.link[automaton.last]
        # The same piece may overlap itself, but must end before the end.
        length, place = longest(text[: count - 1], text[:count])
        assert (automaton.length[state], automaton.end[state]) == (length, place)


def request_of(prompt, answer=(), id=""):
    request = Request(list(prompt), greedy(50), id)
    request.output.token_ids += answer
    return request


def test_drafts_are_no_longer_than_what_matched():
    suffix = Suffix()
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [9]) == [[3, 4]]
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 2])], [9]) == [[]]  # one token matched
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [1]) == [[3]]


def test_past_answers_serve_requests_of_the_same_salt_alone():
    suffix = Suffix(salt_of=lambda request: request.id.encode())
    for salt in ("a", "b"):
        past = request_of([9], [1, 2, 3, 4, 5], salt)
        suffix.propose([past], [4])
        if salt == "a":
            suffix.forget(past)
    assert suffix.propose([request_of([7, 1, 2], id="a")], [9]) == [[3, 4]]
    assert suffix.propose([request_of([7, 1, 2], id="b")], [9]) == [[]]
    assert suffix.propose([request_of([7, 3, 4], id="a")], [9]) == [[5]]  # not past its end


def test_past_answers_begin_anew_when_they_are_many(monkeypatch):
    monkeypatch.setattr("stage11_speculative.suffix.MOST_TOKENS", 8)
    suffix = Suffix()
    for start in (0, 10, 20):
        past = request_of([9], range(start, start + 5))
        suffix.propose([past], [4])
        suffix.forget(past)
    assert suffix.propose([request_of([7, 0, 1])], [9]) == [[]]
    assert suffix.propose([request_of([7, 20, 21])], [9]) == [[22, 23]]
