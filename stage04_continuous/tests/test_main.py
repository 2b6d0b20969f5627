"""The command line of stage 04: prompts that arrive over time, the chart and the trace, and what is refused."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shared import cli, paths
from shared.tests.test_cli import FIELDS, make_folder
from shared.tokenizer import ByteTokenizer
from stage01_forward.sampling import SamplingParams
from stage03_batching.tests.test_main import answers
from stage04_continuous import __main__ as stage
from stage04_continuous.engine import Engine
from stage04_continuous.scheduler import Scheduler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stage04") / "model")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path) -> Any:
    """call(lines, *options) -> (status, standard output, standard error) of --prompts with these lines."""

    def run(lines: list[str], *options: str) -> tuple[int, str, str]:
        (tmp_path / "prompts.txt").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
        arguments = [
            "--prompts",
            str(tmp_path / "prompts.txt"),
            "--model",
            str(folder),
            "--dtype",
            "float64",
            *options,
        ]
        with pytest.raises(SystemExit) as exit:
            cli.run(stage.main, arguments)
        return (exit.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return run


def show(
    model: Any,
    slots: int,
    prompts: list[str],
    budget: int = 64,
    policy: str = "fcfs",
    most: int = 9,
) -> stage.Show:
    loaded = cli.Loaded(
        model, ByteTokenizer(), model.config, "plain", torch.device("cpu"), model.dtype
    )
    engine = Engine(model, eos_ids=(), scheduler=Scheduler(slots, budget, policy))
    return stage.Show(
        engine, loaded, slots, prompts, SamplingParams(max_tokens=most, ignore_eos=True)
    )


# ---- what works -------------------------------------------------------------------------------------------------


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
def test_every_prompt_is_answered_as_it_would_be_alone(call, folder, capsys, options):
    lines = ["hello", "a", "a longer prompt", "hello", "b"]
    status, out, err = call(lines, "--max-tokens", "9", *options)
    assert status == 0 and sorted(answers(out)) == [1, 2, 3, 4, 5]
    for number, line in enumerate(lines, 1):
        with pytest.raises(SystemExit):
            cli.run(
                stage.main,
                [line, "--model", str(folder), "--dtype", "float64", "--max-tokens", "9"],
            )
        assert capsys.readouterr().out == answers(out)[number] + "\n"
    speed = r"45 tokens in \d+ steps and \d+\.\d\d s, \d+\.\d tok/s"
    assert re.match(rf"\[5 prompts, {speed}, finish reasons: 5 length; model, float64", err)


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
    assert [each.waiting for each in run.engine.steps][:16] == [0] * 10 + [1] * 5 + [2]
    lonely = show(
        tiny_model, 2, ["ab"] * 3, most=2
    )  # each has ended long before the next is due, and nobody waits for it
    while lonely.step(1000):
        pass
    assert lonely.steps == 6 and lonely.occupancy() == 50


def test_urgent_prompts_go_first_under_the_policy_alone(tiny_model):
    for policy, order in (("fcfs", [1, 2, 3, 4, 5, 6]), ("priority", [1, 3, 6, 2, 4, 5])):
        run = show(tiny_model, 1, ["ab"] * 6, policy=policy, most=10)
        while run.step(1):
            pass
        started = list(
            dict.fromkeys(each.request_id for step in run.engine.steps for each in step.slots)
        )
        assert started == [str(number) for number in order]


def test_built_in_prompts_differ_in_length_and_in_limit(tiny_model):
    run = stage.Show(
        show(tiny_model, 1, ["a"]).engine,
        show(tiny_model, 1, ["a"]).loaded,
        1,
        None,
        SamplingParams(max_tokens=50),
    )
    assert [params.max_tokens for params in run.params] == [
        min(50, limit) for _, limit in stage.PROMPTS
    ]
    assert len(run.answers) == 10 > stage.SLOTS


def test_a_seed_repeats_all_whatever_the_slots_and_equal_prompts_differ(call):
    options = ("--temperature", "1", "--max-tokens", "12", "--seed")
    told = [
        answers(call(["hello"] * 3, *options, "5", "--slots", slots)[1])
        for slots in ("1", "2", "3")
    ]
    assert told[0] == told[1] == told[2] and len(set(told[0].values())) == 3
    assert answers(call(["hello"] * 3, *options, "9")[1]) != told[0]


# ---- the live view ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 7), (30, 3), (5, 1)])
def test_the_view_shows_what_the_records_say(tiny_model, width, height):
    run = show(
        tiny_model,
        6,
        ["a" * 20, "b", "c" * 12, "d", "e", "f", "g", "h"],
        budget=10,
        policy="priority",
    )
    assert run.view(width, height) == []
    states = set()
    while run.step(1):
        lines = [line.plain for line in run.view(width, height)]
        assert all(line.cell_len <= width for line in run.view(width, height))
        assert height < 6 or len(lines) <= height
        newest = run.engine.steps[-1]
        assert f"step {run.steps}: {newest.rows} of 6 slots"[:width] in lines[0]
        if height < 24:
            continue
        for slot, line in enumerate(lines[2:8]):
            each = next((each for each in newest.slots if each.slot == slot), None)
            if each is None:
                assert "free" in line or "no room in budget" in line
                states.add("free" if "free" in line else "no room")
            elif each.finish_reason:
                assert f"ended: {each.finish_reason}" in line
            else:
                assert (
                    f"prefill {each.prefill_tokens} " if each.prefill_tokens else "decode "
                ) in line
                states.add("prefill" if each.prefill_tokens else "decode")
        assert f"{len(run.coming)} still to come" in lines[8]
        if newest.waiting:
            states.add("waiting")
            assert re.match(r"waiting: \d", lines[8])
    if height == 24:
        assert states >= {"free", "prefill", "decode", "waiting"}
        assert "1 length" in lines[9] and "nobody" in lines[8]


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_on_a_real_terminal_the_view_goes_and_the_texts_stay(folder, tmp_path):
    import pty

    (tmp_path / "prompts.txt").write_text("hello\n" * 30, encoding="utf-8")
    main, side = pty.openpty()  # type: ignore[attr-defined, unused-ignore]
    command = [
        sys.executable,
        "-m",
        "stage04_continuous",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--model",
        str(folder),
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "8"}
    process = subprocess.Popen(
        [*command, "--slots", "20", "--pause", "0.002", "--threads", "1"],
        cwd=paths.ROOT, env=environment, stdin=side, stdout=side, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(side)
    said = b""
    try:
        while chunk := os.read(main, 65536):
            said += chunk
    except OSError:  # so Linux reports the end
        pass
    finally:
        os.close(main)
    assert process.stderr is not None
    with process.stderr as stream:
        assert b"[30 prompts, " in stream.read() and process.wait(60) == 0
    drawn, _, texts = (
        said.decode().replace("\r\n", "\n").partition("\x1b[?25h")
    )  # the cursor comes back: the view is over
    frames = drawn.split("\x1b[1A")  # how the cursor goes back up
    assert (
        "step 1: " in drawn
        and "still to come" in drawn
        and max(frame.count("\n") for frame in frames) <= 7
    )
    assert list(answers(texts[texts.index("---") :])) == list(range(1, 31))


# ---- chart and trace --------------------------------------------------------------------------------------------


def test_chart_and_trace_are_written(call, tmp_path):
    chart, trace = tmp_path / "slots.svg", tmp_path / "slots.json"
    status, out, err = call(
        ["hello", "a", "b"], "--max-tokens", "9", "--gantt", str(chart), "--trace", str(trace)
    )
    assert status == 0 and f"[written: {chart}]" in err and f"[written: {trace}]" in err
    assert ElementTree.fromstring(chart.read_bytes()).tag.endswith("svg")
    slices = [
        event for event in json.loads(trace.read_text("utf-8"))["traceEvents"] if event["ph"] == "X"
    ]
    assert {event["name"] for event in slices} == {"1", "2", "3"}
    assert sum(event["args"]["prefill_tokens"] for event in slices) == 7
    assert (
        sum(event["args"]["decode_tokens"] for event in slices) == 3 * 8
    )  # the last token of an answer is never run


def test_one_prompt_can_have_them_too(folder, tmp_path, capsys):
    assert (
        stage.main(
            [
                "hello",
                "--model",
                str(folder),
                "--max-tokens",
                "5",
                "--trace",
                str(tmp_path / "a.json"),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("hello")
    events = json.loads((tmp_path / "a.json").read_text("utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 5


def test_nothing_is_written_where_nothing_was_run(call, tmp_path):
    status, out, err = call(["a" * 48], "--gantt", str(tmp_path / "a.svg"))
    assert (
        (status, out) == (2, "") and "no step was made" in err and not (tmp_path / "a.svg").exists()
    )


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slots", "0"], "--slots.*'0'.*from 1 to 4096"),
        (["--slots", "8", "--budget", "7"], "budget of 7 .* too small for 8 slots"),
        (["--budget", "0"], "--budget"),
        (["--every", "0"], "--every.*'0'"),
        (["--max-chunk", "0"], "--max-chunk"),
        (["--max-chunk", "3", "--no-chunks"], "not allowed with"),
        (["--policy", "random"], "--policy.*random.*fcfs.*priority"),
        (["--pause", "-1"], "--pause"),
        (["--top-k", "301"], "top_k"),
        (["--gantt", "."], "is a folder"),
        (["--gantt", "no/such/slots.svg"], "does not exist"),
        (["--gantt", "slots.png"], "ends in .svg"),
        (["--trace", "slots.svg"], "ends in .json"),
        (["--prompts", "no-such-file"], "no-such-file cannot be read"),
    ],
)
def test_bad_options_are_one_sentence_before_any_text(call, options, words):
    status, out, err = call(["hello", "a"], *options)
    assert (
        (status, out) == (2, "")
        and err.startswith("error: ")
        and err.count("\n") == 1
        and err.endswith(".\n")
    )
    assert re.search(words, err), err


def test_a_bad_prompt_is_an_error_and_the_others_go_on(call):
    status, out, err = call(
        ["hello", "", "a" * 48, "b", "c" * 30], "--max-tokens", "4", "--no-chunks", "--budget", "20"
    )
    assert status == 2 and sorted(answers(out)) == [1, 4]
    errors = {line.split(": ")[1]: line for line in err.splitlines() if line.startswith("error: ")}
    assert list(errors) == ["prompt 2", "prompt 3", "prompt 5"]
    assert (
        "empty" in errors["prompt 2"]
        and "48 tokens" in errors["prompt 3"]
        and "allow chunks" in errors["prompt 5"]
    )
    assert "3 error, 2 length" in err


def test_slots_that_no_memory_can_hold(call, folder, tmp_path):
    vast = make_folder(tmp_path / "vast")
    (vast / "config.json").write_text(
        json.dumps(FIELDS | {"n_positions": 400_000}), encoding="utf-8"
    )
    status, out, err = call(["hello"], "--model", str(vast), "--random-weights", "--slots", "4096")
    assert (status, out) == (2, "") and re.fullmatch(
        r"error: 4096 slots of \w+ take [\d.]+ GiB.*smaller --slots\.\n", err
    ), err


def test_help_explains_the_options(call):
    status, out, _ = call([], "--help")
    own = {
        "--prompts",
        "--slots",
        "--budget",
        "--max-chunk",
        "--no-chunks",
        "--policy",
        "--every",
        "--pause",
        "--gantt",
        "--trace",
    }
    assert (
        status == 0
        and own <= set(re.findall(r"--[a-z-]+", out))
        and "python -m stage04_continuous --slots 2" in out
    )


def test_without_a_prompt_the_built_in_stories_are_told(monkeypatch, capsys):
    """The embedded model, and nothing on standard input. The real terminal above shows that the command runs as a process."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    assert stage.main(["--max-tokens", "15", "--linear", "plain"]) == 0
    out, err = capsys.readouterr()
    told = answers(out)
    assert sorted(told) == list(range(1, 11)) and re.search(r"\[4 slots, \d+\.\d % in use\]", err)
    assert all(told[number].startswith(text) for number, (text, _) in enumerate(stage.PROMPTS, 1))
