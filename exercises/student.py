"""The student's side: start a task on a branch of one's own, check it, ask for hints; and the
museum: plant a bug that a real project shipped, and find it by its symptom.

Git is backup, reset and hand-in. What it does not know (which task is open, which checks passed) is
noted in the repository's own configuration, under `exercises`.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared import paths
from shared.errors import UserError

from . import running, tasks
from .tasks import Edit, Task

MUSEUM = ("list", "plant", "hint", "check", "reveal", "clear")
WIDTH = 100  # columns


def git(*words: str) -> str:
    """What a git command prints. Raises UserError if it fails."""
    done = subprocess.run(["git", *words], cwd=paths.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{done.stderr.strip()}: the exercises need a clone of the project in git.")
    return done.stdout.strip()


def note(key: str, *value: str) -> str:
    """Note a value for the next commands; without one, return the last; "" if there is none."""
    words = () if value else ("--default", "", "--get")
    return git("config", "--local", *words, f"exercises.{key}", *value)


def need_clean(file: str, what: str) -> None:
    """Raises UserError, with what to do, unless `file` can be changed and nothing of it is lost."""
    if git("branch", "--show-current") in ("", "main", "master"):
        raise UserError("Make a branch of your own first: `git switch -c mine`.")
    if git("status", "--porcelain", "--", file):
        way_out = f"`git commit -m 'my work' {file}` keeps them, `git restore {file}` drops them."
        raise UserError(f"{file} has changes that are not committed, beside {what}: {way_out}")


def chosen(words: Sequence[str]) -> Task:
    """The task that is named, stage and number, or the one that was started last."""
    words = words or note("task").split()
    if len(words) != 2:
        raise UserError("Name stage and task, 'stage04 2': see `python -m exercises list`.")
    return tasks.find(*words)


def list_(stages: list[str]) -> None:
    """List the tasks."""
    for stage in tasks.stages(stages):
        print(stage)
        for task in tasks.read(stage):
            print(f"  {task.number}  {task.points:3} points  {task.title} ({task.file})")


def start(words: list[str]) -> None:
    """Empty the functions of one task in the working tree, on your own branch."""
    task = chosen(words)
    need_clean(task.file, "an emptied task")
    (paths.ROOT / task.file).write_text(task.emptied(tasks.source(task.file)), "utf-8")
    note("task", f"{task.stage} {task.number}")
    note(f"{task.name}.result", "started")
    print(f"{task}\n\nEmpty now, in {task.file}: {', '.join(task.functions)}. Write them, then run")
    print("    python -m exercises check")
    print("`python -m exercises hint` asks a question that helps. Keep what passes with git:")
    print(f"    git commit -am '{task.name}'")


def check(words: list[str]) -> int:
    """Run a task's tests on the working tree, and say of each that fails how."""
    task = chosen(words)
    print(f"{task.name}: {task.title}", flush=True)
    run, source = running.here(task.tests), tasks.source(task.file)
    try:
        notes = task.taken(source, git("show", f"main:{task.file}"))[1]
    except (UserError, RecursionError) as error:  # grading would refuse it; or no branch main
        notes = [str(error)]
    for text in notes:
        print(f"Note: {task.file}, {text}")
    count = len(run.outcomes)
    print(f"{count - len(run.failures)} of {count} pass, in {run.seconds:.1f} s. ", end="")
    if run.passed:
        print(f"Grading runs all tests of the stage: python -m pytest {task.stage}")
    else:
        print(f"In full: python -m pytest {task.tests[0].partition('::')[0]}")
    note(f"{task.name}.result", f"passed: {_digest(task)}" if run.passed else "not passed")
    return 0 if run.passed else 1


def _digest(task: Task) -> str:
    return hashlib.sha256(tasks.source(task.file).encode()).hexdigest()


def hint(words: list[str]) -> None:
    """Show a task, and one more hint each time."""
    task = chosen(words)
    count = min(int(note(f"{task.name}.hints") or 0) + 1, len(task.hints))
    note(f"{task.name}.hints", str(count))
    print(task)
    for number, text in enumerate(task.hints[:count], 1):
        print("\n" + textwrap.fill(f"Hint {number} of {len(task.hints)}: {text}", WIDTH))


