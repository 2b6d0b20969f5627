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

    def others(self) -> set[str]:
        """The functions of all tasks of the stage."""
        return {name for task in read(self.stage) for name in task.functions}


def source(file: str) -> str:
    """A file of the project, as it is in the working tree."""
    return (paths.ROOT / file).read_text(encoding="utf-8")


def find_stage(text: str) -> str:
    """The stage that is called "stage04_continuous", "stage04", "04" or "4"."""
    known = paths.discover()
    for stage in known:
        if text in (stage, stage[:7], stage[5:7], stage[5:7].lstrip("0")):
            return stage
    raise UserError(f"There is no stage '{text[:40]}': choose one of {', '.join(known)}.")


def find(stage: str, number: int) -> Task:
    """Raises UserError if the stage has no such task."""
    known = {task.number: task for task in read(stage)}
    if number not in known:
        raise UserError(f"There is no task {number} in {stage}: it has {[*known]}.")
    return known[number]


def read(stage: str) -> list[Task]:
    """The tasks of a stage, in order."""
    tasks = []
    parts = iter(_TASK.split(source(f"{stage}/EXERCISES.md"))[1:])
    for number, title, toml, rest in zip(parts, parts, parts, parts, strict=True):
        head, section = tomllib.loads(toml), rest.partition("\n## ")[0]
        head["file"] = f"{stage}/{head['file']}"
        head["tests"] = [test_id(stage, test) for test in head["tests"]]
        text = section.partition("<details>")[0].strip()
        hints = [" ".join(hint.split()) for hint in _HINT.findall(section)]
        tasks.append(Task(stage, int(number), title.strip(), text, hints, **head))
    return tasks


def test_id(stage: str, name: str) -> str:
    """The pytest id, from the root, of a test named within its stage's tests/."""
    return name if name.startswith(("stage", "shared/")) else f"{stage}/tests/{name}"
