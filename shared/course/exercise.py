"""The exercises: `python -m shared.course.exercise start stage04`, and then `pytest stage04_continuous --mine`.

A stage's tasks are functions of its own code. `start` writes a copy to mine/ in which these are empty and everything else works;
the tests of the stage judge what you write there. Nothing here ever overwrites your work without a backup in mine/backups/.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from .. import cli, paths
from ..errors import UserError
from . import grading, mine, proof
from .museum import planting
from .museum.exhibits import find

WIDTH = 100
EXAMPLES = """  python -m shared.course.exercise start stage04
  python -m pytest stage04_continuous --mine -k task1
  python -m shared.course.exercise hint stage04 1
  python -m shared.course.exercise status
  python -m shared.course.exercise grade stage04 --out results.json"""


def state(stage: str, task: mine.Task) -> str:
    """Where the student stands with a task: "not started", "to write", "written", "passes", "fails" or "no Python: line 3"."""
    path = mine.folder(stage) / task.file
    if not path.is_file():
        return "not started"
    try:
        if mine.is_open(mine.read(path), stage, task):
            return "to write"
    except SyntaxError as error:
        return f"no Python: line {error.lineno or 1}"
    passed = mine.recorded(stage).get(task.number)
    return "written" if passed is None else "passes" if passed else "fails"


def _exhibit_in(stage: str) -> str:
    """A sentence if a bug of the museum is planted in the copy of a stage, and else ""."""
    planted = planting.planted()
    if planted is None or find(planted.number).stage != stage:
        return ""
    return (
        f"Exhibit {planted.number:02} of the museum is planted in your copy of {stage}: `python -m shared.course.museum clear` takes it "
        "out and puts everything back as it was."
    )


def _without_exhibit(stage: str) -> None:
    """Raises UserError if a bug of the museum is planted: nobody should take that file for the student's work."""
    if said := _exhibit_in(stage):
        raise UserError(said)


