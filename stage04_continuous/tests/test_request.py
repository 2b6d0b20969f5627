"""A request: its states, and what is left to compute, which follows from one number alone."""

from __future__ import annotations

import itertools

import pytest

from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan, Work
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


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_only_legal_transitions(before, after):
    request = Request([1], SamplingParams(), id="a")
    request.state, legal = before, (before, after) in LEGAL
    if legal:
        request.move(after)
    else:
        with pytest.raises(RuntimeError, match=f"a cannot go from {before.value} to {after.value}"):
            request.move(after)
    assert request.state is (after if legal else before)


def test_remaining_is_what_there_is_less_what_is_computed():
    """Catches: prefill inferred from having no answer. With an answer and nothing computed, all
    of it remains."""
    request = answered([1, 2, 3, 4], [5, 6])
    for computed in range(7):
        request.computed = computed
        assert request.remaining == 6 - computed


@pytest.mark.parametrize("answer", [[], [4], [4, 5, 6]], ids=str)
@pytest.mark.parametrize("drafts", [[], [7, 8]], ids=str)
def test_tokens_across_the_border_of_prompt_and_answer(answer, drafts):
    request, whole = answered([1, 2, 3], answer), [1, 2, 3, *answer, *drafts]
    request.drafts = drafts
    for start, end in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        assert request.tokens(start, end - start) == whole[start:end]
    assert request.output.token_ids == answer


def test_the_prompt_is_a_copy_and_requests_alike_are_still_two():
    mine = [1, 2, 3]
    first, second = (Request(mine, SamplingParams(seed=3)) for _ in range(2))
    mine[0] = 99
    assert first.tokens(0, 3) == [1, 2, 3] and first != second
    assert first.generator is not second.generator and first.output is not second.output


def test_a_plan_is_packed_share_by_share():
    """A decode with two drafts, a chunk in the middle of a prompt, and the end of another."""
    drafted, cut, ends = answered([1, 2], [3]), answered([4, 5, 6, 7], []), answered([8, 9], [])
    drafted.drafts = [10, 11]
    work = [Work(drafted, 5, 2, 3, 3), Work(cut, 0, 1, 2, 0), Work(ends, 2, 0, 2, 1)]
    ids, shares = [3, 10, 11, 5, 6, 8, 9], [(5, 2, 3), (0, 1, 2), (2, 0, 2)]
    assert Plan(work=work).tokens() == (ids, shares, [0, 1, 2, 6])
    assert Plan().tokens() == ([], [], [])
