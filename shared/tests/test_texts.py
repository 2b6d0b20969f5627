"""What the texts show is so: quoted code is the code, links and commands lead somewhere, and (slow)
commands print what a lesson shows.

In a block of `console`, `...` matches any text, alone on a line any lines, and `~` before a number
any number. `console server` runs beside a server of stage 06.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

from shared.paths import ROOT
from shared.server import own_server

ADDRESS = "127.0.0.1:8000"  # in the lessons; the check has a port of its own
FENCE = re.compile(r"^```(\w*) ?(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
MODULE = re.compile(r"\bpython3? -m ((?:shared|reports|exercises|stage\d\d)[\w.]*)")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"}


def tracked(ending: str) -> list[Path]:
    """The project's files: no virtual environment, nothing that a reader made."""
    listed = subprocess.run(
        ["git", "ls-files", f"*{ending}"], cwd=ROOT, capture_output=True, text=True
    )
    files = listed.stdout.splitlines() or [str(path) for path in ROOT.rglob(f"*{ending}")]
    return [ROOT / name for name in files if (ROOT / name).is_file()]


def anchors(text: str) -> set[str]:
    """The anchors that a code host makes of headings: "What `x` costs" -> "what-x-costs"."""
    headings = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    named = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    return named | {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


TEXTS = {path: path.read_text(encoding="utf-8") for path in tracked(".md")}


class Block(NamedTuple):
    path: Path
    kind: str
    word: str
    content: str


BLOCKS = [Block(path, *found) for path, text in TEXTS.items() for found in FENCE.findall(text)]
IDS = [f"{block.path.relative_to(ROOT)}-{block.kind}" for block in BLOCKS]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_commands_lead_somewhere(path: Path) -> None:
    text = TEXTS[path]
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = unquote(target).partition("#")
        file = Path(os.path.normpath(path.parent / name)) if name else path
        if not re.match(r"[a-z]+:", target) and not (
            file.exists() and (not anchor or file not in TEXTS or anchor in anchors(TEXTS[file]))
        ):
            wrong.append(target)
    for module in MODULE.findall(text):
        place = ROOT / module.rstrip(".").replace(".", "/")
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
            wrong.append(f"python -m {module}")
    assert not wrong


def parts(code: str) -> Iterator[list[str]]:
    """The runs of lines between lines of `...`, without their common indentation."""
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        if part.strip():
            yield textwrap.dedent(part).rstrip().split("\n")


def quotes(code: str, source: list[str]) -> bool:
    """Whether the source has all parts of the code in order, with any indentation."""
    at = 0
    for part in parts(code):
        places = range(at, len(source) - len(part) + 1)
        same = (
            place
            for place in places
            if source[place].strip() == part[0].strip()
            and textwrap.dedent("\n".join(source[place : place + len(part)])).split("\n") == part
        )
        if (place := next(same, None)) is None:
            return False
        at = place + len(part)
    return True


SOURCES = {
    path: path.read_text(encoding="utf-8").splitlines()
    for ending in (".py", ".c", ".h")
    for path in tracked(ending)
    if "tests" not in path.parts
}
QUOTED = [
    pytest.param(block, id=name)
    for block, name in zip(BLOCKS, IDS, strict=True)
    if block.kind in ("python", "c") and block.word != "server" and block.path.parent != ROOT
]


@pytest.mark.parametrize("block", QUOTED)
def test_quoted_code_is_the_code(block: Block) -> None:
    """Of the stage, of an earlier one, or of the ground."""
    stage = block.path.relative_to(ROOT).parts[0]
    ending = (".py",) if block.kind == "python" else (".c", ".h")
    sources = [
        source
        for path, source in SOURCES.items()
        if path.suffix in ending
        and path.relative_to(ROOT).parts[0] <= stage
        or path.is_relative_to(ROOT / "shared")
    ]
    assert any(quotes(block.content, source) for source in sources), block.content


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with own_server(quiet=True, environment=os.environ | ENVIRONMENT) as server:
        yield server.url.removeprefix("http://")


def pattern(line: str) -> str:
    """The regular expression of a line that a lesson shows."""
    pieces = re.split(r"( *~[\d,.]*\d *|\.\.\.)", line.rstrip())  # every second one varies
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [".*?" if piece == "..." else r" *-?[\d,.]*\d *" for piece in pieces[1::2]]
    return "".join(pieces) + " *"


def prints(shown: str, output: str) -> bool:
    """Whether the output has all runs of lines between lines of `...`, in order: each at the first
    place where it fits, the first at the beginning and the last at the end."""
    lines, at = output.rstrip().split("\n"), 0
    runs = re.split(r"^ *\.\.\.\n", shown.rstrip() + "\n", flags=re.MULTILINE)
    for number, run in enumerate(runs):
        patterns = [pattern(line) for line in run.split("\n")[:-1]]
        end = len(lines) - len(patterns)
        places = range(at, end + 1)[: 1 if number == 0 else None]
        for place in places if number < len(runs) - 1 else set(places) & {end}:
            if all(map(re.fullmatch, patterns, lines[place:])):
                at = place + len(patterns)
                break
        else:
            return False
    return True


CONSOLE = [
    pytest.param(block, id=name)
    for block, name in zip(BLOCKS, IDS, strict=True)
    if block.kind == "console"
]


@pytest.mark.slow
@pytest.mark.parametrize("block", CONSOLE)
def test_commands_print_what_a_lesson_shows(block: Block, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue("address") if block.word == "server" else ADDRESS
    content = block.content.replace("\\\n", "")
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE):
        words = shlex.split(command.replace(ADDRESS, place), comments=True)
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", timeout=300,
        )  # fmt: skip
        assert prints(shown, done.stdout.replace(place, ADDRESS)), done.stdout
