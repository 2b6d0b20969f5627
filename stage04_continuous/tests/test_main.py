"""The command of stage 04: prompts that arrive over time, and the lines of the steps."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from shared import cli
from shared.tokenizer import ByteTokenizer
from stage01_forward.params import SamplingParams
from stage03_batching.tests.commands import CommandContract, answers
from stage04_continuous import __main__ as stage
from stage04_continuous.engine import make


class TestCommand(CommandContract):
    stage = stage
    runs = [
        (),
        ("--max-num-seqs", "1", "--every", "100"),
        ("--max-num-seqs", "3", "--max-num-batched-tokens", "3", "--every", "1"),
        ("--max-chunk", "2", "--policy", "priority", "--every", "2"),
    ]
    refused = {
        "--max-num-seqs 0": "--max-num-seqs.*'0'.*from 1 to 4096",
        "--max-num-seqs 8 --max-num-batched-tokens 7": "budget of 7 .* too small for 8 slots",
        "--every 0": "--every.*'0'",
        "--policy random": "--policy.*random.*fcfs.*priority",
    }
    story = ("--max-tokens", "15")

    def check_story(self, err):
        assert re.search(r"\[4 slots, \d+\.\d % in use\]", err)

    def test_without_a_terminal_an_answer_is_printed_when_it_ends(self, call):
        long, short = "a" * 20, "b" * 45  # the second has room for 3 tokens
        status, out, err = call(
            [long, short], "--every", "1", "--max-num-seqs", "2", "--max-tokens", "20"
        )
        assert status == 0 and list(answers(out)) == [2, 1]
        assert err.endswith("\n[2 slots, 57.5 % in use]\n")  # 20 steps, 2 slots, 20 + 3 rows


def loaded(model: Any) -> cli.Loaded:
    device = torch.device("cpu")
    return cli.Loaded(model, ByteTokenizer(), model.config, "plain", device, model.dtype)


def show(model: Any, slots: int, prompts: list[str], most: int = 9, **settings: Any) -> stage.Show:
    engine = make(model, slots, eos_ids=(), **{"token_budget": 64} | settings)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    return stage.Show(engine, loaded(model), [(prompt, most) for prompt in prompts], sampling)


def test_a_terminal_shows_the_slots_of_each_step(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert show(tiny_model, 2, ["ab", "c", "d"], 3).run(1) == 0
    out, err = capsys.readouterr()
    assert list(answers(out)) == [1, 2, 3]
    steps = re.findall(r"^step +\d+ \|(.*?) \| \d prefill and \d decode tokens$", err, re.MULTILINE)
    assert [step.split() for step in steps] == [
        *(["1+", "."], ["1", "2+"], ["1", "2"], ["3+", "2"], ["3", "."], ["3", "."])
    ]
