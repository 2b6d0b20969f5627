"""The tasks and the edits of a stage, as its EXERCISES.md and edits/stageNN.txt state them.

An edit replaces text of one file; some tests must notice. It is a planted fault, a wrong solution
of a task, and, with a story, an exhibit of the museum. An edit that is `right` changes the shape of
a solution and not what it does: the task's tests must pass. README.md states both formats.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shared import paths
from shared.errors import UserError

from . import splice

_TASK = re.compile(r"^## Task (\d+): (.+)\n\s*```toml\n([^`]*)```\n", re.M)
_HINT = re.compile(r"<details>\s*<summary>.*?</summary>(.*?)</details>", re.S)
_HEADER = re.compile(r"(?:task (\d+))? ?(museum|right|fault|): (.+)")
_PAIR = re.compile(r"((?:^-.*\n)*)((?:^\+.*\n)+)", re.M)
_FIELD = re.compile(r"^(>|[a-z ]+(?=:)):? (.+)", re.M)


@dataclass(frozen=True)
class Task:
    """One task of a stage.

    file: with its stage, "stage04_continuous/plan.py". functions: qualified names in it.
    tests: pytest ids from the repository's root; `check` runs them, and the whole suite of the
        stage judges.
    """

    stage: str
    number: str
    title: str
    text: str
    hints: list[str]
    points: int
    file: str
    functions: list[str]
    tests: list[str]

    @property
    def name(self) -> str:
        """As in messages and commands: "stage04 task 2"."""
        return f"{self.stage[:7]} task {self.number}"

    def __str__(self) -> str:
        return f"{self.name}: {self.title} ({self.points} points)\n\n{self.text}"

    def emptied(self, source: str) -> str:
        """`source` in which the task's functions keep signature and docstring, and do nothing."""
        body = f'raise NotImplementedError("{self.name} is not written yet")'
        if not self.file.endswith(".py"):
            body = f"/* {self.name} is not written yet */"
        for name in self.functions:
            source = splice.with_body(self.file, source, name, body)
        return source

    def taken(self, submitted: str, reference: str) -> tuple[str, list[str]]:
        """The reference with the task's functions of what was handed in, and what was left behind.
        Raises splice.Refused."""
        others = {name for task in read(self.stage) for name in task.functions}
        return splice.splice(self.file, reference, submitted, self.functions, others)


@dataclass(frozen=True)
class Edit:
    """One entry. what: the mistake, or the shape of a right solution. tests: pytest ids, each of
    which must fail, or pass if the edit is right. replacements: (old, new) texts; an `old` of ""
    stands for the body of the task's first function. fields: the lines of each field."""

    file: str
    task: Task | None
    kind: str  # "", "fault", "museum" or "right"
    what: str
    tests: list[str]
    replacements: list[tuple[str, str]]
    fields: dict[str, list[str]]

    def applied(self, source: str) -> str:
        """`source` with this edit. Raises UserError unless a text to replace occurs once."""
        for old, new in self.replacements:
            if not old and self.task:
                source = splice.with_body(self.file, source, self.task.functions[0], new)
            elif source.count(old) == 1:
                source = source.replace(old, new)
            else:
                raise UserError(f"{self.file}: {old!r} occurs {source.count(old)} times.")
        return source


def source(file: str) -> str:
    """A file of the project, as it is in the working tree."""
    return (paths.ROOT / file).read_text(encoding="utf-8")


def stages(words: Sequence[str] = ()) -> list[str]:
    """The stages that are called "stage04_continuous", "stage04", "04" or "4"; by default all."""
    known = paths.discover()
    short = {name: s for s in known for name in (s, s[:7], s[5:7], s[5:7].lstrip("0"))}
    if unknown := [word for word in words if word not in short]:
        raise UserError(f"There is no stage '{unknown[0]}': choose one of {', '.join(known)}.")
    return [short[word] for word in words] or known


def find(stage: str, number: str) -> Task:
    """Raises UserError if there is no such stage, or it has no such task."""
    known = {task.number: task for task in read(*stages([stage]))}
    if number not in known:
        raise UserError(f"There is no task {number} in {stage}: it has {', '.join(known)}.")
    return known[number]


def read(stage: str) -> list[Task]:
    """The tasks of a stage, in order."""
    tasks, text = [], source(f"{stage}/EXERCISES.md")
    for match in _TASK.finditer(text):
        head, section = tomllib.loads(match[3]), text[match.end() :].partition("\n## ")[0]
        head["file"] = f"{stage}/{head['file']}"
        head["tests"] = [_test_id(stage, test) for test in head["tests"]]
        hints = [" ".join(hint.split()) for hint in _HINT.findall(section)]
        about = section.partition("<details>")[0].strip()
        tasks.append(Task(stage, match[1], match[2].strip(), about, hints, **head))
    return tasks


def edits(stage: str) -> list[Edit]:
    """The edits of a stage. Raises UserError for an entry without a header or a replacement."""
    text = re.sub(r"\n {2,}", " ", source(f"exercises/edits/{stage[:7]}.txt"))
    entries, path, known = [], "", {task.number: task for task in read(stage)}
    parts = re.split(r"^(##?) (.*)\n", text + "\n", flags=re.M)[1:]
    for sign, header, lines in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        head, pairs = _HEADER.fullmatch(header), _PAIR.findall(lines)
        if sign == "#":
            path = f"{stage}/{header}"
            continue
        if not head or not pairs:
            what = "no header 'task 2: what is wrong', or no +"
            raise UserError(f"{stage[:7]}.txt: {what}: '{header}'")
        code = [(_code(old), _code(new)) for old, new in pairs]
        fields = defaultdict[str, list[str]](list)
        for key, line in _FIELD.findall(lines):
            fields[key].append(line)
        task, caught = known.get(head[1]), fields.pop("caught by", [])
        tests = [_test_id(stage, test) for test in caught] or (task.tests if task else [])
        entries.append(Edit(path, task, head[2], head[3], tests, code, fields))
    return entries


def _code(block: str) -> str:
    """Lines without their signs."""
    return "\n".join(line[2:] for line in block.splitlines())


def exhibits() -> list[Edit]:
    """The museum, in reading order. Exhibit 1 is the first."""
    return [edit for stage in paths.discover() for edit in edits(stage) if edit.kind == "museum"]


def _test_id(stage: str, name: str) -> str:
    """The pytest id, from the root, of a test named within its stage's tests/."""
    return name if name.startswith(("stage", "shared/")) else f"{stage}/tests/{name}"
