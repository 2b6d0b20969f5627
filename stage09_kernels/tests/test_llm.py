"""`LLM`: its answers are stage 01's, and errors come before any work."""

from __future__ import annotations

import pytest

from shared import models
from shared.errors import UserError
from stage01_forward.engine import make as naive
from stage09_kernels.llm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Long ago, in a hut", "In a tower lived"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories", max_model_len=256, max_sequences=2, dtype="float32")


def test_answers_are_those_of_the_first_stage(llm):
    params = SamplingParams(max_tokens=20)
    answers = llm.generate(PROMPTS, params)
    ids = [answer.output.prompt_ids for answer in answers]
    expected = naive(models.load_model(models.load("stories"))).generate(ids, params)
    assert [a.output.token_ids for a in answers] == [o.token_ids for o in expected]
    assert [answer.prompt for answer in answers] == PROMPTS
    assert all(answer.text and answer.output.finish_reason == "length" for answer in answers)
    assert llm.generate(PROMPTS[1], params) == answers[1:2]


def test_errors_come_before_any_work(llm):
    with pytest.raises(UserError, match="sees 256"):
        llm.generate(["fine", "word " * 500])
    with pytest.raises(UserError, match="2 prompts and 1 sampling settings"):
        llm.generate(PROMPTS[:2], [SamplingParams()])
    with pytest.raises(UserError, match="choose from 'auto'"):
        LLM(weights="int3")
