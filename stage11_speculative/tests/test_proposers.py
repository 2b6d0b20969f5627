"""Proposers and the choice of lengths, against slow and obvious versions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import measure
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import ask, assert_answered, finish, greedy
from stage05_paged.tests.engines import engine_of
from stage11_speculative import lengths
from stage11_speculative.engine import with_drafts
from stage11_speculative.lengths import PATIENCE, PRIOR, Adaptive, PassTimes, measure_passes
from stage11_speculative.suffix import Automaton, Suffix

from .guesses import Guess

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


def request_of(prompt, answer=(), salt=b""):
    request = Request(list(prompt), greedy(50), salt=salt)
    request.output.token_ids += answer
    return request


def test_drafts_are_no_longer_than_what_matched():
    suffix = Suffix(shortest=2)
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [9]) == [[3, 4]]
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 2])], [9]) == [[]]  # one token matched
    assert suffix.propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2])], [1]) == [[3]]


def test_past_answers_serve_requests_of_the_same_salt_alone():
    suffix = Suffix(shortest=2)
    for salt in (b"a", b"b"):
        past = request_of([9], [1, 2, 3, 4, 5], salt)
        suffix.propose([past], [4])
        if salt == b"a":
            suffix.forget(past)
    assert suffix.propose([request_of([7, 1, 2], salt=b"a")], [9]) == [[3, 4]]
    assert suffix.propose([request_of([7, 1, 2], salt=b"b")], [9]) == [[]]
    assert suffix.propose([request_of([7, 3, 4], salt=b"a")], [9]) == [[5]]  # not past its end


def test_past_answers_begin_anew_when_they_are_many():
    suffix = Suffix(shortest=2, most_tokens=8)
    for start in (0, 10, 20):
        past = request_of([9], range(start, start + 5))
        suffix.propose([past], [4])
        suffix.forget(past)
    assert suffix.propose([request_of([7, 0, 1])], [9]) == [[]]
    assert suffix.propose([request_of([7, 20, 21])], [9]) == [[22, 23]]


FLAT = PassTimes((1, 64), (1.0, 1.0))
STEEP = PassTimes((1, 64), (1.0, 64.0))  # a row more costs as much as the first


def test_lengths_follow_what_a_row_costs():
    requests = [request_of([1]) for _ in range(3)]
    assert Adaptive(FLAT).choose(requests, [4, 0, 2], 3) == [4, 0, 2]
    assert Adaptive(STEEP).choose(requests, [4, 0, 2], 3) == [0, 0, 0]
    assert Adaptive(STEEP).choose(requests, [4, 0, 2], 500) == [0, 0, 0]  # beside prompts, too
    knee = PassTimes((1, 6, 64), (1.0, 1.0, 30.0))  # three rows more are free
    assert sum(Adaptive(knee).choose(requests, [4, 0, 2], 3)) == 3
    step = Adaptive(PassTimes((1, 2, 64), (1.0, 2.0, 2.0)))  # one does not pay, but four do
    step.rates[requests[0]] = 0.9
    assert step.choose(requests[:1], [4], 1) == [4]


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=4))
def test_no_other_choice_is_expected_to_be_faster(rows):
    from itertools import product

    times = PassTimes((1, 4, 8, 64), (1.0, 1.1, 1.6, 9.0))
    adaptive = Adaptive(times)
    requests = [request_of([1]) for _ in rows]
    adaptive.rates = {request: rate for request, (_, rate) in zip(requests, rows, strict=True)}
    proposed = [count for count, _ in rows]

    def speed(counts):
        survived = sum(
            rate ** (place + 1)
            for (_, rate), count in zip(rows, counts, strict=True)
            for place in range(count)
        )
        return (len(rows) + survived) / times(len(rows) + sum(counts))

    chosen = speed(adaptive.choose(requests, proposed, len(rows)))
    best = max(map(speed, product(*(range(count + 1) for count in proposed))))
    assert chosen >= best * (1 - 1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 1)), min_size=1),
    st.integers(0, 20),
)
def test_where_the_most_drafts_do_not_pay_no_fewer_do(rows, prompts):
    adaptive = Adaptive(PassTimes((1, 4, 8, 64), (1.0, 1.3, 2.0, 16.0)))
    requests = [request_of([1]) for _ in rows]
    adaptive.rates = {request: rate for request, (*_, rate) in zip(requests, rows, strict=True)}
    most, count = [many for many, *_ in rows], len(rows) + prompts
    fewer = [min(many, some) for many, some, _ in rows]
    hopeless = adaptive.hopeless(requests, most, count)
    assert hopeless == (not any(adaptive.choose(requests, most, count)))
    assert not (hopeless and any(adaptive.choose(requests, fewer, count)))


def test_without_hope_nothing_is_proposed_but_for_a_try_now_and_then(monkeypatch):
    monkeypatch.setattr(lengths, "PATIENCE", 8)
    calls: list[int] = []

    class Counted(Guess):
        def propose(self, requests, most):
            calls.append(len(engine.steps))
            return super().propose(requests, most)

    engine = with_drafts(engine_of(), Counted(1.0), 1, Adaptive(STEEP))
    request = ask(engine, 9, 50)
    finish(engine)
    assert_answered(request)
    assert calls == list(range(7, len(engine.steps), 8))
    counts = engine.scheduler.draft_counts
    assert counts.proposed == counts.accepted == 50 - len(engine.steps) == len(calls)


def test_what_is_tried_now_and_then_brings_the_drafts_back(monkeypatch):
    monkeypatch.setattr(lengths, "PATIENCE", 4)
    costs = Adaptive(PassTimes((1, 2, 64), (1.0, 1.4, 40.0)))  # pays from a rate of 0.4 on
    costs.common = 0.2
    engine = with_drafts(engine_of(), Guess(1.0), 1, costs)
    request = ask(engine, 9, 50)
    finish(engine)
    assert_answered(request)
    drafted = [record.decode_tokens > 1 for record in list(engine.steps)[1:-1]]
    assert drafted.count(False) > 6 and all(drafted[-10:])


def test_a_rate_is_learned_and_a_hopeless_request_tries_again():
    adaptive, rng = Adaptive(PassTimes((1, 64), (1.0, 30.0))), random.Random(0)
    good, bad, even = map(request_of, ([1], [2], [3]))
    for _ in range(60):
        adaptive.note(even, 4, 1)  # the two behind the refused one say nothing
        adaptive.note(good, 4, 4 if rng.random() < 0.8 else 1)
        adaptive.note(bad, 4, 0)
    assert adaptive.rates[even] == pytest.approx(0.5, abs=0.05)
    assert adaptive.rates[good] > 0.8 > PRIOR > 0.05 > adaptive.rates[bad]
    tried = [adaptive.choose([good, bad], [4, 4], 2) for _ in range(2 * PATIENCE)]
    assert all(lengths[0] for lengths in tried)
    assert [lengths[1] for lengths in tried].count(1) == 2
    adaptive.forget(good)
    assert good not in adaptive.rates and good not in adaptive.idle


def test_measuring_passes_leaves_memory_as_it_was():
    engine = engine_of(blocks=20)
    memory = engine.runner.cache.memory
    before = memory.read(range(20))
    times = measure_passes(engine.runner, 20)
    assert times.rows == (1, 2, 4, 8, 16)
    assert list(times.seconds) == sorted(times.seconds) and times(12) <= times(100)
    assert torch.equal(memory.read(range(20)), before)


def test_a_disturbance_disturbs_all_sizes_alike(monkeypatch):
    """While a server started, another program took the processor for a moment. The passes that
    were measured then looked slow for as long as the server ran, and no draft paid."""
    engine, calls, disturbed = engine_of(blocks=20), iter(range(10**6)), range(3, 8)

    def seconds(run):
        run()
        return 1.0 if next(calls) in disturbed else 0.001

    monkeypatch.setattr(measure, "seconds", seconds)
    assert measure_passes(engine.runner, 20).seconds == (0.001,) * 5
