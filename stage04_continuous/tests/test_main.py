"""The command line of stage 04: prompts that arrive over time, chart and trace, and errors."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shared import cli, live
from shared.course.testing import FIELDS, make_folder
from shared.tokenizer import ByteTokenizer
from stage01_forward.params import SamplingParams
from stage03_batching.tests.test_main import (
    answered_as_alone,
    answers,
    caller,
    told_without_a_prompt,
)
from stage04_continuous import __main__ as stage
from stage04_continuous.make import make

ALONE = ["hello", "a", "a longer prompt", "b", "a longer prompt!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stage04") / "model")


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    return caller(stage.main, folder, capsys)


def loaded(model: Any) -> cli.Loaded:
    device = torch.device("cpu")
    return cli.Loaded(model, ByteTokenizer(), model.config, "plain", device, model.dtype)


def show(model: Any, slots: int, prompts: list[str], most: int = 9, **settings: Any) -> stage.Show:
    engine = make(model, slots, eos_ids=(), **{"token_budget": 64} | settings)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    return stage.Show(engine, loaded(model), [(prompt, most) for prompt in prompts], sampling)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--slots", "1", "--every", "100"),
        ("--slots", "3", "--budget", "3", "--every", "1"),
        ("--max-chunk", "2", "--policy", "priority", "--every", "2"),
        ("--no-chunks", "--budget", "20"),
    ],
)
def test_every_prompt_is_answered_as_it_would_be_alone(call, options):
    err = answered_as_alone(call, [*ALONE[:4], "hello"], *options)
    assert re.match(r"\[5 prompts, 45 tokens in \d+ steps and \d+\.\d\d s, \d+\.\d tok/s, ", err)


def test_without_a_terminal_an_answer_is_printed_when_it_ends(call):
    long, short = "a" * 20, "b" * 45  # the second has room for 3 tokens
    status, out, err = call([long, short], "--every", "1", "--slots", "2", "--max-tokens", "20")
    assert status == 0 and list(answers(out)) == [2, 1]
    assert err.endswith("\n[2 slots, 57.5 % in use]\n")  # 20 steps, 2 slots, 20 + 3 rows


def test_prompts_arrive_one_at_a_time(tiny_model):
    run = show(tiny_model, 2, ["ab"] * 4, most=30)
    arrived = []
    while run.step(5):
        arrived.append(4 - len(run.coming))
    assert arrived[:16] == [1] * 5 + [2] * 5 + [3] * 5 + [4]
    assert [step.waiting for step in run.engine.steps][:16] == [0] * 10 + [1] * 5 + [2]


def test_urgent_prompts_go_first_under_the_policy_alone(tiny_model):
    for policy, order in (("fcfs", "123456"), ("priority", "136245")):
        run = show(tiny_model, 1, ["ab"] * 6, most=10, policy=policy)
        while run.step(1):
            pass
        slots = [slot for step in run.engine.steps for slot in step.slots]
        assert list(dict.fromkeys(slot.request_id for slot in slots)) == list(order)


def test_without_a_prompt_the_built_in_stories_are_told(monkeypatch, capsys):
    err = told_without_a_prompt(stage, monkeypatch, capsys, "--max-tokens", "15")
    assert re.search(r"\[4 slots, \d+\.\d % in use\]", err)


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 7), (30, 3), (5, 1)])
def test_the_view_shows_the_records(tiny_model, width, height):
    prompts = ["a" * 20, "b", "c" * 12, "d", "a", "b", "c", "d"]
    run = show(tiny_model, 4, prompts, token_budget=10, policy="priority")
    assert run.view(width, height) == []
    seen = set()
    while run.step(1):
        view = run.view(width, height)
        lines = [line.plain for line in view]
        assert all(line.cell_len <= width for line in view)
        assert height < 6 or len(lines) <= height
        newest = run.engine.steps[-1]
        assert f"step {run.steps}: {newest.rows} of 4 slots"[:width] in lines[0]
        if height < 24:
            continue
        used = {slot.slot: slot for slot in newest.slots}
        for number, line in enumerate(lines[2:6]):
            if slot := used.get(number):
                words, _ = live.state(slot)
                assert f" {slot.request_id} " in line and f" {words} " in line
                seen.add(words.split()[0])
            else:
                assert " free" in line or "no room in budget" in line
                seen.add("free" if " free" in line else "no room")
        assert f"{len(run.coming)} still to come" in lines[6]
        assert ("waiting: none" in lines[6]) == (newest.waiting == 0)
        seen.update(mark for mark in "!" if mark in lines[6])
    if height == 24:
        assert seen >= {"free", "prefill", "decode", "ended:", "!"}
        assert "1 length" in lines[7]


def put_on_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard output from now on, 60 by 8 cells."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "8"}.items():
        monkeypatch.setenv(name, value)
    return terminal


def test_on_a_terminal_the_cut_built_in_stories_are_not_printed(tiny_model, monkeypatch, capsys):
    terminal = put_on_terminal(monkeypatch)
    run = show(tiny_model, 2, ["ab"] * 3)
    assert run.run(argparse.Namespace(pause=0, every=1), built_in=True) == 0
    assert "still to come" in terminal.getvalue() and "---" not in terminal.getvalue()
    assert capsys.readouterr().err.startswith("[3 answers not printed: add | cat")


def test_after_ctrl_c_the_screen_is_clean_and_summed_up(tiny_model, monkeypatch, capsys):
    terminal = put_on_terminal(monkeypatch)
    run = show(tiny_model, 2, ["ab"] * 3)
    step = run.engine.step

    def stopped() -> Any:
        if run.steps == 10:
            raise KeyboardInterrupt
        return step()

    run.engine.step = stopped
    assert run.run(argparse.Namespace(pause=0, every=1)) == cli.EXIT_INTERRUPTED
    texts = terminal.getvalue().rpartition("\x1b[?25h")[2].lstrip("\x1b[2K\r1A")
    assert list(answers(texts)) == [1, 2]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "finish reasons: 2 length, 1 unfinished; " in err


def test_chart_and_trace_are_written(call, tmp_path):
    """The last token of an answer is never computed."""
    chart, trace = tmp_path / "slots.svg", tmp_path / "slots.json"
    options = ("--max-tokens", "9", "--gantt", str(chart), "--trace", str(trace))
    status, _, err = call(["hello", "a", "b"], *options)
    assert status == 0 and f"[written: {chart}]" in err and f"[written: {trace}]" in err
    assert ElementTree.fromstring(chart.read_bytes()).tag.endswith("svg")
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    slices = [event["args"] for event in events if event["ph"] == "X"]
    assert sum(args["prefill_tokens"] for args in slices) == 7
    assert sum(args["decode_tokens"] for args in slices) == 3 * 8


def check_error(result: tuple[int, str, str], words: str) -> None:
    """One sentence, before any text."""
    status, out, err = result
    assert (status, out) == (2, "") and re.fullmatch(r"error: [^\n]*\.\n", err), err
    assert re.search(words, err), err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slots", "0"], "--slots.*'0'.*from 1 to 4096"),
        (["--slots", "8", "--budget", "7"], "budget of 7 .* too small for 8 slots"),
        (["--every", "0"], "--every.*'0'"),
        (["--max-chunk", "3", "--no-chunks"], "not allowed with"),
        (["--policy", "random"], "--policy.*random.*fcfs.*priority"),
        (["--gantt", "slots.png"], "ends in .svg"),
        (["--trace", "slots.svg"], "ends in .json"),
    ],
)
def test_bad_options_are_one_sentence_before_any_text(call, options, words):
    check_error(call(["hello", "a"], *options), words)


def check_bad_prompts(call: Callable[..., Any]) -> str:
    lines = ["hello", "", "a" * 48, "b", "c" * 30]
    status, out, err = call(lines, "--max-tokens", "4", "--no-chunks", "--budget", "20")
    assert status == 2 and sorted(answers(out)) == [1, 4] and "3 error, 2 length" in err
    errors = re.findall(r"^error: prompt (\d): .*(empty|48 tokens|allow chunks)", err, re.M)
    assert errors == [("2", "empty"), ("3", "48 tokens"), ("5", "allow chunks")]
    return err


def test_a_bad_prompt_is_an_error_of_its_own(call, tmp_path):
    check_bad_prompts(call)
    assert "no step was made" in call(["a" * 48], "--gantt", str(tmp_path / "a.svg"))[2]


def test_slots_that_no_memory_can_hold(call, tmp_path):
    folder = make_folder(tmp_path / "vast")
    (folder / "config.json").write_text(json.dumps(FIELDS | {"n_positions": 400_000}), "utf-8")
    result = call(["hello"], "--model", str(folder), "--random-weights", "--slots", "4096")
    check_error(result, r"4096 slots of \w+ take [\d.]+ GiB.*smaller --slots\.")
