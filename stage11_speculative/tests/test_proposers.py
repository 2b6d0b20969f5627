"""Proposers, against slow and obvious versions; and the switch, by a clock that the tests move."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import ask, assert_answered, greedy, prompt_of
from stage05_paged.tests.engines import engine_of
from stage11_speculative.engine import with_drafts
from stage11_speculative.proposers import Recorded
from stage11_speculative.suffix import Automaton, Suffix
from stage11_speculative.switch import Measured

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
    suffix = Suffix(shortest=2)
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [9]) == [[3, 4]]
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 2])], [9]) == [[]]  # one token matched
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [1]) == [[3]]


def test_past_answers_serve_requests_of_the_same_salt_alone():
    suffix = Suffix(shortest=2, salt_of=lambda request: request.id.encode())
    for salt in ("a", "b"):
        past = request_of([9], [1, 2, 3, 4, 5], salt)
        suffix.propose([past], [4])
        if salt == "a":
            suffix.forget(past)
    assert suffix.propose([request_of([7, 1, 2], id="a")], [9]) == [[3, 4]]
    assert suffix.propose([request_of([7, 1, 2], id="b")], [9]) == [[]]
    assert suffix.propose([request_of([7, 3, 4], id="a")], [9]) == [[5]]  # not past its end


def test_past_answers_begin_anew_when_they_are_many():
    suffix = Suffix(shortest=2, most_tokens=8)
    for start in (0, 10, 20):
        past = request_of([9], range(start, start + 5))
        suffix.propose([past], [4])
        suffix.forget(past)
    assert suffix.propose([request_of([7, 0, 1])], [9]) == [[]]
    assert suffix.propose([request_of([7, 20, 21])], [9]) == [[22, 23]]


class Clock:
    """Time as tests make it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(switch: Measured, clock: Clock, passes: int, on: Any, off: Any, crowd: int = 1) -> Any:
    """Seconds and tokens of `passes` that the switch has chosen, and which had drafts. on, off:
    seconds and tokens of a pass with and without drafts."""
    began, tokens, drafted = clock.now, 0, list[bool]()
    for _ in range(passes):
        way = switch.on(crowd)
        seconds, count = on if way else off
        clock.now += seconds
        switch.note(crowd, way, count, False)
        tokens += count
        drafted.append(way)
    return clock.now - began, tokens, drafted


@pytest.mark.parametrize("gain", [0.3, 0.7, 0.98, 1.0, 1.02, 1.3, 2.6])
def test_never_more_than_two_hundredths_are_lost_to_the_better_of_on_and_off(gain):
    """One token without drafts in a second, and with them three in 3 / gain seconds."""
    clock = Clock()
    switch = Measured(clock)
    run(switch, clock, 20, (3 / gain, 3), (1.0, 1))  # the first tries
    seconds, tokens, drafted = run(switch, clock, 3000, (3 / gain, 3), (1.0, 1))
    assert tokens / seconds > 0.98 * max(1.0, gain)
    assert 0 < sum(drafted) < 3000  # the other way is tried now and then
    if abs(gain - 1) > 0.1:
        assert (sum(drafted) > 1500) == (gain > 1)


def test_what_is_tried_brings_the_better_way_back():
    clock = Clock()
    switch = Measured(clock)
    run(switch, clock, 500, (2.0, 1), (1.0, 1))
    _, _, drafted = run(switch, clock, 3000, (1.0, 3), (1.0, 1))  # the text repeats itself now
    assert all(drafted[-100:]) or sum(drafted[-100:]) > 90


def test_crowds_of_other_sizes_and_prompts_are_measured_apart():
    clock = Clock()
    switch = Measured(clock)
    for _ in range(300):
        run(switch, clock, 1, (1.0, 3), (1.0, 1), crowd=1)
        run(switch, clock, 1, (4.0, 3), (1.0, 1), crowd=32)
        switch.on(1)
        clock.now += 100.0
        switch.note(1, True, 1, True)  # beside a prompt
    alone = sum(run(switch, clock, 100, (1.0, 3), (1.0, 1), crowd=1)[2])
    crowd = sum(run(switch, clock, 100, (4.0, 3), (1.0, 1), crowd=31)[2])
    assert alone > 90 and crowd < 10


def test_an_engine_turns_drafts_off_that_do_not_pay():
    """Each pass with drafts takes four times as long, and all of them are wrong."""
    clock = Clock()
    wrong = Recorded({tuple(prompt_of(9)): [100] * 50}, 1.0, 101)
    engine = with_drafts(engine_of(), wrong, 2, Measured(clock))
    engine.observers.append(Slow(clock))
    request, drafted = ask(engine, 9, 50), []
    while engine.requests:
        engine.step()
        drafted.append(bool(engine.plan.drafts))
    assert_answered(request)
    assert drafted[1:4] == [True] * 3 and sum(drafted[4:]) < 3
    assert len(engine.steps) == 50


class Slow:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def before(self, plan: Any) -> None:
        self.clock.now += 4.0 if plan.drafts else 1.0

    def after(self, plan: Any) -> None:
        """Nothing to do."""
