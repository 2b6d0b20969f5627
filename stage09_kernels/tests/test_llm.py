"""`LLM`: its answers are stage 01's, errors come before any work, and Ctrl-C leaves it usable."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

from shared import models, paths
from shared.errors import UserError
from stage01_forward.attention import Recompute
from stage01_forward.engine import make as naive
from stage09_kernels import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Long ago, in a hut", "In a tower lived"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories", max_model_len=256, max_sequences=2)


def test_answers_are_those_of_the_first_stage(llm):
    params = SamplingParams(max_tokens=20)
    answers = llm.generate(PROMPTS, params, progress=False)
    ids = [answer.prompt_token_ids for answer in answers]
    want = naive(models.load_model(models.load("stories"))).generate(ids, params)
    assert [answer.token_ids for answer in answers] == [output.token_ids for output in want]
    assert [answer.prompt for answer in answers] == PROMPTS
    assert all(answer.text and answer.finish_reason == "length" for answer in answers)
    (alone,) = llm.generate(PROMPTS[1], params, progress=False)
    (by_ids,) = llm.generate(ids[1], params, progress=False)
    assert alone == by_ids == answers[1]


def test_the_hidden_states_of_the_last_pass(llm):
    """What an embedding is made of."""
    (answer,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), progress=False)
    ids = torch.tensor(answer.prompt_token_ids)
    model = models.load_model(models.load("stories"))
    with torch.inference_mode():
        want = model(ids, torch.arange(len(ids)), Recompute().attend)[-1:]
    torch.testing.assert_close(llm.engine.runner.hidden.clone(), want, atol=1e-4, rtol=1e-4)


def test_a_conversation():
    chat = LLM("stories-chat")
    params = SamplingParams(max_tokens=9)
    answer = chat.chat([{"role": "user", "content": "Tell me a story"}], params)
    assert len(answer.token_ids) == 9 and answer.text
    assert answer.prompt.endswith("<|im_start|>assistant\n")


def test_errors_come_before_any_work_and_an_interrupt_loses_only_its_own(llm, monkeypatch):
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
    assert llm.generate([], progress=False) == []

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "step", interrupted)
        llm.generate(PROMPTS)
    assert not llm.engine.requests
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=3), progress=False)[0].text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": 3}, "no model or folder called '3'"),
        ({"dtype": "float8"}, "did you mean float64"),
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


def test_what_is_no_prompt_no_message_and_no_options(llm):
    for prompts in (None, 3, b"abc", [None], [[1.5]], [["a"]], ["a", 1], {"prompt": "a"}, [1, "a"]):
        with pytest.raises(UserError, match="^Prompts must be texts, or lists of token ids"):
            llm.generate(prompts, progress=False)
    for params in (None, [None], {"max_tokens": 2}, "a", SamplingParams):
        with pytest.raises(UserError, match="^params must be SamplingParams, or a list"):
            llm.generate(["a"], params, progress=False)
    for messages in (None, [], "hi", ["hi"], [{"role": "user"}], [{"role": "user", "content": 3}]):
        with pytest.raises(UserError, match="^Messages must be a list of"):
            llm.chat(messages)
    params = SamplingParams(max_tokens=2)
    arrays = [np.array([1, 2]), (np.array([1, 2]),), (1, 2), iter([[1, 2]])]
    texts = [llm.generate(prompts, params, progress=False)[0].text for prompts in arrays]
    assert len(set(texts)) == 1


def test_the_quick_start_of_the_readme():
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^python -c .*LLM.*$", text, re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, *shlex.split(line)[1:]], cwd=paths.ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0 and len(ran.stdout.split()) > 20, ran.stderr
