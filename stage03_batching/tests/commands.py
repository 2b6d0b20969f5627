"""The contract of a command that answers several prompts: stages 03, 04 and 05 keep it.

A stage subclasses CommandContract in its own tests and adds what only its command can do. Options
that all commands have are tested in shared/tests/test_cli.py.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared import cli
from shared.testing import make_folder

LINES = ["hello", "a", "a longer prompt", "b", "a longer prompt!", "hello"]


def answers(out: str) -> dict[int, str]:
    """Printed answers by the number of their prompt, in the order in which they were printed."""
    first, *parts = re.split(r"--- prompt (\d+) ---\n", out)
    assert first == ""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {int(number): text.removesuffix("\n\n") for number, text in pairs}


class CommandContract:
    """Subclass it as `class TestCommand(CommandContract)`."""

    stage: Any  # the module of the command
    always: tuple[str, ...] = ()  # options of every call
    runs: Sequence[tuple[str, ...]] = [()]  # options that change no answer
    refused: Mapping[str, str]  # options, and what the error says
    story: tuple[str, ...] = ()  # options for the built-in prompts

    def check_run(self, err: str, options: tuple[str, ...]) -> None:
        """Check what standard error reports on a run of LINES, 9 tokens each, with `options`."""

    def check_story(self, err: str) -> None:
        """Check what standard error reports on the built-in prompts."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_folder(tmp_path_factory.mktemp("command") / "model")

    @pytest.fixture
    def call(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
        """call(lines, *options) -> (status, stdout, stderr); a string is one prompt."""

        def call(lines: list[str] | str, *options: str) -> tuple[Any, ...]:
            file = folder.parent / "prompts.txt"
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            prompts = [lines] if isinstance(lines, str) else ["--prompts", str(file)]
            model = ["--model", str(folder), "--dtype", "float64", "--linear", "plain"]
            with pytest.raises(SystemExit) as exit:
                cli.run(self.stage.main, [*prompts, *model, *self.always, *options])
            return (exit.value.code, *capsys.readouterr())

        return call

    def test_every_prompt_is_answered_as_it_would_be_alone(self, call):
        alone = [call(line, "--max-tokens", "9")[1] for line in LINES]
        for options in self.runs:
            status, out, err = call(LINES, "--max-tokens", "9", *options)
            texts = answers(out)
            assert status == 0 and [f"{texts[n]}\n" for n in range(1, 7)] == alone
            assert re.search(r"^\[6 prompts, 54 tokens in \d+ steps and \d+\.\d\d s, ", err, re.M)
            assert "finish reasons: 6 length; model, float64" in err
            self.check_run(err, options)

    def test_a_bad_prompt_is_an_error_of_its_own(self, call):
        lines = ["hello", "", "a" * 48, "b", "c" * 30]
        status, out, err = call(lines, "--max-tokens", "4")
        errors = re.findall(r"^error: prompt (\d): .*(empty|48 tokens)", err, re.M)
        assert status == 2 and errors == [("2", "empty"), ("3", "48 tokens")]
        assert sorted(answers(out)) == [1, 4, 5] and "2 error, 3 length" in err

    def test_bad_options_are_one_sentence_before_any_text(self, call):
        for options, words in self.refused.items():
            status, out, err = call(["hello", "b"], *options.split())
            assert (status, out) == (2, "") and re.fullmatch(r"error: [^\n]*\.\n", err), err
            assert re.search(words, err), err

    def test_without_a_prompt_the_built_in_ones_are_continued(self, monkeypatch, capsys):
        """By the embedded model, with nothing on standard input."""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
        assert self.stage.main([*self.story, "--linear", "plain"]) == 0
        out, err = capsys.readouterr()
        prompts = [each if isinstance(each, str) else each[0] for each in self.stage.PROMPTS]
        texts = answers(out)
        assert sorted(texts) == list(range(1, len(prompts) + 1))
        for number, prompt in enumerate(prompts, 1):
            assert texts[number].startswith(prompt) and len(texts[number]) > len(prompt)
        self.check_story(err)
