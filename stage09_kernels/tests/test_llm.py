"""`LLM`: its answers are stage 01's, errors come before any work, and Ctrl-C leaves it usable."""

from __future__ import annotations

import pytest
import torch

from shared import models
from shared.errors import UserError
from stage01_forward.engine import make as naive
from stage09_kernels import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Long ago, in a hut", "In a tower lived"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories", max_model_len=256, max_sequences=2)


def test_answers_are_those_of_the_first_stage(llm):
    params = SamplingParams(max_tokens=20)
    answers = llm.generate(PROMPTS, params)
    ids = [answer.prompt_token_ids for answer in answers]
    want = naive(models.load_model(models.load("stories"))).generate(ids, params)
    assert [answer.token_ids for answer in answers] == [output.token_ids for output in want]
    assert [answer.prompt for answer in answers] == PROMPTS
    assert all(answer.text and answer.finish_reason == "length" for answer in answers)
    (alone,) = llm.generate(PROMPTS[1], params)
    (by_ids,) = llm.generate(ids[1], params)
    assert alone == by_ids == answers[1]


def test_a_conversation():
    chat = LLM("stories-chat")
    params = SamplingParams(max_tokens=9)
    answer = chat.chat([{"role": "user", "content": "Tell me a story"}], params)
    assert len(answer.token_ids) == 9 and answer.text
    assert answer.prompt.endswith("<|im_start|>assistant\n")


def test_errors_come_before_any_work(llm):
    for prompts, words in (
        (["fine", "word " * 500], "sees 256"),
        (["fine", ""], "prompt is empty"),
    ):
        with pytest.raises(UserError, match=words):
            llm.generate(prompts)
    with pytest.raises(UserError, match="2 prompts and 1 sampling settings"):
        llm.generate(PROMPTS[:2], [SamplingParams()])
    with pytest.raises(UserError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    for wrong in (None, 3, [None], [[1.5]], [["a"]], ["a", 1]):
        with pytest.raises(UserError, match="^Prompts must be texts, or lists of token ids"):
            llm.generate(wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": 3}, "no model or folder called '3'"),
        ({"dtype": "float8"}, "choose from .*float64"),
        ({"weights": "int3"}, "choose from 'auto'"),  # was taken for auto
        ({"kv_dtype": 8}, "choose from 'auto'"),
        ({"device": "tpu"}, "choose from 'auto'"),
        ({"threads": 10**9}, "whole number from 1 to"),  # OpenMP ended the process
        ({"max_model_len": float("nan")}, "whole number from 2 to"),
        ({"block_size": 0}, "No engine has the options"),
        ({"max_num_seq": 4}, "unexpected keyword argument 'max_num_seq'"),
    ],
    ids=str,
)
def test_an_invalid_option_is_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        LLM(**options)


def test_a_dtype_may_be_one_of_torch():
    assert LLM(dtype=torch.float64).loaded.dtype == torch.float64
