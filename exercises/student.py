"""The student's side: start a task on a branch of one's own, check it, ask for hints.

Git is backup, reset and hand-in. What it does not know (which task is open, which checks passed)
is in a file beside its own, .git/exercises.json.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from shared import paths
from shared.errors import UserError

from . import running, splice, tasks
from .tasks import Task

SECONDS = 300.0  # for the tests of one task
SHOWN = 12  # failures


def git(*words: str, root: Path | None = None) -> str:
    """What a git command prints. Raises UserError if it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root or paths.ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError("The exercises need git, which is not installed: install it.") from None
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
        raise UserError(f"git {words[0]} failed: {why}")
    return done.stdout


class State:
    """What is remembered between two commands; `save` writes it."""

    def __init__(self) -> None:
        try:
            place = git("rev-parse", "--git-path", "exercises.json").strip()
        except UserError:
            raise UserError(
                "The exercises keep your work in git, and this folder is no git repository: work "
                "in a clone of it, or run `git init -b main && git add . && git commit -m start`."
            ) from None
        self.path = paths.ROOT / place
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else "{}"
        data = json.loads(text)
        self.base: str = data.get("base", "")  # the commit before the first task
        self.task: list[Any] = data.get("task", [])  # the open one: stage, number
        self.results: dict[str, dict[str, Any]] = data.get("results", {})
        self.hints: dict[str, int] = data.get("hints", {})
        self.planted: dict[str, Any] = data.get("planted", {})

    def save(self) -> None:
        names = ("base", "task", "results", "hints", "planted")
        data = {name: getattr(self, name) for name in names}
        self.path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(file: str) -> str:
    """A file of the working tree."""
    try:
        return (paths.ROOT / file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): `git restore {file}` restores it."
        ) from None


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


def start(stage: str, number: int) -> None:
    """Empty the functions of one task in the working tree."""
    task, state = tasks.find(stage, number), State()
    if state.planted:
        raise UserError("A bug of the museum is planted: `python -m exercises museum clear` first.")
    need_clean(task.file, "an emptied task")
    message = f"{task.name} is not written yet"
    try:
        source = splice.emptied(task.file, read(task.file), task.functions, message)
    except splice.Refused as error:
        raise UserError(f"{task.file}: {error}. `git log -- {task.file}` has older ones.") from None
    state.base = state.base or git("rev-parse", "HEAD").strip()
    state.task = [stage, number]
    state.results.pop(task.name, None)
    (paths.ROOT / task.file).write_text(source, encoding="utf-8")
    state.results[task.name] = {"passed": None, "digest": _digest(task)}
    state.save()
    show(task)
    print(f"\nEmpty now, in {task.file}: {', '.join(task.functions)}. Write them, then run")
    print("    python -m exercises check")
    print("`python -m exercises hint` asks a question that helps. Keep what passes with git:")
    print(f"    git commit -am '{task.name}'")


def show(task: Task) -> None:
    print(f"{task.name}: {task.title} ({task.points} points)\n")
    for paragraph in task.text.split("\n\n"):
        fenced = paragraph.lstrip().startswith(("```", "|", "- "))
        print(paragraph if fenced else textwrap.fill(" ".join(paragraph.split()), 100))


def chosen(stage: str | None, number: int | None) -> Task:
    """The task that is named, or the one that was started last."""
    if stage is not None and number is not None:
        return tasks.find(tasks.find_stage(stage), number)
    if stage is not None:
        raise UserError(
            "Name the stage and the task, 'stage04 2', or neither: then it is the last."
        )
    state = State()
    if not state.task:
        raise UserError("No task is started: see `python -m exercises list`, then start one.")
    return tasks.find(*state.task)


def check(task: Task) -> int:
    """Run a task's tests on the working tree, and say of each that fails how."""
    missing = [f for f in task.functions if splice.segment(task.file, read(task.file), f) is None]
    if missing:
        raise UserError(f"{task.file} has no {missing[0]}: its name must stay, or tests miss it.")
    run = running.here({"tests": task.tests}, paths.ROOT, SECONDS)
    passed = not (run.ended or run.failures) and bool(run.outcomes) and run.status == 0
    print(f"{task.name}: {task.title}")
    for test, why in run.failures[:SHOWN]:
        print(f"  {test.rpartition('::')[2]}: {why}")
    if len(run.failures) > SHOWN:
        print(f"  and {len(run.failures) - SHOWN} more")
    if run.ended:
        print(f"  {run.ended}")
    count = len(run.outcomes) - len(run.failures)
    print(f"{count} of {len(run.outcomes)} pass, in {run.seconds:.1f} s. ", end="")
    if passed:
        print(f"Grading runs all tests of the stage: python -m pytest {task.stage}")
    else:
        file = task.tests[0].partition("::")[0]
        print(f"In full: python -m pytest {file}")
    try:
        state = State()
    except UserError:
        return 0 if passed else 1  # without git nothing is remembered
    for note in _left_behind(task, state.base):
        print(f"Note: {task.file}, {note}")
    state.results[task.name] = {"passed": passed, "digest": _digest(task)}
    state.save()
    return 0 if passed else 1


def _left_behind(task: Task, base: str) -> list[str]:
    """What grading will not take of the student's file."""
    if not base:
        return []
    others = {f for t in tasks.read(task.stage) if t.file == task.file for f in t.functions}
    try:
        reference = git("show", f"{base}:{task.file}")
        return splice.splice(
            task.file, reference, read(task.file), task.functions, others - {*task.functions}
        ).notes
    except splice.Refused as error:
        return [f"{error}: grading refuses it"]
    except UserError:  # the commit is gone
        return []


def _digest(task: Task) -> str:
    return hashlib.sha256(read(task.file).encode()).hexdigest()


def hint(task: Task) -> None:
    """Show one more hint than the last time."""
    state = State()
    count = min(state.hints.get(task.name, 0) + 1, len(task.hints))
    state.hints[task.name] = count
    state.save()
    show(task)
    for number, text in enumerate(task.hints[:count], 1):
        words = " ".join(text.split())
        print("\n" + textwrap.fill(f"Hint {number} of {len(task.hints)}: {words}", 100))


def standing(task: Task, state: State) -> str:
    """ "passed", "passed before your last edit", "not passed", "started", or ""."""
    result = state.results.get(task.name)
    if result is None:
        return ""
    edited = result["digest"] != _digest(task)
    if result["passed"]:
        return "passed before your last edit" if edited else "passed"
    return "started" if result["passed"] is None else "not passed"


def status() -> None:
    """Where the student stands, in all stages that have been begun."""
    state, points = State(), 0
    begun = [s for s in tasks.stages() if any(t.name in state.results for t in tasks.read(s))]
    for stage in begun:
        for task in tasks.read(stage):
            word = standing(task, state)
            points += task.points * (word == "passed")
            print(f"{task.name}  {task.points:3} points  {word or 'not started':28}  {task.title}")
    if not begun:
        print("No task is started: see `python -m exercises list`.")
        return
    print(
        f"{points} points by your own checks. To hand in: git diff {state.base[:12]} > mine.patch"
    )


def listed(stage: str | None) -> None:
    """The tasks of one stage, or the stages with tasks."""
    for name in [tasks.find_stage(stage)] if stage else tasks.stages():
        known = tasks.read(name)
        if not known:
            raise UserError(f"{name} has no tasks.")
        print(f"{name}: {sum(task.points for task in known)} points")
        for task in known:
            print(f"  {task.number}  {task.points:3} points  {task.title} ({Path(task.file).name})")
