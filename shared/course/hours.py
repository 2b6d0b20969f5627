"""The hours of the course, computed from its files: reading, and the tasks.

`python -m shared.course.lessons --write` puts them into the texts.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .. import paths
from ..task import Task
from . import mine

WORDS, LINES = 150, 12  # read in a minute
LAB = 10  # minutes
READING = 5  # a stage's minutes are rounded to a multiple of this, a page's to one
START, LINE = 30, 3  # minutes to read a task and its tests, and for a line of the reference
FRONT, TABLE = "README.md", "shared/course/instructors/outcomes.md"
ROW = re.compile(r"^(\| (?:\[\d\d\]\(\w+/\)|00|end) \| )(.*)( \| )(\d+)( \|)$", re.MULTILINE)
TARGET = re.compile(r"\]\(([^)]+)\)")
PLACE = re.compile(r"^<!-- hours -->$.*?^<!-- /hours -->$", re.MULTILINE | re.DOTALL)


def reading(path: Path) -> float:
    """Minutes to read a file."""
    if path.suffix == ".ipynb":
        return LAB
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return len(text.split()) / WORDS
    return sum(map(bool, map(str.strip, text.splitlines()))) / LINES


def of_task(stage: str, task: Task) -> float:
    """Hours for a task, in quarters."""
    tree = ast.parse(mine.read(paths.ROOT / stage / task.file))
    lines = 0
    for name in task.functions:
        node = mine.find_function(tree, name)
        if node is not None:
            body = node.body[ast.get_docstring(node) is not None :]
            lines += (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
    return max(1, round((START + LINE * lines) / 15)) / 4


def of_stages() -> dict[str, list[float]]:
    """The hours of the tasks of each stage that has some."""
    known = filter(mine.tasks, paths.discover())
    return {stage: [of_task(stage, task) for task in mine.tasks(stage)] for stage in known}


def front(text: str) -> str:
    """The front page with the minutes of its reading path, and the totals below it."""
    total = 0

    def row(match: re.Match[str]) -> str:
        nonlocal total
        exact = sum(reading(paths.ROOT / target) for target in TARGET.findall(match[2]))
        step = READING if exact > 4 * READING else 1
        minutes = step * round(exact / step)
        total += minutes
        return f"{match[1]}{match[2]}{match[3]}{minutes}{match[5]}"

    text = ROW.sub(row, text)
    tasks, stages = sum(map(sum, of_stages().values())), len(paths.discover())
    words = (
        f"In all: {total / 60:.0f} hours of reading and {tasks:.0f} hours of tasks, or "
        f"{(total / 60 + tasks) / stages:.0f} hours a stage."
    )
    return _put(text, words)


def table(text: str) -> str:
    """The instructors' page with the table of hours."""
    rows = ["| stage | task | hours |", "|---|---|--:|"]
    for stage, hours in of_stages().items():
        for task, task_hours in zip(mine.tasks(stage), hours, strict=True):
            rows.append(f"| {stage[5:7]} | {task.number}, {task.title} | {task_hours:g} |")
        rows.append(f"| {stage[5:7]} | all | {sum(hours):g} |")
    return _put(text, "\n".join(rows))


def _put(text: str, words: str) -> str:
    return PLACE.sub(lambda _: f"<!-- hours -->\n\n{words}\n\n<!-- /hours -->", text, count=1)


def written() -> dict[Path, str]:
    """The right text of each page that has a place for hours, by its path."""
    pages = {}
    for name, make in ((FRONT, front), (TABLE, table)):
        path = paths.ROOT / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if PLACE.search(text):
            pages[path] = make(text)
    return pages
