"""The tasks of a stage, as its EXERCISES.md states them.

A task is a section `## Task 2: what a step writes and sees` with a TOML head in a fence: points,
file (within the stage), functions (qualified names), tests (within the stage's tests/). Its text
follows, then its hints, each in <details>.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

from shared import paths
from shared.errors import UserError

NAME = "EXERCISES.md"
_TASK = re.compile(r"^## Task (\d+): (.+)\n\s*```toml\n([^`]*)```\n", re.M)
_HINT = re.compile(r"<details>\s*<summary>.*?</summary>(.*?)</details>", re.S)


@dataclass(frozen=True)
class Task:
    """One task of a stage.

    file: with its stage, "stage04_continuous/plan.py". functions: qualified names in it.
    tests: pytest ids from the repository's root; `check` runs them, and the whole suite of the
        stage judges.
    """

    stage: str
    number: int
    title: str
    points: int
    file: str
    functions: list[str]
    tests: list[str]
    text: str
    hints: list[str]

    @property
    def name(self) -> str:
        """As in messages and commands: "stage04 task 2"."""
        return f"{self.stage[:7]} task {self.number}"

    def others(self) -> set[str]:
        """The functions of other tasks in the same file."""
        known = [task for task in read(self.stage) if task.file == self.file]
        return {name for task in known for name in task.functions} - {*self.functions}


def source(file: str) -> str:
    """A file of the project, as it is in the working tree."""
    return (paths.ROOT / file).read_text(encoding="utf-8")


def find_stage(text: str) -> str:
    """The stage that is called "stage04_continuous", "stage04", "04" or "4"."""
    known = paths.discover()
    for stage in known:
        if text in (stage, stage[:7]) or (text.isdecimal() and text.zfill(2) == stage[5:7]):
            return stage
    raise UserError(f"There is no stage '{text[:40]}': choose one of {', '.join(known)}.")


def find(stage: str, number: int) -> Task:
    """Raises UserError if the stage has no such task."""
    known = {task.number: task for task in read(stage)}
    if number not in known:
        numbers = ", ".join(map(str, known))
        raise UserError(f"There is no task {number} in {stage}: it has {numbers}.")
    return known[number]


def read(stage: str) -> list[Task]:
    """The tasks of a stage, in order."""
    tasks = []
    parts = iter(_TASK.split(source(f"{stage}/{NAME}"))[1:])
    for number, title, head, rest in zip(parts, parts, parts, parts, strict=True):
        fields, text = tomllib.loads(head), rest.partition("\n## ")[0]
        tasks.append(
            Task(
                stage,
                int(number),
                title.strip(),
                fields["points"],
                f"{stage}/{fields['file']}",
                fields["functions"],
                [test_id(stage, test) for test in fields["tests"]],
                text.partition("<details>")[0].strip(),
                [" ".join(hint.split()) for hint in _HINT.findall(text)],
            )
        )
    return tasks


def test_id(stage: str, name: str) -> str:
    """The pytest id, from the root, of a test named within its stage's tests/."""
    return name if name.startswith(("stage", "shared/")) else f"{stage}/tests/{name}"
