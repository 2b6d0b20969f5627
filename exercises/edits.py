"""The edits of a stage: exercises/edits/stageNN.txt, whose format README.md states.

An edit replaces text of one file; some tests must notice. It is a planted fault, a wrong solution
of a task, and, with a story, an exhibit of the museum. An edit that is `right` changes the shape of
a solution and not what it does: the task's tests must pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from shared import paths
from shared.errors import UserError

from . import splice
from .tasks import Task, test_id

FOLDER = Path(__file__).parent / "edits"
_HEADER = re.compile(r"(?:task (\d+))? ?(museum|right|fault|): (.+)")


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
        """`source` with this edit. task: needed where a whole body is replaced. Raises UserError
        unless a text to replace occurs exactly once."""
        for old, new in self.replacements:
            if not old and task:
                source = splice.with_body(source, task.functions[0], new)
            elif source.count(old) == 1:
                source = source.replace(old, new)
            else:
                raise UserError(f"{self.file}: {old!r} occurs {source.count(old)} times.")
        return source


def exhibits() -> list[Edit]:
    """The museum, in reading order. Exhibit 1 is the first."""
    return [edit for stage in paths.discover() for edit in read(stage) if edit.kind == "museum"]


def read(stage: str) -> list[Edit]:
    """The edits of a stage. Raises UserError for an entry without a header or a replacement."""
    text = (FOLDER / f"{stage[:7]}.txt").read_text(encoding="utf-8")
    sections = re.split(r"^# ", re.sub(r"\n {2,}", " ", text), flags=re.M)[1:]
    return [
        _parsed(stage, section.partition("\n")[0], *entry.split("\n"))
        for section in sections
        for entry in section.split("\n## ")[1:]
    ]


def _parsed(stage: str, file: str, header: str, *lines: str) -> Edit:
    pairs: list[tuple[list[str], list[str]]] = []
    fields = defaultdict[str, list[str]](list)
    for line in filter(None, lines):
        sign, text = line[0], line[2:]
        if sign in "-+":
            if not pairs or (sign == "-" and pairs[-1][1]):
                pairs.append(([], []))
            pairs[-1][sign == "+"].append(text)
        else:
            key, _, text = line.partition(" " if sign == ">" else ": ")
            fields[key].append(text)
    head = _HEADER.fullmatch(header)
    if not head or not pairs or not all(new for _, new in pairs):
        raise UserError(f"{stage[:7]}.txt: no header 'task 2: what is wrong', or no +: '{header}'")
    tests = [test_id(stage, test) for test in fields.pop("caught by", [])]
    texts = [("\n".join(old), "\n".join(new)) for old, new in pairs]
    task = int(head[1]) if head[1] else None
    return Edit(f"{stage}/{file}", task, head[2], head[3], tests, texts, fields)
