"""Several growing texts: nothing breaks a line, nothing is higher than the terminal, and the prompts come from a file."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from shared import cli, live
from shared.checkpoint import Config
from shared.errors import UserError
from shared.tokenizer import ByteTokenizer

CONFIG = Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=1, eos_ids=(256,))
LOADED = cli.Loaded(None, ByteTokenizer(), CONFIG, "plain", torch.device("cpu"), torch.float32)


def output(
    ids: bytes | list[int] = b"", reason: str | None = None, error: str | None = None
) -> Any:
    return SimpleNamespace(token_ids=list(ids), finish_reason=reason, error=error)


def answer(number: int = 1, prompt: str = "ab", **fields: Any) -> live.Answer:
    made = live.Answer(number, prompt, LOADED)
    made.output = output(**fields)
    return made


# ---- one answer -------------------------------------------------------------------------------------------------


def test_a_text_grows_by_whole_characters() -> None:
    growing = answer(ids="c€".encode()[:2])
    assert (growing.text(), growing.tokens, growing.finish_reason) == ("abc", 2, None)
    growing.output.token_ids += "€".encode()[1:]
    assert growing.text() == growing.text() == "abc€"
    growing.output.token_ids += ["é".encode()[0], 256]
    growing.output.finish_reason = "stop"
    assert (
        growing.text() == growing.text() == "abc€\ufffd"
    )  # half a character is shown at the end, end-of-text never


def test_an_answer_without_an_engine_waits() -> None:
    waiting = live.Answer(1, "ab", LOADED)
    assert (waiting.text(), waiting.tokens, waiting.finish_reason, waiting.error) == (
        "ab",
        0,
        None,
        None,
    )


def test_errors_are_named_by_the_number_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    refused = live.Answer(3, "ab", LOADED)
    refused.refuse(UserError("Too long."))
    failed = answer(4, error="No number.", reason="error")
    answer(5, ids=b"c\nd", reason="length").print()
    for each in (refused, failed):
        assert each.finish_reason == "error"
        each.print()
    out, err = capsys.readouterr()
    assert err == "error: prompt 3: Too long.\nerror: prompt 4: No number.\n"
    assert out == "--- prompt 5 ---\nabc\nd\n\n"


def test_a_prompt_that_cannot_be_cut_into_tokens_is_an_error_of_its_own() -> None:
    class Refusing(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise UserError("It cannot be cut.")

    loaded = cli.Loaded(None, Refusing(), CONFIG, "plain", torch.device("cpu"), torch.float32)
    assert live.Answer(1, "ab", loaded).error == "It cannot be cut."


def test_summary_counts_the_reasons() -> None:
    answers = [
        answer(ids=b"abcd", reason="stop"),
        answer(ids=b"ab", reason="length"),
        answer(ids=b"ab", reason="stop"),
    ]
    answers.append(answer(error="No.", reason="error"))
    words = live.summary(answers, 5, 2.0, LOADED)
    assert words.startswith(
        "[4 prompts, 8 tokens in 5 steps and 2.00 s, 4.0 tok/s, finish reasons: 1 error, 1 length, 2 stop; "
    )
    assert "0.0 tok/s" in live.summary(answers[3:], 0, 0.0, LOADED)


# ---- lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "width", "end"),
    [
        ("Once upon a time", 4, "time"),
        ("Once", 10, "Once"),
        ("Once", 0, ""),
        ("Once", -3, ""),
        ("a\nb\tc", 9, "a b c"),
        ("a\x1b[2Jb\r", 9, "a [2Jb "),
        ("日本語", 5, "本語"),
        ("日本語", 4, "本語"),
    ],
)
def test_the_tail_of_a_text_is_one_harmless_line(text: str, width: int, end: str) -> None:
    assert live.tail(text, width) == end


@pytest.mark.parametrize("width", [1, 5, 11, 30])
def test_a_line_is_never_wider_than_the_terminal(width: int) -> None:
    drawn = live.line(
        width, ("7", 4, "bold"), ("[red]語語語語", 6, ""), text="a long, long tail of a text"
    )
    assert drawn.cell_len <= width and "\n" not in drawn.plain
    assert drawn.plain.startswith("7   [red]"[:width])  # words of the user are no markup


def test_what_has_ended_gives_way_first() -> None:
    answers = [answer(n, reason="stop" if n in (1, 3) else None) for n in range(1, 7)]
    assert [
        [each.number for each in live.visible(answers, room)] for room in (9, 6, 5, 4, 3, 1, 0)
    ] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 4, 5, 6], [2, 4, 5], [2], []]


@pytest.mark.parametrize("height", [1, 2, 7])
def test_a_view_is_lower_than_the_terminal(height: int) -> None:
    asked = []

    def draw(width: int, lines: int) -> list[Any]:
        asked.append((width, lines))
        return [live.line(width, text=f"line {n} " * 9) for n in range(50)]

    console = Console(file=io.StringIO(), force_terminal=True, width=20, height=height)
    lines = console.render_lines(live._View(draw), pad=False)
    assert asked == [(20, max(1, height - 1))] and len(lines) == max(1, height - 1)
    assert all(cell_len("".join(segment.text for segment in line)) <= 20 for line in lines)


def test_nothing_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with live.Screen(lambda width, height: [live.line(width, text="drawn")]) as screen:
        screen.refresh()
    assert not screen.shown and capsys.readouterr() == ("", "")


def test_a_terminal_is_cleared_and_its_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    times = iter((0.0, 0.001, 1.0))
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: next(times) + 100))
    drawn = iter(range(9))
    with (
        pytest.raises(KeyboardInterrupt),
        live.Screen(
            lambda width, height: [live.line(width, text=f"drawn {next(drawn)}")]
        ) as screen,
    ):
        for _ in range(3):
            screen.refresh()
        before = next(drawn)
        raise KeyboardInterrupt
    assert before == 2  # the refresh in the middle came too soon
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # the last line is wiped
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l") >= 0
    monkeypatch.setenv("TERM", "dumb")
    assert not live.Screen(lambda width, height: []).shown


# ---- prompts from a file ----------------------------------------------------------------------------------------


def read(prompts: str | None, prompt: str | None = None) -> str | list[str] | None:
    return cli.read_prompts(argparse.Namespace(prompts=prompts, prompt=prompt))


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"one\n\n two \n\n", ["one", "", " two ", ""]),
        (
            "\ufeffcafé 😀\x0c\u2028x\n".encode(),
            ["café 😀\x0c\u2028x"],
        ),  # only a newline ends a line
    ],
)
def test_a_prompt_a_line(tmp_path: Path, data: bytes, prompts: list[str]) -> None:
    (tmp_path / "prompts.txt").write_bytes(data)
    assert read(str(tmp_path / "prompts.txt")) == prompts


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"caf\xe9\n", "not UTF-8"),
        (b"\x7fELF\0\0", "not UTF-8"),
        (b"a" * (cli.MOST_FILE_BYTES + 1), "over 4 MiB"),
    ],
)
def test_files_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "prompts.txt").write_bytes(data)
    with pytest.raises(UserError, match=words):
        read(str(tmp_path / "prompts.txt"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "missing"), "nul\0", ""):
        with pytest.raises(UserError, match="cannot be read"):
            read(name)
    with pytest.raises(UserError, match="both a prompt and --prompts"):
        read("file", "hello")


@pytest.mark.parametrize(("data", "prompt"), [(b"", None), (b"Long ago\n", "Long ago")])
def test_without_a_prompt_standard_input_is_one_if_it_holds_any(
    monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert read(None) == prompt


def test_a_person_at_a_terminal_gets_the_built_in_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert read(None) is None and read(None, "hello") == "hello"
    monkeypatch.setattr(sys, "stdin", None)
    assert read(None) is None


# ---- files to write ---------------------------------------------------------------------------------------------


def test_a_file_to_write_is_checked_first(tmp_path: Path) -> None:
    assert cli.output_file(str(tmp_path / "a.svg"), ".svg") == tmp_path / "a.svg"
    assert list(tmp_path.iterdir()) == []  # checked, not made
    (tmp_path / "folder.svg").mkdir()
    for name, words in (
        ("folder.svg", "is a folder"),
        ("no/a.svg", "does not exist"),
        ("a.png", "ends in .svg"),
    ):
        with pytest.raises(UserError, match=words):
            cli.output_file(str(tmp_path / name), ".svg")