def start(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    _without_exhibit(stage)
    folder = mine.start(stage)
    print(f"{folder} is yours to write in. Everything works but these:\n")
    _list_tasks(stage)
    print(
        f"\nRead a task with `python -m shared.course.exercise hint {stage[:7]} 1`, write it, and test it with\n"
        f"`python -m pytest {stage} --mine -k task1`; without -k, all of the stage's tests run that can see your copy."
    )


def status(options: argparse.Namespace) -> None:
    if options.stage is not None:
        _list_tasks(mine.find_stage(options.stage))
        return
    print(f"{'stage':20} {'tasks':>5} {'to write':>9} {'written':>8} {'pass':>5} {'points':>10}")
    totals = [0] * 6
    for stage in paths.discover():
        tasks = mine.tasks(stage)
        if not tasks:
            continue
        states = [state(stage, task) for task in tasks]
        written = [each not in ("not started", "to write") for each in states]
        points = sum(
            task.points for task, each in zip(tasks, states, strict=True) if each == "passes"
        )
        row = [
            len(tasks),
            len(tasks) - sum(written),
            sum(written),
            states.count("passes"),
            points,
            sum(t.points for t in tasks),
        ]
        totals = [before + each for before, each in zip(totals, row, strict=True)]
        started = "" if mine.folder(stage).is_dir() else "   not started"
        print(
            f"{stage:20} {row[0]:5} {row[1]:9} {row[2]:8} {row[3]:5} {row[4]:3} of {row[5]:3}{started}"
        )
    print(
        f"{'all':20} {totals[0]:5} {totals[1]:9} {totals[2]:8} {totals[3]:5} {totals[4]:3} of {totals[5]:3}"
    )
    print(
        "\nWhat passes is what passed in the last run of pytest --mine, if the copy is still the same."
    )
    for said in filter(None, map(_exhibit_in, paths.discover())):
        print(textwrap.fill(said, WIDTH))


def _list_tasks(stage: str) -> None:
    for task in mine.tasks(stage):
        where = f"{task.file}: {', '.join(task.functions)}"
        print(
            f"  {task.number}  {state(stage, task):12} {task.points:3} points  {task.title}\n     {where}"
        )


def hint(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    task = mine.find_task(stage, options.task)
    if not 1 <= options.step <= len(task.hints):
        raise UserError(
            f"{mine.label(stage, task)} has {len(task.hints)} hints: --step is from 1 to {len(task.hints)}."
        )
    print(
        f"{mine.label(stage, task)}: {task.title} ({task.points} points)\n{task.file}: {', '.join(task.functions)}\n"
    )
    print(textwrap.fill(task.text, WIDTH) + "\n")
    if errors := mine.errors(stage, task):
        print("Errors, in these words:\n" + "\n".join(f"  {each}" for each in errors) + "\n")
    for number, text in enumerate(task.hints[: options.step], 1):
        print(textwrap.fill(f"Hint {number} of {len(task.hints)}: {text}", WIDTH) + "\n")
    print("Judged by\n" + "\n".join(f"  {stage}/{test}" for test in task.tests))
    if options.step < len(task.hints):
        print(
            f"The next hint: python -m shared.course.exercise hint {stage[:7]} {task.number} --step {options.step + 1}"
        )


def diff(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    folder = mine.folder(stage)
    if not folder.is_dir():
        raise UserError(
            f"There is no copy of {stage} to compare: `python -m shared.course.exercise start {stage[:7]}` makes one."
        )
    names = (
        mine.files(stage) if options.task is None else [mine.find_task(stage, options.task).file]
    )
    same = True
    for name in names:
        path, reference = folder / name, paths.ROOT / stage / name
        own = planting.read(path).splitlines(keepends=True) if path.is_file() else []
        lines = difflib.unified_diff(
            own,
            mine.read(reference).splitlines(keepends=True),
            f"mine/{stage}/{name}",
            f"{stage}/{name}",
        )
        for line in lines:
            same = False
            print(line if line.endswith("\n") else line + "\n", end="")
    if same:
        print(f"Your copy is the reference, word for word: {', '.join(names)}.")


def reset(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    task = None if options.task is None else mine.find_task(stage, options.task)
    what = f"the copy of {stage}" if task is None else mine.label(stage, task)
    if not mine.folder(stage).is_dir():
        raise UserError(
            f"There is no copy of {stage} to reset: `python -m shared.course.exercise start {stage[:7]}` makes one."
        )
    _without_exhibit(stage)
    if not options.yes and not _confirmed(f"Begin again with {what}? A backup is kept. [y/N] "):
        print("Nothing was changed.")
        return
    print(f"{what} is empty again; what was there is in {mine.reset(stage, task)}.")


def _confirmed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("reset asks first, and there is nobody to answer: add --yes.")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def grade(options: argparse.Namespace) -> None:
    out = None if options.out is None else cli.output_file(options.out, ".json")
    junit = None if options.junit is None else cli.output_file(options.junit, ".xml")
    submission = mine.HOME if options.submission is None else Path(options.submission)
    chosen = list(dict.fromkeys(mine.find_stage(each) for each in options.stages))
    if not chosen:
        chosen = [
            stage
            for stage in paths.discover()
            if mine.tasks(stage) and (submission / stage).is_dir()
        ]
    if not chosen:
        raise UserError(
            f"{submission} holds no stage: name the stages, or the folder of the submission with --submission."
        )
    if options.submission is None:
        for stage in chosen:
            _without_exhibit(stage)
    verdicts = []
    for each in grading.grade(chosen, submission, grading.Limits(options.seconds, options.memory)):
        verdicts.append(each)
        print(
            f"{each.points:3} of {each.task.points:3}  {each.name} ({each.seconds:.0f} s)",
            flush=True,
        )
        if each.why:
            print(textwrap.indent(each.why, "            "))
    points, most = sum(each.points for each in verdicts), sum(each.task.points for each in verdicts)
    print(f"{points:3} of {most:3}  all")
    if out is not None:
        out.write_text(json.dumps(grading.gradescope(verdicts), indent=2) + "\n", encoding="utf-8")
    if junit is not None:
        junit.write_text(grading.junit(verdicts), encoding="utf-8")


def prove(options: argparse.Namespace) -> int:
    chosen = [mine.find_stage(each) for each in options.stages] or [
        each for each in paths.discover() if mine.tasks(each)
    ]
    complaints = [each for stage in chosen for each in proof.check(stage)]
    if not complaints:
        complaints = list(proof.prove(chosen))
    for each in complaints:
        print(each)
    if not complaints:
        count = sum(len(mine.tasks(stage)) for stage in chosen)
        print(
            f"{count} tasks are good: the reference passes, and each fails alone when it is empty."
        )
    return 1 if complaints else 0


def main(argv: list[str] | None = None) -> int | None:
    parser = cli.Parser(
        "shared.course.exercise", "The exercises of the stages: yours to write, in mine/.", EXAMPLES
    )
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_command
    )

    def command(
        name: str, do: Callable[[argparse.Namespace], int | None], about: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about)
        made.set_defaults(do=do)
        return made

    def add_stage(made: argparse.ArgumentParser, **options: str) -> None:
        made.add_argument("stage", help="stage04_continuous, stage04 or 4", **options)  # type: ignore[arg-type]

    add_stage(command("start", start, "make a copy of a stage with empty tasks"))
    add_stage(
        command("status", status, "where you stand: all stages, or the tasks of one"), nargs="?"
    )
    made = command("hint", hint, "a task, and hints in steps")
    add_stage(made)
    made.add_argument("task", type=cli.whole_number(1, 99), help="the task's number")
    made.add_argument(
        "--step",
        type=cli.whole_number(1, 99),
        default=1,
        metavar="N",
        help="show the hints up to this one",
    )
    made = command("diff", diff, "what the reference does otherwise (it shows the solution)")
    add_stage(made)
    made.add_argument("task", nargs="?", type=cli.whole_number(1, 99), help="only this task's file")
    made = command(
        "reset", reset, "begin again with a stage or one task; asks first and keeps a backup"
    )
    add_stage(made)
    made.add_argument("task", nargs="?", type=cli.whole_number(1, 99), help="only this task")
    made.add_argument("--yes", action="store_true", help="do not ask")
    made = command("grade", grade, "judge all tasks, each in a process of its own")
    made.add_argument("stages", nargs="*", help="which stages; default: those in the submission")
    made.add_argument("--submission", metavar="FOLDER", help="what to judge; default is mine/")
    made.add_argument(
        "--out", metavar="FILE", help="write results as Gradescope reads them, a .json file"
    )
    made.add_argument("--junit", metavar="FILE", help="write results as JUnit XML, a .xml file")
    limits = grading.Limits()
    made.add_argument(
        "--seconds",
        type=cli.number(1, 3600),
        default=limits.seconds,
        metavar="S",
        help="time for each task; default %(default)g",
    )
    made.add_argument(
        "--memory",
        type=cli.whole_number(256, 2**20),
        default=limits.memory,
        metavar="MIB",
        help="memory for each; default %(default)s",
    )
    made = command("prove", prove, "for whoever changes a task: are they all good? takes minutes")
    made.add_argument("stages", nargs="*", help="which stages; default: all")
    options = parser.parse_args(argv)
    done: int | None = options.do(options)
    return done


class _command(cli.Parser):
    """A command's own parser; argparse makes them with other arguments than ours takes."""

    def __init__(self, prog: str, **options: str) -> None:
        argparse.ArgumentParser.__init__(self, prog=prog, allow_abbrev=False, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    cli.run(main)
