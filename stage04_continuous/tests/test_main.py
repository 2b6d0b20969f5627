"""The command of stage 04: prompts that arrive over time, the view and the chart."""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from shared import cli, live
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


def test_the_view_shows_the_records(tiny_model):
    prompts = ["a" * 20, "b", "c" * 12, "d", "a", "b", "c", "d"]
    run = show(tiny_model, 4, prompts, token_budget=10, policy="priority")
    assert run.view(100, 24) == []
    seen: set[str] = set()
    while run.step(1):
        (head, coming, *lines), newest = [x.plain for x in run.view(100, 24)], run.engine.steps[-1]
        assert head.startswith(f"step {run.steps}: {newest.rows} of 4 slots")
        assert f"{len(run.coming)} still to come" in coming and len(lines) == run.arrived
        records = {share.request_id: share for share in newest.shares}
        ran = {share.request_id: n for n, share in zip(newest.memory, newest.shares, strict=True)}
        slots = {request.id: str(request.slot) for request in run.engine.scheduler.running}
        for answer, line in zip(run.answers, lines, strict=False):
            state, words = " ".join(line[6:34].split()), "waits"
            if answer.finish_reason:
                words = f"ended: {answer.finish_reason}"
            elif record := records.get(str(answer.number)):
                words = f"slot {ran[record.request_id]}: {live.state(record)[0]}"
            elif slot := slots.get(str(answer.number)):
                words = f"slot {slot}: no budget left"
            assert state == words
            assert line.startswith(f"{answer.number:>4}{'!' * (answer.number % 3 == 0)} ")
            seen.update(state.split())
    assert seen >= {"waits", "prefill", "decode", "ended:"}


def test_ctrl_c_ends_a_run_with_what_it_has(tiny_model, capsys):
    run = show(tiny_model, 2, ["ab"] * 3)
    step = run.engine.step

    def stopped() -> Any:
        if run.steps == 10:
            raise KeyboardInterrupt
        return step()

    run.engine.step = stopped
    assert run.run(argparse.Namespace(every=1)) == cli.EXIT_INTERRUPTED
    out, err = capsys.readouterr()
    assert list(answers(out)) == [1, 2]
    assert err.count("\n") == 1 and "finish reasons: 2 length, 1 unfinished; " in err
