"""What the lessons show is what happens, and the check notices where it is not."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator

import pytest
import torch

from shared import cli, paths
from shared.checkpoint import PRESETS
from shared.course import lessons, links, mine
from shared.course.lessons import Block
from shared.errors import UserError
from shared.roofline import forward_cost
from shared.task import Task
from stage08_llama.config import LlamaConfig

SECTIONS = (
    "What you know already", "The one new idea", "Predict", "The code, in the order it runs",
    "Run it", "Measure it", "Where it fails", "Exercises", "Read next in production",
)  # fmt: skip


def block(kind: str, *lines: str, words: tuple[str, ...] = ()) -> Block:
    """A block as if it stood in the lesson of the first stage."""
    return Block(paths.ROOT / paths.discover()[0] / lessons.LESSON, 1, kind, words, lines)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with lessons.serving() as address:
        yield address


in_a_process = lessons.run


def run_here(words: list[str]) -> tuple[int, str]:
    """`lessons.run`, but with our programs in this process: a new one takes longer than most do."""
    if words[:2] != [sys.executable, "-m"] or not links.OURS.match(words[2]):
        return in_a_process(words)
    threads, output = torch.get_num_threads(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "stdin", None)
        for name, value in lessons.environment().items():
            patch.setenv(name, value)
        cli.run(lessons.program(words[2]).main, words[3:])
    torch.set_num_threads(threads)
    assert isinstance(end.value.code, int)
    return end.value.code, output.getvalue()


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(block, marks=[pytest.mark.slow] * (lessons.SLOW in block.words), id=str(block))
        for block in lessons.checked()
    ],
)
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lesson_shows_what_happens(shown, fresh, request, monkeypatch):
    """fresh: each command in a process of its own, as a reader runs it."""
    if not fresh:
        monkeypatch.setattr(lessons, "run", run_here)
    address = request.getfixturevalue("server") if lessons.SERVER in shown.words else ""
    problems = lessons.check(shown, address)
    assert not problems, f"{shown}: " + "\n".join(problems)


def test_code_of_other_projects_is_linked_by_commit():
    """A branch moves on, and then the lesson is wrong about the file."""
    pattern = r"https://github\.com/[^/]+/[^/]+/(?:blob|tree)/([^/]+)/"
    for path in links.texts(paths.ROOT):
        for target in re.findall(pattern, path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[0-9a-f]{40}", target), f"{path}: {target}"


def names(texts: Iterable[str]) -> set[str]:
    """Words that cannot be English: with an underscore or a capital inside."""
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return {word for word in words if "_" in word or re.search("[a-z][A-Z]", word)}


@pytest.mark.parametrize("path", lessons.stage_lessons(), ids=lambda path: path.parent.name)
def test_a_lesson_is_whole_and_its_names_exist(path):
    """All sections in their order, a command with its output, and the tasks of tasks.py. Names up
    to the exercises, which invent some, and those of tests everywhere."""
    text = path.read_text(encoding="utf-8")
    places = [text.find(f"\n## {section}") for section in SECTIONS]
    assert -1 not in places and places == sorted(places), dict(zip(SECTIONS, places, strict=True))
    assert "console" in {block.kind for block in lessons.blocks(path)}
    assert text == lessons.with_tasks(path), "run python -m shared.course.lessons --write"
    assert f"python -m shared.course.exercise start {path.parent.name[:7]}" in text
    code = [place for folder in paths.ROOT.glob("s*") for place in folder.rglob("*.[pch]*")]
    code = [place for place in code if place.suffix in (".py", ".c", ".h")]
    known = names(place.read_text(encoding="utf-8") for place in code)
    known |= {place.stem for place in code}
    lesson, exercises = text.split("\n## Exercises\n")
    prose = re.sub(r"^```.*?^```$|\]\(https?://[^)]*\)", "", lesson, flags=re.MULTILINE | re.DOTALL)
    spoken = names(re.findall(r"`([^`\n]+)`", prose))
    spoken |= {name for name in names([exercises]) if name.startswith("test_")}
    assert spoken and spoken - known == set()


def beyond() -> str:
    """The table of the last page: a token of two models, in bfloat16."""
    llama = LlamaConfig(128_256, 131_072, 4096, 32, 32, n_kv_head=8, n_inner=14_336, tied=False)
    columns = []
    for config in (PRESETS["gpt2"], llama):
        cost = forward_cost(config, torch.bfloat16, 1)
        each = config.kv_bytes_per_token(torch.bfloat16)
        room = (80e9 - 2 * config.parameter_count) / each
        columns.append((
            f"{cost.bytes / 1e9:.2f} GB", f"{cost.flops / 1e9:.2f} GFLOP", f"{each / 1024:.0f} KiB",
            f"{config.n_positions:,} tokens, {config.n_positions * each / 1e9:.2f} GB",
            f"{40e9 / cost.bytes:,.1f} tok/s", f"{3e12 / cost.bytes:,.0f} tok/s",
            f"{800e12 * 2 / (2 * 3e12):.0f} rows", f"{room:,.0f} tokens",
        ))  # fmt: skip
    names = (
        "weights that a token reads", "operations of a token", "cache of a token", "full context",
        "one answer, at 40 GB/s at most", "one answer, on the GPU at most", "B* of the GPU",
        "room for the cache in 80 GB",
    )  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(names, *columns, strict=True))


def test_lesson_00_and_the_last_page_have_the_right_numbers():
    first, *_, last = (path.read_text(encoding="utf-8") for path in lessons.lessons()[1:])
    merges = (paths.ROOT / "shared/stories/model/merges.txt").read_text(encoding="utf-8")
    order = [line.split() for line in merges.splitlines() if not line.startswith("#")]
    shown = re.findall(r"merge (\d+): +(\w+) \+ (\w+)", first)
    assert len(shown) == 3 and all(order[int(n)] == [a, b] for n, a, b in shown)
    assert 600 <= len(first.split()) <= 900 and beyond() in last, beyond()


def test_what_matches():
    for shown, output in (
        ("the end", "the end   \n\n"),
        ("40 tokens in ~0.11 s, ~371.8 tok/s", "40 tokens in 0.08 s, 1,482 tok/s"),
        *(("stage  ~1.25  ~3", "stage     11.25     3"), ("(~12 ms)", "(-3.5 ms)")),
        ("Once upon ... [40 tokens]", "Once upon a time. [40 tokens]"),
        *(("a\n...\nz", "a\nb\nc\nz"), ("a\n...\nz", "a\nz")),
        ("~/.cache [x] (y) a+b", "~/.cache [x] (y) a+b"),  # no regular expression
    ):
        assert lessons.matches(shown.splitlines(), output.splitlines()), shown
    for shown, output in (
        *(("the end", "the End"), ("the end", "the end\nof it"), ("~0.11 s", "fast s")),
        *(("a ~3", "a3"), ("a\n...\nz", "a\nb"), ("a ... z", "a b\nz")),  # within a line only
    ):
        assert not lessons.matches(shown.splitlines(), output.splitlines()), shown


PROGRAM, SERVED = "$ python -c 'print(1); print(2.5)'", (lessons.SERVER,)
WRITTEN = [PROGRAM, "-- shown:", "1", "7.0", "-- printed, with exit status 0:", "1", "2.5"]
FAILING = '$ python -c "import sys; print(1, flush=True); sys.exit(2)"'
REMARK, LONGER = "$ python -c 'print(\"b\")' # with a remark", "$ python -c \\\n    'print(1)'\n1"
ADDRESS = '$ python -c \'print("127.0.0.1:8000", len("127.0.0.1:8000"))\'\n127.0.0.1:8000 16'
ENDS = "assert '127.0.0.1:8000'.endswith(':{}')"


def test_what_a_block_shows_is_compared():
    for kind, text, words, problem in (
        ("console", f"{PROGRAM}\n1\n~7.0\n{REMARK}\nb\n{LONGER}", (), ""),
        ("console", f"{PROGRAM}\n1\n7.0", (), "\n".join(WRITTEN)),
        *(("console", f"{FAILING}\n1", (), ""), ("console", f"{FAILING}\n2", (), "exit status 2")),
        *(("console", ADDRESS, SERVED, ""), ("python", ENDS.format(123456), SERVED, "")),
        ("python", ENDS.format(13), SERVED, "ended with status 1"),
        ("sh", 'python -m stage01_forward "--gone is text" --seed 1  # a --remark', (), "--gone"),
        ("sh", "python -m stage01_forward --seed 1 && python -m reports.tour --tap 1", (), "--tap"),
        ("sh", "python -m pytest --gone | head --gone", (), ""),
        ("sh", "python -m shared.course.links --gone -- --for-another", (), "--gone"),
    ):
        shown = block(kind, *text.split("\n"), words=words)
        found = lessons.check(shown, "127.0.0.1:123456")
        assert len(found) == bool(problem) and problem in "".join(found)


def test_blocks_that_cannot_be_checked():
    for text in ("$ ls", "$ ", "$ rm -r python", "$ python -m a | b", "$ python -m a > b"):
        pytest.raises(UserError, lessons.check, block("console", text)).match("a block of sh")
    pytest.raises(UserError, lessons.check, block("console", "x")).match("begins with output")
    unserved = block("console", "$ curl x", words=SERVED)
    pytest.raises(UserError, lessons.check, unserved).match("needs a server")
    words = lessons.arguments("pytest shared -k 'a b'")
    assert words == [sys.executable, "-m", "pytest", "shared", "-k", "a b"]


def test_quotations_must_be_the_code():
    def quotes(*lines: str) -> bool:
        return lessons.check(block("python", *lines)) == []

    lines = mine.read(paths.ROOT / "stage01_forward/engine.py").splitlines()
    at = next(number for number, line in enumerate(lines) if "def generate" in line)
    lines = lines[at : at + 6]
    assert quotes(*lines) and quotes(lines[0], "...", lines[5])
    assert quotes(*(line.removeprefix("    ") for line in lines))
    assert not quotes(lines[5], "...", lines[0]) and not quotes(lines[0], lines[2])
    assert not quotes(*lines[:3], "...", lines[2])
    assert not quotes(*lines[:5], lines[5] + "  # changed")
    assert not quotes("    " + lines[0], *lines[1:])  # another indentation
    assert not quotes("class KVCache:")  # of a later stage


def test_the_table_of_tasks(monkeypatch, tmp_path):
    task = Task(1, "cache.py", ("Cache.a", "b"), "two of them", "text", 15, ("hint",), ("tests",))
    monkeypatch.setattr(mine, "tasks", lambda stage: (task,) if stage == tmp_path.name else ())
    path = tmp_path / "README.md"
    path.write_text("# T\n<!-- tasks -->\nold\n<!-- /tasks -->\nend\n", encoding="utf-8")
    row = "| 1 | two of them | `Cache.a`, `b` in [cache.py](cache.py) | 15 |"
    written = lessons.with_tasks(path)
    assert f"\n{row}\n\n<!-- /tasks -->\nend\n" in written and "old" not in written
    path.write_text(written, encoding="utf-8")
    assert lessons.with_tasks(path) == written
    path.write_text("# T\n", encoding="utf-8")
    pytest.raises(UserError, lessons.with_tasks, path).match("has no place for its tasks")


def test_the_command_line(monkeypatch, tmp_path, capsys):
    shown = "```console{}\n$ python -c 'print(1)'\n{}\n```\n"
    text = shown.format("", 1) + "~~~text\n```\n~~~\n" + shown.format(" slow", 2)
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert lessons.main([]) == 0
    assert capsys.readouterr().out == "1 blocks of 1 lessons are right.\n"
    assert lessons.main(["--slow"]) == 1
    out = capsys.readouterr().out
    assert "README.md:8: $ python -c 'print(1)'" in out and out.endswith("1 wrong\n")
