"""A request: its states, and what is left to compute, which follows from one number alone."""

from __future__ import annotations

from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan, Work
from stage04_continuous.request import Request


def answered(prompt, answer):
    request = Request(prompt, SamplingParams())
    for id in answer:
        request.output.append(Token(id, None, None))
    return request


def test_remaining_is_what_there_is_less_what_is_computed():
    """Catches: prefill inferred from having no answer. With an answer and nothing computed, all
    of it remains."""
    request = answered([1, 2, 3, 4], [5, 6])
    for computed in range(7):
        request.computed = computed
        assert (request.remaining, request.decoding) == (6 - computed, computed >= 5)


def test_a_plan_is_packed_share_by_share():
    """Three tokens that all need logits, a chunk in the middle of a prompt, and the end of one."""
    several, cut, ends = (
        answered([1, 2], [3, 10, 11]),
        answered([4, 5, 6, 7], []),
        answered([8, 9], []),
    )
    work = [Work(several, 5, 2, 3, 3), Work(cut, 0, 1, 2, 0), Work(ends, 2, 0, 2, 1)]
    ids, shares = [3, 10, 11, 5, 6, 8, 9], [(5, 2, 3), (0, 1, 2), (2, 0, 2)]
    assert Plan(work=work).tokens() == (ids, shares, [0, 1, 2, 6])
    assert Plan().tokens() == ([], [], [])
