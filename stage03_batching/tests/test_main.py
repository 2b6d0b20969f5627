"""The command line of stage 03: prompts from a file, in one batch, and what was wasted."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shared import cli, live
from shared.course.testing import make_folder
from stage01_forward.generation import Output
from stage01_forward.params import SamplingParams
from stage03_batching import __main__ as stage
from stage03_batching.engine import Engine


def caller(main: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """call(lines, *options) -> (status, stdout, stderr) with --prompts; a string is one prompt."""

    def call(lines: list[str] | str, *options: str) -> tuple[Any, ...]:
        file = folder.parent / "prompts.txt"
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        prompts = [lines] if isinstance(lines, str) else ["--prompts", str(file)]
        model = ["--model", str(folder), "--dtype", "float64", "--linear", "plain"]
        with pytest.raises(SystemExit) as exit:
            cli.run(main, [*prompts, *model, *options])
        return (exit.value.code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stage03") / "model")


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    return caller(stage.main, folder, capsys)


def answers(out: str) -> dict[int, str]:
    """Printed answers by the number of their prompt, in the order in which they were printed."""
    first, *parts = re.split(r"--- prompt (\d+) ---\n", out)
    assert first == ""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {int(number): text.removesuffix("\n\n") for number, text in pairs}


def answered_as_alone(call: Callable[..., Any], lines: list[str], *options: str) -> str:
    """All `lines` are answered with 9 tokens each, as each is alone. Returns standard error."""
    status, out, err = call(lines, "--max-tokens", "9", *options)
    assert status == 0 and sorted(answers(out)) == list(range(1, len(lines) + 1))
    for line, text in zip(lines, map(answers(out).get, range(1, len(lines) + 1)), strict=True):
        assert call(line, "--max-tokens", "9")[1] == f"{text}\n"
    assert err.count("\n") > 1 and f"finish reasons: {len(lines)} length; model, float64" in err
    return err


def told_without_a_prompt(stage: Any, monkeypatch: Any, capsys: Any, *options: str) -> str:
    """The embedded model, nothing on standard input: the built-in prompts are continued. Returns
    standard error."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    assert stage.main([*options, "--linear", "plain"]) == 0
    out, err = capsys.readouterr()
    prompts = [prompt if isinstance(prompt, str) else prompt[0] for prompt in stage.PROMPTS]
    texts = answers(out)
    assert sorted(texts) == list(range(1, len(prompts) + 1))
    for number, prompt in enumerate(prompts, 1):
        assert texts[number].startswith(prompt) and len(texts[number]) > len(prompt)
    return err


def test_every_prompt_is_answered_as_it_would_be_alone(call):
    err = answered_as_alone(call, ["hello", "a", "a longer prompt", "hello"])
    assert err.startswith("[4 prompts, 36 tokens in 9 steps and ")
    # 4 prompts of 15 columns, and 8 passes of 4 rows that end together.
    wasted = "34 padded tokens in prefill and 0 idle row-steps in decode, 37.0 % of all 92"
    assert f"[wasted: {wasted}" in err


def test_rows_that_end_early_idle_and_the_count_is_that_of_the_records(call):
    """The first row is at the end of the context after 2 tokens."""
    status, _, err = call(["a" * 46, "b"], "--max-tokens", "20")
    assert status == 0 and "of all 130 tokens" in err
    assert "[wasted: 45 padded tokens in prefill and 18 idle row-steps in decode" in err


def test_a_bad_prompt_is_an_error_and_the_others_go_on(call):
    status, out, err = call(["hello", "", "a" * 48, "b"], "--max-tokens", "4")
    assert status == 2 and list(answers(out)) == [1, 4]
    first, second, *_ = err.splitlines()
    assert first.startswith("error: prompt 2: The prompt is empty")
    assert second.startswith("error: prompt 3: ") and "48 tokens" in second
    assert "2 error, 2 length" in err
    status, out, err = call(["a" * 48], "--max-tokens", "4")
    assert (status, out) == (2, "") and "0 tokens in 0 steps" in err and "of all 0 tokens" in err
    status, out, err = call(["hello", "b"], "--top-k", "301")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "top_k" in err


def test_a_seed_repeats_all_and_equal_prompts_differ(call):
    options = ("--temperature", "1", "--max-tokens", "12", "--seed")
    one, again, other = (call(["hello"] * 3, *options, seed)[1] for seed in ("5", "5", "9"))
    assert one == again != other
    assert len(set(answers(one).values())) == 3
    shifted = call(["hello"] * 3, *options, "6")[1]  # each prompt has the seed of the next one
    assert [answers(shifted)[1], answers(shifted)[2]] == [answers(one)[2], answers(one)[3]]
    assert call(["hello"] * 2, *options, str(2**63 - 1))[0] == 0


@pytest.mark.parametrize(("height", "shown"), [(24, 6), (7, 6), (6, 4), (4, 2), (1, 0)])
def test_the_view_has_a_line_for_each_prompt_and_fits(tiny_model, height, shown):
    loaded = SimpleNamespace(tokenizer=cli.load_tokenizer(None), config=tiny_model.config)
    engine = Engine(tiny_model, eos_ids=(), max_batch=4)
    texts = [live.Answer(number, "ab", loaded) for number in range(1, 7)]  # type: ignore[arg-type]
    for text in texts:
        text.output = Output([1, 2, 3])
    assert stage.view(engine, texts, 40, height) == []
    params = [SamplingParams(max_tokens=2 + n) for n in range(6)]
    for _ in engine.run([text.output for text in texts], params):
        lines = stage.view(engine, texts, 40, height)
        newest = engine.steps[-1]
        rows = newest.rows + (newest.wasted_tokens if newest.decode_tokens else 0)
        head = f"step {len(engine.steps)}: {newest.rows} of {rows} rows alive"
        assert lines[0].plain.startswith(head)
        assert sum(line.plain[:4].strip().isdigit() for line in lines) == shown
        assert height == 1 or len(lines) <= height
        assert all(line.cell_len <= 40 for line in lines) and Console().render_lines(lines[0])
    assert "ended: length" in stage.view(engine, texts, 40, 24)[1].plain


def test_without_a_prompt_the_built_in_ones_are_continued(monkeypatch, capsys):
    options = ("--max-tokens", "12", "--dtype", "float64")
    assert "[wasted: " in told_without_a_prompt(stage, monkeypatch, capsys, *options)