def status() -> None:
    """Which tasks have passed, of all that have been started."""
    points = 0
    for task in (task for stage in tasks.stages() for task in tasks.read(stage)):
        result, _, digest = note(f"{task.name}.result").partition(": ")
        if digest and digest != _digest(task):
            result = "passed before your last edit"
        points += task.points * (result == "passed")
        if result:
            print(f"{task.name}  {task.points:3} points  {result:28}  {task.title}")
    print(f"{points} points by your own checks. To hand in: git diff main > mine.patch")


def museum(action: str, number: int | None) -> int:
    """Find bugs that were real."""
    known = dict(enumerate(tasks.exhibits(), 1))
    planted, _, commit = note("planted").partition(" ")
    exhibit = known.get(int(planted or 0))
    if action == "list":
        for place, edit in known.items():
            print(f"{place:3}  {edit.file[:7]}  {edit.fields['title'][0]}")
    elif action == "plant":
        if exhibit:
            raise UserError(f"Exhibit {planted} is planted: `python -m exercises museum clear`.")
        if number not in known:
            raise UserError(f"Which exhibit, 1 to {len(known)}? `museum list` shows them.")
        plant(known[number], number)
    elif not exhibit:
        raise UserError("No bug is planted: `python -m exercises museum plant 1` plants the first.")
    elif action == "hint":
        print(textwrap.fill(exhibit.fields["hint"][0], WIDTH))
    elif action == "reveal":
        print(textwrap.fill(f"{exhibit.file}: {exhibit.what}", WIDTH) + "\n")
        for old, new in exhibit.replacements:
            print(textwrap.indent(old, "- ") + "\n" + textwrap.indent(new, "+ ") + "\n")
        print(textwrap.fill(" ".join(exhibit.fields[">"]), WIDTH))
        print(f"\nSeen in: {exhibit.fields['seen'][0]}\nCaught by: {', '.join(exhibit.tests)}")
    elif action == "clear":
        git("restore", f"--source={commit}", "--", exhibit.file)
        note("planted", "")
        print(f"{exhibit.file} is as it was before the bug.")
    else:
        passed = running.here(exhibit.tests).passed
        tell = "Mended: the tests that this bug failed pass. `museum reveal` tells its story."
        print(tell if passed else "Not yet: the bug is still there, or there is another one.")
        return 0 if passed else 1
    return 0


def plant(exhibit: Edit, number: int) -> None:
    """Make the edit in the working tree, and show what it does, beside what was there."""
    need_clean(exhibit.file, "a planted bug")
    try:
        planted = exhibit.applied(tasks.source(exhibit.file))
    except UserError:
        way_out = "plant it on a branch without your work, `git switch -c museum main`."
        raise UserError(f"This bug does not fit your {exhibit.file}: {way_out}") from None
    shows = "\n".join(exhibit.fields["shows"])
    print(f"Exhibit {number}: {exhibit.fields['title'][0]}\n\n{textwrap.indent(shows, '    ')}\n")
    print("running it before and after: this loads the stage twice", flush=True)
    before = symptom(shows)
    note("planted", f"{number} {git('rev-parse', 'HEAD')}")
    (paths.ROOT / exhibit.file).write_text(planted, "utf-8")
    table = Table("before", "with the bug")
    table.add_row(Text(before), Text(symptom(shows)))
    Console().print(table)
    print(f"\nThe bug is in {exhibit.file.partition('/')[0]}/; git would show it: do not look.")
    print("Mend it, and then: python -m exercises museum check. There are hint, reveal and clear.")


def symptom(shows: str) -> str:
    """What a command or a program prints, and how it ended, if not well."""
    words = shlex.split(shows)[1:] if shows.startswith("python ") else ["-c", shows]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, *words], cwd=paths.ROOT, text=True, **pipes)
    return done.stdout.strip() + (f"\n[exit status {done.returncode}]" if done.returncode else "")
