"""The student's side: start a task on a branch of one's own, check it, ask for hints.

Git is backup, reset and hand-in. What it does not know (which task is open, which checks passed) is
noted in the repository's own configuration, under `exercises`.
"""

from __future__ import annotations

import hashlib
import subprocess
import textwrap

from shared import paths
from shared.errors import UserError

from . import running, splice, tasks
from .tasks import Task


def git(*words: str) -> str:
    """What a git command prints. Raises UserError if it fails."""
    done = subprocess.run(["git", *words], cwd=paths.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{done.stderr.strip()}: the exercises need a clone of the project in git.")
    return done.stdout.strip()


def recall(key: str) -> str:
    """What `note` has noted, between two commands; "" if nothing."""
    return git("config", "--local", "--default", "", "--get", f"exercises.{key}")


def note(key: str, value: str) -> None:
    git("config", "--local", f"exercises.{key}", value)


def need_clean(file: str, what: str) -> None:
    """Raises UserError, with what to do, unless `file` can be changed and nothing of it is lost."""
    if git("branch", "--show-current") in ("", "main", "master"):
        raise UserError("Make a branch of your own first: `git switch -c mine`.")
    if git("status", "--porcelain", "--", file):
        raise UserError(
            f"{file} has changes that are not committed, and {what} would mix with them: keep them "
            f"with `git commit -m 'my work' {file}`, or drop them with `git restore {file}`."
        )


def start(task: Task) -> None:
    """Empty the functions of one task in the working tree."""
    need_clean(task.file, "an emptied task")
    source = emptied(tasks.source(task.file), task)
    (paths.ROOT / task.file).write_text(source, encoding="utf-8")
    note("task", f"{task.stage} {task.number}")
    note(f"{task.name}.result", "started")
    show(task)
    print(f"\nEmpty now, in {task.file}: {', '.join(task.functions)}. Write them, then run")
    print("    python -m exercises check")
    print("`python -m exercises hint` asks a question that helps. Keep what passes with git:")
    print(f"    git commit -am '{task.name}'")


def emptied(source: str, task: Task) -> str:
    """`source` in which the task's functions keep signature and docstring, and do nothing."""
    for name in task.functions:
        body = f'raise NotImplementedError("{task.name} is not written yet")'
        source = splice.with_body(source, name, body)
    return source


def show(task: Task) -> None:
    print(f"{task.name}: {task.title} ({task.points} points)\n\n{task.text}")


def chosen(stage: str | None, number: int | None) -> Task:
    """The task that is named, or the one that was started last."""
    if stage is not None and number is not None:
        return tasks.find(tasks.find_stage(stage), number)
    if stage is not None:
        raise UserError("Name stage and task, 'stage04 2', or neither: then it is the last.")
    if not (last := recall("task").split()):
        raise UserError("No task is started: see `python -m exercises list`, then start one.")
    return tasks.find(last[0], int(last[1]))


def check(task: Task) -> int:
    """Run a task's tests on the working tree, and say of each that fails how."""
    print(f"{task.name}: {task.title}", flush=True)
    run = running.here(task.tests)
    source = tasks.source(task.file)
    try:
        reference = git("show", f"main:{task.file}")
        notes = splice.splice(reference, source, task.functions, task.others())[1]
    except UserError as error:  # grading would refuse it, or there is no branch main
        notes = [str(error)]
    for text in notes:
        print(f"Note: {task.file}, {text}")
    count = len(run.outcomes)
    print(f"{count - len(run.failures)} of {count} pass, in {run.seconds:.1f} s. ", end="")
    if run.passed:
        print(f"Grading runs all tests of the stage: python -m pytest {task.stage}")
    else:
        print(f"In full: python -m pytest {task.tests[0].partition('::')[0]}")
    note(f"{task.name}.result", f"passed {_digest(task)}" if run.passed else "not passed")
    return 0 if run.passed else 1


def _digest(task: Task) -> str:
    return hashlib.sha256(tasks.source(task.file).encode()).hexdigest()


def hint(task: Task) -> None:
    """Show one more hint than the last time."""
    count = min(int(recall(f"{task.name}.hints") or 0) + 1, len(task.hints))
    note(f"{task.name}.hints", str(count))
    show(task)
    for number, text in enumerate(task.hints[:count], 1):
        print("\n" + textwrap.fill(f"Hint {number} of {len(task.hints)}: {text}", 100))


def status() -> None:
    """Where the student stands, in all tasks that have been started."""
    points = 0
    for task in (task for stage in paths.discover() for task in tasks.read(stage)):
        result = recall(f"{task.name}.result")
        if result.startswith("passed "):
            passed = result == f"passed {_digest(task)}"
            result = "passed" if passed else "passed before your last edit"
        points += task.points * (result == "passed")
        if result:
            print(f"{task.name}  {task.points:3} points  {result:28}  {task.title}")
    print(f"{points} points by your own checks. To hand in: git diff main > mine.patch")


def listed(stage: str | None) -> None:
    """The tasks of one stage, or of all."""
    for name in [tasks.find_stage(stage)] if stage else paths.discover():
        print(name)
        for task in tasks.read(name):
            print(f"  {task.number}  {task.points:3} points  {task.title} ({task.file})")
