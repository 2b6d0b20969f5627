"""Several growing texts: one harmless line each, never above the terminal; prompts from a file."""

from __future__ import annotations

import argparse
import io
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from shared import cli, live
from shared.config import Config
from shared.errors import UserError
from shared.tokenizer import ByteTokenizer

CONFIG = Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=1, eos_ids=(256,))
LOADED = cli.Loaded(None, ByteTokenizer(), CONFIG, "plain", torch.device("cpu"), torch.float32)


def answer(number: int = 1, ids: bytes = b"", reason: str | None = None) -> live.Answer:
    growing = live.Answer(number, "ab", LOADED)
    growing.output = SimpleNamespace(token_ids=list(ids), finish_reason=reason, error=None)
    return growing


def test_a_text_grows_by_whole_characters():
    new = live.Answer(1, "ab", LOADED)
    assert (new.text(), new.tokens, new.finish_reason, new.error) == ("ab", 0, None, None)
    growing = answer(ids="c€".encode()[:2])
    assert (growing.text(), growing.tokens, growing.finish_reason) == ("abc", 2, None)
    growing.output.token_ids += "€".encode()[1:]
    assert growing.text() == growing.text() == "abc€"
    growing.output.token_ids += ["é".encode()[0], 256]
    growing.output.finish_reason = "stop"  # half a character is shown at the end, end-of-text never
    assert growing.text() == growing.text() == "abc€\ufffd"


def test_a_line_is_harmless_and_never_wider_than_the_terminal():
    for text, width, end in (
        *(("Once upon a time", 4, "time"), ("Once", 10, "Once"), ("Once", 0, "")),
        *(("a\nb\tc", 9, "a b c"), ("a\x1b[2Jb\r", 9, "a [2Jb ")),
        *(("日本語", 5, "本語"), ("日本語", 4, "本語")),
    ):
        assert live.line(width, text=text).plain == end
    drawn = live.line(11, ("7", 4, "bold"), ("[red]語語語語", 6, ""), text="a long, long tail")
    assert drawn.plain.startswith("7   [red]") and drawn.cell_len <= 11  # no markup


def show(answers: list[live.Answer], most: int = 99) -> live.Show:
    """A run whose engine has these answers, until Ctrl-C after `most` steps."""
    engine = SimpleNamespace(requests=answers, steps=[SimpleNamespace(seconds=1.0)])
    run = live.Show(engine, LOADED, [], None)
    engine.step = Mock(side_effect=[None] * most + [KeyboardInterrupt])
    run.answers, run.head, run.states = answers, lambda: "step", lambda: {"2": ("decode", "green")}
    return run


def test_ended_answers_give_way_first():
    answers = [answer(n, b"cd", reason="stop" if n in (1, 3) else None) for n in range(1, 7)]
    answers[1].urgent, run = True, show(answers)
    run.step(1)
    for height, left in ((9, "123456"), (7, "12456"), (5, "245"), (2, "")):
        assert "".join(line.plain[3] for line in run.view(60, height)[2:]) == left
    assert all(line.cell_len <= 5 for line in run.view(5, 9))


def test_a_terminal_is_cleared_and_its_cursor_comes_back(monkeypatch):
    for term, drawn in (("xterm", True), ("dumb", False)):
        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", term)
        run = show([answer(n) for n in range(1, 100)], most=3)
        assert run.run(argparse.Namespace(every=1)) == cli.EXIT_INTERRUPTED
        text = terminal.getvalue()
        assert 0 < text.count("waits") < 99 if drawn else not text
        assert (text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0) == drawn


def read(prompts: str | None, prompt: str | None = None) -> str | list[str] | None:
    return cli.read_prompts(argparse.Namespace(prompts=prompts, prompt=prompt))


def test_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    for data, expected in (
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\n two \n\n", ["one", "", " two ", ""]),
        ("\ufeffcafé 😀\x0c\u2028x\n".encode(), ["café 😀\x0c\u2028x"]),  # only \n ends a line
        (b"", [""]),  # which engines refuse
        (b"caf\xe9\n", "cannot be read"),
    ):
        file.write_bytes(data)
        if isinstance(expected, list):
            assert read(str(file)) == expected
        else:
            pytest.raises(UserError, read, str(file)).match(expected)
    pytest.raises(UserError, read, str(tmp_path / "missing")).match("cannot be read")
    pytest.raises(UserError, read, "file", "hello").match("both a prompt and --prompts")
