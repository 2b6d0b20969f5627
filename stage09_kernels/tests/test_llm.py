"""`LLM`: its answers are stage 01's, errors come before any work, and Ctrl-C leaves it usable."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import torch

from shared import paths
from shared.errors import UserError
from stage01_forward import families
from stage01_forward.attention import Recompute
from stage01_forward.make import make as naive
from stage09_kernels import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Long ago, in a hut", "In a tower lived"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories", max_model_len=256, max_sequences=2)


def test_answers_are_those_of_the_first_stage(llm):
    params = SamplingParams(max_tokens=20)
    answers = llm.generate(PROMPTS, params, progress=False)
    ids = [answer.prompt_token_ids for answer in answers]
    want = naive(families.load_model(families.load("stories"))).generate(ids, params)
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
    model = families.load_model(families.load("stories"))
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


def test_the_quick_start_of_the_readme():
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^python -c .*LLM.*$", text, re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, *shlex.split(line)[1:]], cwd=paths.ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0 and len(ran.stdout.split()) > 20, ran.stderr
