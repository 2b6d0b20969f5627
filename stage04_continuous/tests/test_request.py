"""A request: its states, and what is left to compute, which follows from one number alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request, State

LEGAL = {
    (State.NEW, State.WAITING),
    (State.WAITING, State.RUNNING),
    (State.WAITING, State.FINISHED),  # aborted before its turn came
    (State.RUNNING, State.FINISHED),
    (State.RUNNING, State.WAITING),
}


def answered(prompt, answer):
    request = Request(prompt, SamplingParams())
    for id in answer:
        request.output.append(Token(id, None, None))
    return request


@pytest.mark.parametrize(
    "before, after", list(itertools.product(State, State)), ids=lambda state: state.value
)
def test_only_legal_transitions(before, after):
    request = Request([1], SamplingParams(), id="a")
    request.state = before
    if (before, after) in LEGAL:
        request.move(after)
        assert request.state is after
    else:
        with pytest.raises(
            RuntimeError, match=f"request a cannot go from {before.value} to {after.value}"
        ):
            request.move(after)
        assert request.state is before


def test_a_new_request_has_nothing_and_is_nowhere():
    request = Request((4, 5, 6), SamplingParams())
    assert (request.state, request.computed, request.slot, request.arrival) == (
        State.NEW,
        0,
        -1,
        -1,
    )
    assert (request.token_count, request.remaining, request.output.finish_reason) == (3, 3, None)


def test_remaining_is_what_there_is_less_what_is_computed():
    """Catches: prefill inferred from having no answer. With an answer and nothing computed, all
    of it remains."""
    request = answered([1, 2, 3, 4], [5, 6])
    for computed in range(7):
        request.computed = computed
        assert request.remaining == 6 - computed


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
    st.lists(st.integers(0, 99), max_size=9),
    st.data(),
)
def test_tokens_across_the_border_of_prompt_and_answer(prompt, answer, data):
    start = data.draw(st.integers(0, len(prompt) + len(answer)))
    count = data.draw(st.integers(0, len(prompt) + len(answer) - start))
    assert answered(prompt, answer).tokens(start, count) == (prompt + answer)[start : start + count]


def test_the_prompt_is_a_copy():
    mine = [1, 2, 3]
    request = Request(mine, SamplingParams())
    mine[0] = 99
    assert request.tokens(0, 3) == [1, 2, 3]


def test_requests_alike_are_still_two():
    first, second = Request([1], SamplingParams(seed=3)), Request([1], SamplingParams(seed=3))
    assert first != second
    assert first.generator is not second.generator
    assert first.output is not second.output
