"""The student's side: start a task on a branch of one's own, check it, ask for hints.

Git is backup, reset and hand-in. What it does not know (which task is open, which checks passed)
is in a file beside its own, .git/exercises.json.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import textwrap
from typing import Any

from shared import paths
from shared.errors import UserError

from . import running, splice, tasks
from .tasks import Task


def git(*words: str) -> str:
    """What a git command prints. Raises UserError if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=paths.ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("The exercises need git, which is not installed: install it.") from None
    if done.returncode:
        raise UserError(f"git {words[0]} failed: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout


class State(dict[str, Any]):
    """What is remembered between two commands: the open task (stage, number), results and hints by
    task, and what the museum has planted."""

    def __init__(self) -> None:
        try:
            self.path = paths.ROOT / git("rev-parse", "--git-path", "exercises.json").strip()
        except UserError:
            raise UserError(
                "The exercises keep your work in git, and this folder is no git repository: work "
                "in a clone of it, or run `git init -b main && git add . && git commit -m start`."
            ) from None
        super().__init__(task=None, results={}, hints={}, planted=None)
        if self.path.is_file():
            self.update(json.loads(self.path.read_text(encoding="utf-8")))

    def save(self) -> None:
        self.path.write_text(json.dumps(self, indent=1) + "\n", encoding="utf-8")


def need_clean(file: str, what: str) -> None:
    """Raises UserError, with what to do, unless `file` can be changed and nothing of it is lost."""
    branch = git("branch", "--show-current").strip()
    if branch in ("", "main", "master"):
        where = f"on {branch}" if branch else "on no branch"
        raise UserError(f"You are {where}: make a branch of your own first, `git switch -c mine`.")
    if git("status", "--porcelain", "--", file).strip():
        raise UserError(
            f"{file} has changes that are not committed, and {what} would mix with them: keep them "
            f"with `git commit -m 'my work' {file}`, or drop them with `git restore {file}`."
        )


def start(task: Task) -> None:
    """Empty the functions of one task in the working tree."""
    state = State()
    if state["planted"]:
        raise UserError("A bug of the museum is planted: `python -m exercises museum clear` first.")
    need_clean(task.file, "an emptied task")
    try:
        source = emptied(tasks.source(task.file), task)
    except splice.Refused as error:
        raise UserError(f"{task.file}: {error}. `git log -- {task.file}` has older ones.") from None
    (paths.ROOT / task.file).write_text(source, encoding="utf-8")
    state["task"] = [task.stage, task.number]
    state["results"][task.name] = ["started", ""]
    state.save()
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
    if not (last := State()["task"]):
        raise UserError("No task is started: see `python -m exercises list`, then start one.")
    return tasks.find(*last)


def check(task: Task) -> int:
    """Run a task's tests on the working tree, and say of each that fails how."""
    state, notes = State(), []
    try:
        reference = git("show", f"main:{task.file}")
        source = tasks.source(task.file)
        notes = splice.splice(reference, source, task.functions, task.others())[1]
    except splice.Refused as error:
        notes = [f"{error}: grading refuses it"]
    except UserError:
        pass  # this repository has no branch main
    print(f"{task.name}: {task.title}", flush=True)
    run = running.here(task.tests)
    for note in notes:
        print(f"Note: {task.file}, {note}")
    count = len(run.outcomes)
    print(f"{count - len(run.failures)} of {count} pass, in {run.seconds:.1f} s. ", end="")
    if run.passed:
        print(f"Grading runs all tests of the stage: python -m pytest {task.stage}")
    else:
        print(f"In full: python -m pytest {task.tests[0].partition('::')[0]}")
    state["results"][task.name] = ["passed" if run.passed else "not passed", _digest(task)]
    state.save()
    return 0 if run.passed else 1


def _digest(task: Task) -> str:
    return hashlib.sha256(tasks.source(task.file).encode()).hexdigest()


def hint(task: Task) -> None:
    """Show one more hint than the last time."""
    state = State()
    count = min(state["hints"].get(task.name, 0) + 1, len(task.hints))
    state["hints"][task.name] = count
    state.save()
    show(task)
    for number, text in enumerate(task.hints[:count], 1):
        print("\n" + textwrap.fill(f"Hint {number} of {len(task.hints)}: {text}", 100))


def status() -> None:
    """Where the student stands, in all tasks that have been started."""
    results, points = State()["results"], 0
    for task in (task for stage in paths.discover() for task in tasks.read(stage)):
        word, digest = results.get(task.name, ("", ""))
        if word == "passed" and digest != _digest(task):
            word = "passed before your last edit"
        points += task.points * (word == "passed")
        if word:
            print(f"{task.name}  {task.points:3} points  {word:28}  {task.title}")
    print(f"{points} points by your own checks. To hand in: git diff main > mine.patch")


def listed(stage: str | None) -> None:
    """The tasks of one stage, or of all."""
    for name in [tasks.find_stage(stage)] if stage else paths.discover():
        print(name)
        for task in tasks.read(name):
            print(f"  {task.number}  {task.points:3} points  {task.title} ({task.file})")
