"""The edits of a stage: exercises/edits/stageNN.txt.

An edit replaces text of one file; some tests must notice. It is a planted fault, a wrong solution
of a task, and, with a story, an exhibit of the museum. An edit that is `right` changes the shape of
a solution and not what it does: the task's tests must pass. README.md states the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

from . import splice
from .tasks import Task, find_stage, test_id

FOLDER = Path(__file__).parent / "edits"
_ENTRY = re.compile(r"^## (.*)\n((?:(?!## ).*\n?)*)", re.M)
_HEADER = re.compile(r"(\S+)(?: {2,}task (\d+))?((?: {2,}(?:museum|right))?)")
_FIELD = re.compile(r"(caught by|title|shows|hint|seen|>)(?:(?<=>)|:) (.+)")
_SIDE = re.compile(r"([-+])(?: (.*))?")


@dataclass(frozen=True)
class Edit:
    """One entry. what: the mistake, or the shape of a right solution. tests: pytest ids, each of
    which must fail. replacements: (old, new) texts; an `old` of "" stands for the body of the
    task's only function.

    fields: for the museum: title (what the user complains about), shows (the command that shows
    it), hint, seen (the project), and ">", the story.
    """

    stage: str
    file: str
    task: int | None
    kind: str  # "", "museum" or "right"
    what: str
    tests: tuple[str, ...]
    replacements: tuple[tuple[str, str], ...]
    fields: dict[str, str]

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
            if (count := source.count(old)) != 1:
                raise LookupError(f"{old.strip().splitlines()[0]!r} occurs {count} times")
            source = source.replace(old, new)
        if self.file.endswith(".py"):
            splice.parse(source)
        return source


def exhibits() -> list[Edit]:
    """The museum: all edits with a story, in reading order. Exhibit 1 is the first."""
    return [edit for stage in stages() for edit in read(stage) if edit.kind == "museum"]


def stages() -> list[str]:
    """The stages that have edits."""
    return [find_stage(path.stem) for path in sorted(FOLDER.glob("*.txt"))]


def read(stage: str) -> list[Edit]:
    """The edits of a stage; none if it has no file."""
    path = FOLDER / f"{stage[:7]}.txt"
    return list(parse(path.read_text(encoding="utf-8"), stage)) if path.is_file() else []


def parse(text: str, stage: str) -> Iterator[Edit]:
    """Raises UserError, with the line of its header, for an entry that is not as README.md says."""
    for entry in _ENTRY.finditer(text):
        where = f"{stage[:7]}.txt, line {text.count(chr(10), 0, entry.start()) + 1}"
        header = _HEADER.fullmatch(entry[1].rstrip())
        if header is None:
            raise UserError(f"{where}: a header is '## FILE', then task N, then right or museum.")
        file, number, kind = header[1], header[2], header[3].strip()
        what: list[str] = []
        fields: dict[str, list[str]] = {}
        pairs: list[dict[str, list[str]]] = []
        before = ""
        for line in re.sub(r"\n {2,}", " ", entry[2]).splitlines():
            side, field = _SIDE.fullmatch(line), _FIELD.fullmatch(line)
            if side:
                if not pairs or side[1] == "-" != before:
                    pairs.append({"-": [], "+": []})
                pairs[-1][side[1]].append(side[2] or "")
            elif field:
                fields.setdefault(field[1], []).append(field[2])
            elif line.strip():
                what.append(line)
            before = side[1] if side else before
        if len(what) != 1 or not pairs or not all(pair["+"] for pair in pairs):
            raise UserError(f"{where}: an entry has one line that names it, and a + for each -.")
        tests = ", ".join(fields.pop("caught by", [])).split(", ")
        if (kind == "right") == any(tests):
            raise UserError(f"{where}: all but a right edit have 'caught by:'.")
        if kind == "museum" and (absent := {"title", "shows", "hint", "seen", ">"} - {*fields}):
            raise UserError(f"{where}: an exhibit of the museum needs {', '.join(sorted(absent))}.")
        yield Edit(
            stage,
            file,
            int(number) if number else None,
            kind,
            what[0],
            tuple(test_id(stage, test) for test in tests if test),
            tuple(("\n".join(pair["-"]), "\n".join(pair["+"])) for pair in pairs),
            {name: ("\n" if name == "shows" else " ").join(x) for name, x in fields.items()},
        )
