"""The edits of a stage: exercises/edits/stageNN.txt, whose format README.md states.

An edit replaces text of one file; some tests must notice. It is a planted fault, a wrong solution
of a task, and, with a story, an exhibit of the museum. An edit that is `right` changes the shape of
a solution and not what it does: the task's tests must pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

from . import splice
from .tasks import Task, find_stage, test_id

FOLDER = Path(__file__).parent / "edits"
STORY = ("title", "shows", "hint", "seen", ">")  # fields that an exhibit has
_HEADER = re.compile(r"(?:task (\d+))? ?(museum|right|fault|): (.+)")
_FIELD = re.compile(r"(?:(caught by|title|shows|hint|seen): |(>) )(.+)")


@dataclass(frozen=True)
class Edit:
    """One entry. what: the mistake, or the shape of a right solution. tests: pytest ids, each of
    which must fail. replacements: (old, new) texts; an `old` of "" stands for the body of the
    task's only function. fields: the lines of each field."""

    file: str
    task: int | None
    kind: str  # "", "fault", "museum" or "right"
    what: str
    tests: list[str]
    replacements: list[tuple[str, str]]
    fields: dict[str, list[str]]

    def applied(self, source: str, task: Task | None = None) -> str:
        """`source` with this edit. task: needed where a whole body is replaced.

        Raises LookupError if a text to replace does not occur exactly once.
        """
        for old, new in self.replacements:
            if not old and task:
                source = splice.with_body(source, task.functions[0], new)
            elif source.count(old) != 1:
                raise LookupError(f"{old!r} occurs {source.count(old)} times")
            source = source.replace(old, new) if old else source
        if self.file.endswith(".py"):
            splice.parse(source)
        return source


def exhibits() -> list[Edit]:
    """The museum, in reading order. Exhibit 1 is the first."""
    stages = [find_stage(path.stem) for path in sorted(FOLDER.glob("*.txt"))]
    return [edit for stage in stages for edit in read(stage) if edit.kind == "museum"]


def read(stage: str) -> list[Edit]:
    """The edits of a stage. Raises UserError for an entry that is not as README.md says."""
    text = (FOLDER / f"{stage[:7]}.txt").read_text(encoding="utf-8")
    found = []
    for section in re.split(r"^# ", re.sub(r"\n {2,}", " ", text), flags=re.M)[1:]:
        file, *entries = re.split(r"\n## ", section)
        for header, *lines in (entry.split("\n") for entry in entries):
            try:
                found.append(_parsed(stage, file.strip(), header, lines))
            except ValueError as error:
                raise UserError(f"{stage[:7]}.txt, '## {header}': {error}.") from None
    return found


def _parsed(stage: str, file: str, header: str, lines: list[str]) -> Edit:
    pairs: list[tuple[list[str], list[str]]] = []
    fields: dict[str, list[str]] = {}
    before = ""
    for line in lines:
        if line[:1] in ("-", "+"):
            if not pairs or (line[0] == "-" and before != "-"):
                pairs.append(([], []))
            pairs[-1][line[0] == "+"].append(line[2:])
        elif field := _FIELD.fullmatch(line):
            fields.setdefault(field[1] or field[2], []).append(field[3])
        elif line:
            raise ValueError(f"what is '{line}'?")
        before = line[:1]
    head, tests = _HEADER.fullmatch(header), fields.pop("caught by", [])
    if not head or not pairs or not all(new for _, new in pairs):
        raise ValueError("a header such as 'task 2 museum: what is wrong', and a + for each -")
    if (head[2] == "right") == bool(tests) or (head[2] == "museum" and {*STORY} - {*fields}):
        raise ValueError(f"all but a right edit have 'caught by:', an exhibit {', '.join(STORY)}")
    return Edit(
        f"{stage}/{file}",
        int(head[1]) if head[1] else None,
        head[2],
        head[3],
        [test_id(stage, test) for test in tests],
        [("\n".join(old), "\n".join(new)) for old, new in pairs],
        fields,
    )
