"""The edits of a stage: exercises/edits/stageNN.txt.

An edit replaces text of one file; some tests must notice. It is a planted fault, a wrong solution
of a task, and, with a story, an exhibit of the museum. An edit that is `right` changes the shape of
a solution and not what it does: all tests must pass. README.md states the format.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from shared import paths
from shared.errors import UserError

from . import splice
from .tasks import Task, find_stage, test_id

FOLDER = Path(__file__).parent / "edits"
_HEADER = re.compile(r"## (\S+)((?: {2,}(?:task \d+|museum|right))*)")
_FIELD = re.compile(r"(caught by|title|shows|hint|seen): (.+)")
_MUSEUM = ("title", "shows", "hint", "seen", "story")


@dataclass
class Edit:
    """One entry. replacements: (old, new) texts; an `old` of "" stands for the body of the task's
    only function.

    what: the mistake, or the shape of a right solution. tests: pytest ids of which at least one
    must fail. The rest is for the museum: what the user complains about, the command that shows it,
    where to look, what happened, and in which project.
    """

    stage: str
    file: str
    task: int | None
    right: bool
    museum: bool
    what: str = ""
    tests: tuple[str, ...] = ()
    replacements: list[tuple[str, str]] = field(default_factory=list)
    title: str = ""
    shows: str = ""
    hint: str = ""
    story: str = ""
    seen: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.what}"

    def applied(self, source: str, task: Task | None = None) -> str:
        """`source` with this edit. task: needed where a whole body is replaced.

        Raises LookupError if a text to replace does not occur exactly once.
        """
        for old, new in self.replacements:
            if not old:
                if task is None or len(task.functions) != 1:
                    raise LookupError("only a task with one function takes a whole body")
                source = splice.with_body(source, task.functions[0], new)
                continue
            count = source.count(old)
            if count != 1:
                raise LookupError(f"{old.strip().splitlines()[0]!r} occurs {count} times")
            source = source.replace(old, new)
        if self.file.endswith(".py"):
            ast.parse(source)
        return source


def exhibits() -> list[Edit]:
    """The museum: all edits with a story, in reading order. Exhibit 1 is the first."""
    return [edit for stage in files() for edit in read(stage) if edit.museum]


def files() -> list[str]:
    """The stages, and perhaps "shared", that have edits."""
    names = sorted(path.stem for path in FOLDER.glob("*.txt"))
    return [name if name == "shared" else find_stage(name) for name in names]


def read(stage: str) -> list[Edit]:
    """The edits of a stage; none if it has no file."""
    path = FOLDER / f"{stage[:7]}.txt"
    return list(parse(path.read_text(encoding="utf-8"), stage)) if path.is_file() else []


def parse(text: str, stage: str) -> Iterator[Edit]:
    """Raises UserError, with the line of its header, for an entry that is not as README.md says."""
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("## ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        where = f"{stage[:7]}.txt, line {start + 1}"
        header = _HEADER.fullmatch(lines[start].rstrip())
        if header is None:
            raise UserError(f"{where}: a header is '## FILE', then task N, right or museum.")
        words = header[2].split()
        task = int(words[words.index("task") + 1]) if "task" in words else None
        edit = Edit(stage, header[1], task, "right" in words, "museum" in words)
        _fill(edit, [line for line in lines[start + 1 : end] if line.strip()], where)
        yield edit


def _fill(edit: Edit, lines: list[str], where: str) -> None:
    for number in reversed(range(len(lines))):
        if lines[number].startswith("  ") and number:  # continues the line before
            lines[number - 1 : number + 1] = [f"{lines[number - 1]} {lines[number].strip()}"]
    kinds = [(_kind(line), line) for line in lines]
    sides: list[tuple[str, str]] = []
    for kind, group in groupby(kinds, key=lambda pair: pair[0]):
        texts = [line for _, line in group]
        if kind in "+-":
            sides.append((kind, "\n".join(line[2:] for line in texts)))
        elif kind == ">":
            edit.story = " ".join(line[1:].strip() for line in texts)
        elif kind == "field":
            for line in texts:
                name, value = _FIELD.fullmatch(line).groups()  # type: ignore[union-attr]
                if name == "caught by":
                    names = value.split(", ")
                    edit.tests += tuple(test_id(edit.stage, test) for test in names)
                elif name == "shows":  # a program has several
                    edit.shows = f"{edit.shows}\n{value}".strip()
                else:
                    setattr(edit, name, value)
        elif edit.what:
            raise UserError(f"{where}: one line says what is wrong, not '{texts[0][:40]}', too.")
        else:
            edit.what = " ".join(texts)
    if sides and sides[0][0] == "+":
        sides.insert(0, ("-", ""))
    if not edit.what or not sides or len(sides) % 2:
        raise UserError(f"{where}: an entry has a line that names it, and a + for each -.")
    edit.replacements = [(a[1], b[1]) for a, b in zip(sides[::2], sides[1::2], strict=True)]
    if edit.right == bool(edit.tests):
        raise UserError(f"{where}: a right edit has no 'caught by:', and every other one has.")
    absent = [name for name in _MUSEUM if edit.museum and not getattr(edit, name)]
    if absent:
        raise UserError(f"{where}: an exhibit of the museum needs {', '.join(absent)}.")


def _kind(line: str) -> str:
    if line[:2] in ("- ", "+ ", "-", "+"):
        return line[0]
    if line.startswith(">"):
        return ">"
    return "field" if _FIELD.fullmatch(line) else "what"


def source(file: str) -> str:
    """A file of the repository."""
    return (paths.ROOT / file).read_text(encoding="utf-8").replace("\r\n", "\n")
