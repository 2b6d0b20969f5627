"""The tasks of a stage, as its EXERCISES.md states them.

A task is a section `## Task 2: what a step writes and sees` with a TOML head in a fence: points,
file (within the stage), functions (qualified names), tests (within the stage's tests/). Its text
follows, then its hints, each in <details>.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared import paths
from shared.errors import UserError

NAME = "EXERCISES.md"
_TASK = re.compile(r"^## Task (\d+): (.+)\n", re.M)
_HEAD = re.compile(r"\s*```toml\n(.*?)^```\n", re.M | re.S)
_HINT = re.compile(r"<details>\s*<summary>.*?</summary>(.*?)</details>", re.S)
_FIELDS = {"points": int, "file": str, "functions": list, "tests": list}


@dataclass(frozen=True)
class Task:
    """One task of a stage.

    file: with its stage, "stage04_continuous/plan.py". functions: qualified names in it.
    tests: pytest ids from the repository's root; `check` runs them first, and the whole suite of
        the stage judges.
    """

    stage: str
    number: int
    title: str
    points: int
    file: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]
    text: str
    hints: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in messages and commands: "stage04 task 2"."""
        return f"{self.stage[:7]} task {self.number}"


def find_stage(text: str) -> str:
    """The stage that is called "stage04_continuous", "stage04", "04" or "4"."""
    known = paths.discover()
    word = text.strip().rstrip("/\\")
    for stage in known:
        if word in (stage, stage[:7]) or (word.isdecimal() and word.zfill(2) == stage[5:7]):
            return stage
    raise UserError(f"There is no stage '{text[:40]}': choose one of {', '.join(known)}.")


def find(stage: str, number: int) -> Task:
    """Raises UserError if the stage has no such task."""
    known = read(stage)
    for task in known:
        if task.number == number:
            return task
    numbers = ", ".join(str(task.number) for task in known) or "none"
    raise UserError(f"There is no task {number} in {stage}: it has {numbers}.")


def stages() -> list[str]:
    """The stages that have tasks, in reading order."""
    return [stage for stage in paths.discover() if (paths.ROOT / stage / NAME).is_file()]


def read(stage: str, root: Path | None = None) -> list[Task]:
    """The tasks of a stage, in order; none if it has no EXERCISES.md. root: default, this one."""
    path = (root or paths.ROOT) / stage / NAME
    return list(parse(path.read_text(encoding="utf-8"), stage)) if path.is_file() else []


def parse(text: str, stage: str) -> Iterator[Task]:
    """Raises UserError, with the task's number, for a section that is not as README.md says."""
    starts = [*_TASK.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    for match, end in zip(starts, ends, strict=True):
        number, section = int(match[1]), text[match.end() : end]
        where = f"{stage}/{NAME}, task {number}"
        head = _HEAD.match(section)
        if head is None:
            raise UserError(f"{where}: a fence with a TOML head follows the heading.")
        try:
            fields = tomllib.loads(head[1])
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{where}: its head is no TOML ({error}).") from None
        for name, kind in _FIELDS.items():
            if not isinstance(fields.get(name), kind) or not fields[name]:
                raise UserError(f"{where}: its head needs {name}, a non-empty {kind.__name__}.")
        if unknown := fields.keys() - _FIELDS.keys():
            raise UserError(f"{where}: its head has {min(unknown)}, which means nothing.")
        body = section[head.end() :]
        hints = tuple(hint.strip() for hint in _HINT.findall(body))
        yield Task(
            stage,
            number,
            match[2].strip(),
            fields["points"],
            f"{stage}/{fields['file']}",
            tuple(fields["functions"]),
            tuple(test_id(stage, test) for test in fields["tests"]),
            body.partition("<details>")[0].strip(),
            hints,
        )


def test_id(stage: str, name: str) -> str:
    """The pytest id, from the root, of a test named within its stage's tests/."""
    return name if name.startswith(("stage", "shared/")) else f"{stage}/tests/{name}"
