"""Wrong solutions: what students might hand in, and the tests must reject.

A stage's `wrong.txt` holds at least four for each of its tasks, separated by empty lines:

    task 1: capacity off by one
    - self.length + count > self.capacity
    + self.length + count >= self.capacity

Text after "- " occurs once in the task's functions of the reference, with its indentation if it
spans lines; text after "+ " replaces it. There may be several such edits. Without "- ", the text is
a body for the task's functions. `python -m shared.course.exercise prove` runs them.

A stage's `right.txt` holds, in the same form, unusual solutions that are right: grading must give
them all points.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from .. import paths
from ..task import Task
from . import mine

LEAST = 4  # a task
DESIGN = 3  # lines


@dataclass(frozen=True)
class Wrong:
    """A wrong solution. edits: (old, new) texts; an `old` of "" stands for the whole body."""

    task: Task
    name: str
    edits: tuple[tuple[str, str], ...]


def text(stage: str, file: str = "wrong.txt") -> str:
    """What a stage's `wrong.txt` or `right.txt` holds."""
    path = paths.ROOT / stage / file
    return mine.read(path).replace("\r\n", "\n") if path.is_file() else ""


def read(stage: str, file: str = "wrong.txt") -> list[Wrong]:
    """The solutions in a file of a stage, in order. Raises ValueError for a malformed file."""
    solutions = []
    for entry in filter(None, re.split(r"\n{2,}", text(stage, file).strip("\n"))):
        title, *lines = entry.split("\n")
        match = re.fullmatch(r"task (\d+): (.+)", title)
        if not match or not lines or any(line[:2] not in ("- ", "+ ") for line in lines):
            raise ValueError(f"{stage}/{file}: this is not a solution: {title}")
        texts = [(sign, list(part)) for sign, part in groupby(lines, key=lambda line: line[0])]
        sides = ["\n".join(line[2:] for line in part) for _, part in texts]
        if texts[0][0] == "+":
            sides.insert(0, "")
        if len(sides) % 2:
            raise ValueError(f"{stage}/{file}: {title}: each - needs its +")
        task = next((t for t in mine.tasks(stage) if t.number == int(match[1])), None)
        if task is None:
            raise ValueError(f"{stage}/{file}: there is no such task: {title}")
        solutions.append(Wrong(task, match[2], tuple(zip(sides[::2], sides[1::2], strict=True))))
    return solutions


def applied(source: str, stage: str, wrong: Wrong) -> str:
    """`source` with a wrong solution in place of the task's functions.

    Raises LookupError if an edit does not fit, or reaches beyond the functions.
    """
    for old, new in wrong.edits:
        if not old:
            source = mine.emptied(source, stage, wrong.task, new.split("\n"))
            continue
        places = []
        for start, end in _spans(source, wrong.task):
            inside = [match.start() for match in re.finditer(re.escape(old), source[start:end])]
            places += [start + place for place in inside]
        if len(places) != 1:
            raise LookupError(f"{old!r} occurs {len(places)} times in the task's functions")
        source = source[: places[0]] + new + source[places[0] + len(old) :]
    mine.parse(source)
    return source


def _spans(source: str, task: Task) -> Iterator[tuple[int, int]]:
    """Where the task's functions begin and end in the source."""
    ends = [0, *(match.end() for match in re.finditer("\n|\\Z", source))]  # of the lines
    for name in task.functions:
        node = mine.find_function(mine.parse(source), name)
        if node is None:
            raise LookupError(f"there is no {name}")
        yield ends[node.lineno - 1], ends[node.end_lineno or 0]


def designs(stage: str, file: str = "wrong.txt") -> list[Wrong]:
    """The solutions in a file that are no mere edits: those with at least DESIGN lines that neither
    the reference nor another one of them has."""
    chosen: list[Wrong] = []
    known: dict[str, list[Counter[str]]] = {}
    for solution in read(stage, file):
        reference = mine.read(paths.ROOT / stage / solution.task.file)
        lines = _lines(applied(reference, stage, solution))
        others = known.setdefault(solution.task.file, [_lines(reference)])
        if all((lines - other).total() >= DESIGN for other in others):
            chosen.append(solution)
            others.append(lines)
    return chosen


def _lines(source: str) -> Counter[str]:
    return Counter(filter(None, map(str.strip, source.splitlines())))


def check(stage: str) -> Iterator[str]:
    """The problems of a stage's wrong solutions, found without running them."""
    try:
        solutions = read(stage)
    except ValueError as error:
        yield str(error)
        return
    for task in mine.tasks(stage):
        name, of_task = mine.label(stage, task), [s for s in solutions if s.task == task]
        reference = mine.read(paths.ROOT / stage / task.file)
        seen = {reference}
        if len(of_task) < LEAST:
            yield f"{name} has {len(of_task)} wrong solutions in wrong.txt: it needs {LEAST}"
        for wrong in of_task:
            try:
                source = applied(reference, stage, wrong)
            except (LookupError, SyntaxError) as error:
                yield f"{name}, {wrong.name}: {error}"
                continue
            if source in seen:
                yield f"{name}, {wrong.name}: it is the reference, or equals another wrong one"
            seen.add(source)
