"""Proof that the tasks of a stage are good ones: for authors of tasks, and for CI.

- Each task names existing functions and tests; no function and no test belongs to two tasks.
- An empty task fails each of its tests, with its own message, and no test of any other task.
- Each of its wrong solutions (see wrong.py) fails at least one of its tests, and no other task's.
- The reference, as a copy, passes them all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from .. import paths
from ..task import Task
from . import links, mine, wrong
from .museum import trials

LONGEST_LINE = 100
LONGEST_TASK, LONGEST_RUN = 120.0, 3600.0  # seconds with wrong solutions; for all tasks
Copies = Mapping[str, str]  # source by path, "stage02_kv_cache/cache.py"
Job = tuple[str, tuple[wrong.Wrong, ...], dict[str, Any]]  # stage, wrong solutions, what to run
Outcomes = Mapping[str, str]  # errors by pytest id; "" for success


def check(stage: str) -> Iterator[str]:
    """The problems of a stage's tasks as they are written, found without running anything."""
    tasks = mine.tasks(stage)
    if [task.number for task in tasks] != list(range(1, len(tasks) + 1)):
        yield f"{stage}: tasks are not numbered from 1 on"
    owned = Counter(f"{task.file} {name}" for task in tasks for name in task.functions)
    owned.update(test for task in tasks for test in task.tests)
    yield from (
        f"{stage}: {name} belongs to two tasks" for name in sorted(owned) if owned[name] > 1
    )
    for task in tasks:
        name = mine.label(stage, task)
        if not (task.points > 0 and task.text and task.hints and task.tests and task.functions):
            yield f"{name}: it needs functions, text, points, hints and tests"
        try:
            source = mine.emptied(mine.read(paths.ROOT / stage / task.file), stage, task)
        except (OSError, LookupError) as error:
            yield f"{name}: {task.file}: {error}"
            continue
        stub = re.search(rf'^ *"{name}: .*"$', source, re.MULTILINE)
        if stub and len(stub[0]) > LONGEST_LINE:
            yield f"{name}: its title is too long for a line of {LONGEST_LINE} characters"
        absent = [test for test in task.tests if not links.is_test(f"{stage}/{test}")]
        yield from (f"{name}: there is no test {test}" for test in absent)
    yield from wrong.check(stage)


def prove(chosen: Sequence[str]) -> Iterator[str]:
    """The problems of the tasks of some stages, found by running their tests. Takes minutes."""
    most = max(len(mine.tasks(stage)) for stage in chosen)
    jobs = [job for stage in chosen for job in wrong_jobs(stage)]
    with tqdm(total=1 + most + len(jobs), unit="run", disable=None) as bar:
        yield from failures(run(chosen, copies(chosen, None)), "the reference")
        bar.update()
        for number in range(1, most + 1):
            yield from judge_empty(run(chosen, copies(chosen, number)), number)
            bar.update()
        for problem in judge_wrong(jobs):
            yield from problem
            bar.update()


def copies(chosen: Sequence[str], number: int | None) -> Copies:
    """Copies of some stages with everything written but the task of this number, if any."""
    names = [f"{stage}/{file}" for stage in chosen for file in mine.files(stage)]
    copied = {name: mine.read(paths.ROOT / name) for name in names}
    for stage in chosen:
        for task in [task for task in mine.tasks(stage) if task.number == number]:
            name = f"{stage}/{task.file}"
            copied[name] = mine.emptied(copied[name], stage, task)
    return copied


def wrong_jobs(stage: str, most: int | None = None) -> Iterator[Job]:
    """For each wrong solution, at most `most` per task, its task's tests; and in two more jobs, for
    the first wrong solutions of every second task, the tests of all tasks. Each task is judged
    beside the reference's others."""
    solutions = wrong.read(stage)
    firsts = []
    for task in mine.tasks(stage):
        of_task = [solution for solution in solutions if solution.task == task]
        yield from (_job(stage, [solution], task.tests, "-x") for solution in of_task[:most])
        firsts += of_task[:1]
    tests = [test for task in mine.tasks(stage) for test in task.tests]
    yield _job(stage, firsts[::2], tests)
    yield _job(stage, firsts[1::2], tests)


def _job(stage: str, crowd: Sequence[wrong.Wrong], tests: Sequence[str], *options: str) -> Job:
    files: dict[str, str] = {}
    for solution in crowd:
        file = solution.task.file
        source = files.get(file) or mine.read(paths.ROOT / stage / file)
        files[file] = wrong.applied(source, stage, solution)
    job = trials.job(stage, files, tests) | {"options": ["--alone", *options], "brief": True}
    return stage, tuple(crowd), job


def judge_wrong(jobs: Sequence[Job]) -> Iterator[list[str]]:
    """For each job, its problems: a wrong solution must fail its own task, and no other."""
    results = trials.each([job for *_, job in jobs], LONGEST_TASK)
    for (stage, crowd, _), errors in zip(jobs, results, strict=True):
        problems = []
        failed = [name.partition("/")[2] for name, error in errors.items() if error]
        for task in mine.tasks(stage):
            of_task = [solution for solution in crowd if solution.task == task]
            fails = any(task.judged_by(test) for test in failed)
            if of_task and not fails and "" not in errors:
                name = mine.label(stage, task)
                problems.append(f"{name} passes with a wrong solution: {of_task[0].name}")
            if fails and not of_task:
                names = ", ".join(f"{solution.task.number} ({solution.name})" for solution in crowd)
                problems.append(f"{mine.label(stage, task)} fails because of tasks {names}")
        yield problems


def run(chosen: Sequence[str], copied: Copies, most: int | None = None) -> Outcomes:
    """Run the tests of all tasks of some stages against copies of them. most: of each task so many
    at most, and their cases up to the first that fails.

    Raises RuntimeError if pytest itself fails.
    """
    listed = [(stage, task) for stage in chosen for task in mine.tasks(stage)]
    tests = [f"{stage}/{test}" for stage, task in listed for test in task.tests[:most]]
    job = {"files": dict(copied), "tests": tests, "brief": most is not None}
    (errors,) = trials.outcomes([job], LONGEST_RUN)
    return {test: error.removeprefix(trials.SKIPPED) for test, error in errors.items()}


def failures(outcomes: Outcomes, whose: str) -> Iterator[str]:
    """Every test that failed."""
    for test, error in outcomes.items():
        if error:
            yield f"{test} fails with {whose}: {error[-200:]}"


def judge_empty(outcomes: Outcomes, number: int | None, most: int | None = None) -> Iterator[str]:
    """The problems where the task of this number in each stage, or each task, was empty; `most` as
    for `run`."""
    for stage in sorted({test.partition("/")[0] for test in outcomes}):
        for task in mine.tasks(stage):
            empty = number in (None, task.number)
            for test in task.tests[:most]:
                errors = _of(outcomes, f"{stage}/{test}")
                name = f"{mine.label(stage, task)}: {test}"
                if not errors:
                    yield f"{name} was not run"
                elif empty and not any(errors):
                    yield f"{name} passes though the task is empty"
                for error in filter(None, errors):
                    if not empty:
                        yield f"{name} fails because task {number} is empty: {error[-200:]}"
                    elif mine.message(stage, task) not in error:
                        yield f"{name} fails with another message than the task's: {error[-200:]}"


def _of(outcomes: Outcomes, test: str) -> list[str]:
    """The errors of one test, an entry for each of its parameters."""
    wanted = Task(0, "", (), "", "", 0, (), (test,))
    return [error for name, error in outcomes.items() if wanted.judged_by(name)]
