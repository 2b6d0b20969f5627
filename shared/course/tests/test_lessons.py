"""What the lessons show is what happens; and the check that says so would notice if it were not."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from shared import cli, paths
from shared.course import lessons, links, mine
from shared.course.lessons import Block
from shared.errors import UserError

SECTIONS = (
    "What you know already", "The one new idea", "Predict", "The code, in the order it runs", "Run it", "Measure it",
    "Where it fails", "Exercises", "Read next in production",
)  # fmt: skip


def block(kind: str, *lines: str, words: tuple[str, ...] = ()) -> Block:
    """A block as if it stood in the lesson of the first stage."""
    return Block(paths.ROOT / paths.discover()[0] / lessons.LESSON, 1, kind, words, lines)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with lessons.serving() as address:
        yield address


def run_here(words: list[str]) -> tuple[int, str]:
    """What `lessons.run` returns, but one of our programs is run in this process: to start one takes longer than to run most."""
    if words[:2] != [sys.executable, "-m"] or not links.OURS.match(words[2]):
        return in_a_process(words)
    found = importlib.import_module(words[2])
    program = (
        importlib.import_module(f"{words[2]}.__main__") if hasattr(found, "__path__") else found
    )
    threads, said = torch.get_num_threads(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, encoding="utf-8") as nothing:
        patch.setattr(sys, "stdin", nothing)
        for name, value in lessons.environment().items():
            patch.setenv(name, value)
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            pytest.raises(SystemExit) as end,
        ):
            cli.run(program.main, words[3:])
    torch.set_num_threads(threads)
    assert isinstance(end.value.code, int)
    return end.value.code, said.getvalue()


in_a_process = lessons.run


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (lessons.SLOW in each.words), id=str(each))
        for each in lessons.checked()
    ],
)
def test_a_lesson_shows_what_happens(
    shown: Block, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "run", run_here)
    address = request.getfixturevalue("server") if lessons.SERVER in shown.words else ""
    found = lessons.check(shown, address)
    assert not found, f"{shown}: " + "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown", [each for each in lessons.checked() if each.kind == "console"], ids=str
)
def test_a_lesson_shows_what_happens_to_a_reader(
    shown: Block, request: pytest.FixtureRequest
) -> None:
    """Each command in a process of its own."""
    address = request.getfixturevalue("server") if lessons.SERVER in shown.words else ""
    found = lessons.check(shown, address)
    assert not found, f"{shown}: " + "\n".join(found)


@pytest.mark.parametrize("path", lessons.lessons()[1:], ids=lambda path: path.parent.name)
def test_a_lesson_is_whole(path: Path) -> None:
    """It has the sections of a lesson, in their order; shows a command with its output; and its tasks are those of tasks.py."""
    text = path.read_text(encoding="utf-8")
    places = [text.find(f"\n## {section}") for section in SECTIONS]
    assert -1 not in places and places == sorted(places), dict(zip(SECTIONS, places, strict=True))
    assert "console" in {each.kind for each in lessons.blocks(path)}
    assert text == lessons.with_tasks(path), (
        "python -m shared.course.lessons --write puts the table of tasks in"
    )
    assert f"python -m shared.course.exercise start {path.parent.name[:7]}" in text


def test_code_of_others_is_linked_by_commit() -> None:
    """A branch moves on, and then a lesson says of a file what is no longer so."""
    for path in links.texts(paths.ROOT):
        for target in re.findall(
            r"https://github\.com/[^/]+/[^/]+/(?:blob|tree)/([^/]+)/",
            path.read_text(encoding="utf-8"),
        ):
            assert re.fullmatch(r"[0-9a-f]{40}", target), f"{path}: {target}"


def names(texts: Iterable[str]) -> set[str]:
    """What cannot be mistaken for an English word: names with an underscore or a capital inside."""
    return {
        word
        for text in texts
        for word in re.findall(r"\w+", text)
        if "_" in word or re.search("[a-z][A-Z]", word)
    }


@pytest.mark.parametrize("path", lessons.lessons()[1:], ids=lambda path: path.parent.name)
def test_names_in_a_lesson_exist(path: Path) -> None:
    """Up to the exercises, which invent some; and tests are there wherever they are named."""
    code = [place for folder in paths.ROOT.glob("s*") for place in folder.rglob("*.py")]
    known = names(place.read_text(encoding="utf-8") for place in code) | {
        place.stem for place in code
    }
    lesson, exercises = path.read_text(encoding="utf-8").split("\n## Exercises\n")
    prose = re.sub(r"^```.*?^```$|\]\(https?://[^)]*\)", "", lesson, flags=re.MULTILINE | re.DOTALL)
    spoken = names(re.findall(r"`([^`\n]+)`", prose)) | {
        name for name in names([exercises]) if name.startswith("test_")
    }
    assert spoken and not spoken - known


def test_blocks_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(
        "# T\n\n```console slow\n$ python a\nout\n```\n\n~~~text\n```\n~~~\n```\nplain\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    found = lessons.blocks(path)
    assert [(each.line, each.kind, each.words, each.lines) for each in found] == [
        (3, "console", ("slow",), ("$ python a", "out")),
        (8, "text", (), ("```",)),
        (11, "", (), ("plain",)),
    ]
    assert str(found[0]) == "README.md:3"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("the end", "the end"),
        ("the end", "the end   \n\n"),
        ("40 tokens in ~0.11 s, ~371.8 tok/s", "40 tokens in 0.08 s, 1,482 tok/s"),
        ("stage  ~1.25  ~3", "stage     11.25     3"),
        ("~5", "17"),
        ("(~12 ms)", "(-3.5 ms)"),
        ("Once upon ... [40 tokens]", "Once upon a time. [40 tokens]"),
        ("a\n...\nz", "a\nb\nc\nz"),
        ("a\n...\nz", "a\nz"),
        ("...", ""),
        (
            "~/.cache [x] (y) a+b",
            "~/.cache [x] (y) a+b",
        ),  # no number, and nothing of a regular expression
    ],
)
def test_what_matches(shown: str, said: str) -> None:
    assert lessons.matches(shown.splitlines(), said.splitlines())


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("the end", "the End"),
        ("the end", "the end\nof it"),
        ("40 tokens", "41 tokens"),
        ("~0.11 s", "fast s"),
        ("a ~3", "a3"),
        ("a ... z", "a b\nz"),  # within a line only
        ("a\n...\nz", "a\nb"),
        ("a", ""),
    ],
)
def test_what_does_not_match(shown: str, said: str) -> None:
    assert not lessons.matches(shown.splitlines(), said.splitlines())


def test_commands_are_run_and_compared() -> None:
    program = "$ python -c 'print(1); print(2.5)'"
    twice = block(
        "console", program, "1", "~7.0", "$ python -c 'print(\"b\")' # with a remark", "b"
    )
    assert lessons.check(twice) == []
    (found,) = lessons.check(block("console", program, "1", "7.0"))
    assert found.splitlines() == [
        program,
        "-- shown:",
        "1",
        "7.0",
        "-- printed, with exit status 0:",
        "1",
        "2.5",
    ]


def test_standard_error_and_a_failure_are_output_too() -> None:
    code = "import sys; print(1, flush=True); sys.exit(2)"
    assert lessons.check(block("console", f'$ python -c "{code}"', "1")) == []
    (found,) = lessons.check(block("console", f'$ python -c "{code}"', "2"))
    assert "with exit status 2" in found


def test_a_long_command_goes_on_in_the_next_line() -> None:
    split = block("console", "$ python -c \\", "    'print(1)'", "1")
    assert lessons.commands(split) == [("python -c 'print(1)'", ["1"])]
    assert lessons.check(split) == []


def test_the_words_of_a_command() -> None:
    assert lessons.arguments("python -m shared.tour --threads 1") == [
        sys.executable,
        "-m",
        "shared.tour",
        "--threads",
        "1",
    ]
    assert lessons.arguments("pytest shared -k 'a b'") == [
        sys.executable,
        "-m",
        "pytest",
        "shared",
        "-k",
        "a b",
    ]
    assert lessons.arguments("curl -s http://127.0.0.1:1/")[0] == "curl"


@pytest.mark.parametrize(
    "command", ["ls", "", "python -m a | head", "python -m a > b", "rm -r python"]
)
def test_what_needs_a_shell_is_refused(command: str) -> None:
    with pytest.raises(UserError, match="show it in a block of sh"):
        lessons.check(block("console", f"$ {command}"))


def test_blocks_that_are_written_wrong() -> None:
    with pytest.raises(UserError, match="begins with output"):
        lessons.check(block("console", "out", "$ python -c 1"))
    with pytest.raises(UserError, match="wants a server"):
        lessons.check(block("console", "$ curl x", words=(lessons.SERVER,)))


def test_the_address_of_the_server_is_put_in_and_taken_out() -> None:
    shown = block(
        "console",
        '$ python -c \'print("127.0.0.1:8000", len("127.0.0.1:8000"))\'',
        "127.0.0.1:8000 16",
        words=("server",),
    )
    assert lessons.check(shown, "127.0.0.1:123456") == []


def test_a_program_must_end_well() -> None:
    good = block(
        "python", "import sys", "assert '127.0.0.1:8000'.endswith(':12')", words=(lessons.SERVER,)
    )
    assert lessons.check(good, "127.0.0.1:12") == []
    (found,) = lessons.check(good, "127.0.0.1:13")
    assert "ended with 1" in found and "AssertionError" in found


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            'python -m stage01_forward "--gone is text" --threads 1   # and --this is a remark',
            ["--gone"],
        ),
        ('python -m stage01_forward "Once" --temperature 0.8 --seed 7', []),
        (
            "python -m stage01_forward.benchmark --quick && python -m shared.bench.report --chekc",
            ["--chekc"],
        ),
        ("python -m pytest --gone | head --gone", []),
        ("git diff --no-index a b", []),
        ("python -m shared.course.links --gone -- --for-another", ["--gone"]),
    ],
)
def test_options_must_exist(line: str, wrong: list[str]) -> None:
    found = lessons.check(block("sh", line))
    assert [each.rsplit(" ", 1)[1] for each in found] == wrong


def test_quotations_must_be_the_code() -> None:
    source = (
        (paths.ROOT / "stage01_forward" / "engine.py").read_text(encoding="utf-8").splitlines()
    )
    at = next(number for number, line in enumerate(source) if "def generate" in line)
    lines = source[at : at + 6]
    assert lessons.check(block("python", *lines)) == []
    assert lessons.check(block("python", *(line.removeprefix("    ") for line in lines))) == []
    assert lessons.check(block("python", lines[0], "...", lines[5])) == []
    assert lessons.check(block("python", lines[5], "...", lines[0])) != []
    assert lessons.check(block("python", lines[0], lines[2])) != []
    assert lessons.check(block("python", *lines[:5], lines[5] + "  # changed")) != []
    assert (
        lessons.check(block("python", "    " + lines[0], *lines[1:])) != []
    )  # indented as it is not
    later = (paths.ROOT / "stage02_kv_cache" / "cache.py").read_text(encoding="utf-8").splitlines()
    assert (
        lessons.check(block("python", next(line for line in later if line.startswith("class "))))
        != []
    )


def test_the_table_of_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = mine.Task(
        1,
        "cache.py",
        ("Cache.a", "b"),
        "two of them",
        "text",
        15,
        ("hint",),
        ("tests/test_cache.py",),
    )
    monkeypatch.setattr(mine, "tasks", lambda stage: (task,) if stage == "stage01_first" else ())
    path = tmp_path / "stage01_first" / "README.md"
    path.parent.mkdir()
    path.write_text("# T\n<!-- tasks -->\nold\n<!-- /tasks -->\nend\n", encoding="utf-8")
    row = "| 1 | two of them | `Cache.a`, `b` in [cache.py](cache.py) | 15 |"
    written = lessons.with_tasks(path)
    assert f"\n{row}\n\n<!-- /tasks -->\nend\n" in written and "old" not in written
    path.write_text(written, encoding="utf-8")
    assert lessons.with_tasks(path) == written
    path.write_text("# T\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no place for its tasks"):
        lessons.with_tasks(path)
    other = tmp_path / "README.md"
    other.write_text("# T\n", encoding="utf-8")
    assert lessons.with_tasks(other) == "# T\n"  # no stage, no tasks


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    path.write_text(
        "```console\n$ python -c 'print(1)'\n1\n```\n```console slow\n$ python -c 'print(1)'\n2\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert lessons.main([]) == 0
    assert capsys.readouterr().out == "1 blocks of 1 lessons show what is so.\n"
    assert lessons.main(["--slow"]) == 1
    out = capsys.readouterr().out
    assert "README.md:5: $ python -c 'print(1)'" in out and out.endswith("1 wrong\n")
