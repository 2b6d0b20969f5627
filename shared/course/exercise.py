"""The exercises: `python -m shared.course.exercise start stage04`, then `pytest stage04_continuous
--mine`.

A stage's tasks are functions of its own code. `start` writes a copy to mine/ in which these
functions are empty and everything else works; the stage's tests judge the copy. Nothing here
overwrites the student's work without a backup in mine/backups/.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import cli, paths
from ..errors import UserError
from ..task import Task
from . import grading, mine, proof, variant, wrong
from .judge import Judge, Limits
from .museum import planting
from .museum.exhibits import find

WIDTH = 100
EXAMPLES = """  python -m shared.course.exercise start stage04
  python -m pytest stage04_continuous --mine -k task1
  python -m shared.course.exercise hint stage04 1
  python -m shared.course.exercise status
  python -m shared.course.exercise grade stage04 --out results.json
  python -m shared.course.exercise start stage05 --variant spring-ada17"""


def state(stage: str, task: Task) -> str:
    """The state of a task in the student's copy: "not started", "to write", "written", "passes",
    "fails" or "not Python: line 3"."""
    path = mine.folder(stage) / task.file
    if not path.is_file():
        return "not started"
    try:
        if mine.is_open(mine.read(path), stage, task):
            return "to write"
    except SyntaxError as error:
        return f"not Python: line {error.lineno or 1}"
    passed = mine.recorded(stage).get(task.number)
    return "written" if passed is None else "passes" if passed else "fails"


def _exhibit_in(stage: str) -> str:
    """A sentence if a bug of the museum is planted in the copy of a stage, else ""."""
    planted = planting.planted()
    if planted is None or find(planted.number).stage != stage:
        return ""
    return (
        f"Exhibit {planted.number:02} of the museum is planted in your copy of {stage}: remove it "
        "and restore your file with `python -m shared.course.museum clear`."
    )


def _without_exhibit(stage: str) -> None:
    """Raises UserError if a bug of the museum is planted, so that it is not taken for the student's
    work."""
    if notice := _exhibit_in(stage):
        raise UserError(notice)


def start(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    _without_exhibit(stage)
    known = mine.folder(stage).is_dir()
    if options.variant is not None:
        variant.check(stage)
    if options.variant is None or not known:
        print(f"{mine.start(stage)} is your copy. Everything works but these:\n")
        _list_tasks(stage)
    if options.variant is not None:
        folder = variant.start(variant.of(options.variant))
        print(f"\n{folder / 'VARIANT.md'} has the rules of your variant.")
        if known:
            return
    print(
        f"\nRead a task with `{mine.command('hint', stage, 1)}`, write it, and test it with\n"
        f"`python -m pytest {stage} --mine -k task1`. Without -k, all of the stage's tests run\n"
        "that can see your copy."
    )


def status(options: argparse.Namespace) -> None:
    if options.stage is not None:
        _list_tasks(mine.find_stage(options.stage))
        return
    line = "{:20} {:>5} {:>9} {:>8} {:>5} {:>3} of {:>3}"
    print(f"{'stage':20} {'tasks':>5} {'to write':>9} {'written':>8} {'pass':>5} {'points':>10}")
    totals = [0] * 6
    for stage in filter(mine.tasks, paths.discover()):
        tasks = mine.tasks(stage)
        states = [state(stage, task) for task in tasks]
        to_write = sum(result in ("not started", "to write") for result in states)
        won = sum(t.points for t, result in zip(tasks, states, strict=True) if result == "passes")
        row = [len(tasks), to_write, len(tasks) - to_write, states.count("passes"), won]
        row.append(sum(task.points for task in tasks))
        totals = [total + count for total, count in zip(totals, row, strict=True)]
        started = "" if mine.folder(stage).is_dir() else "   not started"
        print(line.format(stage, *row) + started)
    print(line.format("all", *totals))
    print("\nResults are from the last pytest --mine; they count until the copy changes.")
    for notice in filter(None, map(_exhibit_in, paths.discover())):
        print(textwrap.fill(notice, WIDTH))


def _list_tasks(stage: str) -> None:
    for task in mine.tasks(stage):
        points = f"{task.points:3} points"
        print(f"  {task.number}  {state(stage, task):12} {points}  {task.title}")
        print(f"     {task.file}: {', '.join(task.functions)}")


def hint(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    task = mine.find_task(stage, options.task)
    count, name = len(task.hints), mine.label(stage, task)
    if not 1 <= options.step <= count:
        raise UserError(f"{name} has {count} hints: --step is from 1 to {count}.")
    print(f"{name}: {task.title} ({task.points} points)")
    print(f"{task.file}: {', '.join(task.functions)}\n\n{textwrap.fill(task.text, WIDTH)}\n")
    if errors := mine.errors(stage, task):
        print("Errors, with these texts:\n" + "\n".join(f"  {error}" for error in errors) + "\n")
    for number, text in enumerate(task.hints[: options.step], 1):
        print(textwrap.fill(f"Hint {number} of {count}: {text}", WIDTH) + "\n")
    print("Judged by\n" + "\n".join(f"  {stage}/{test}" for test in task.tests))
    if options.step < count:
        print(
            "The next hint: " + mine.command("hint", stage, task.number, "--step", options.step + 1)
        )


def diff(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    folder, names = mine.existing(stage), mine.files(stage)
    if options.task is not None:
        names = [mine.find_task(stage, options.task).file]
    same = True
    for name in names:
        path, reference = folder / name, mine.read(paths.ROOT / stage / name)
        written = planting.read(path) if path.is_file() else ""
        sides = written.splitlines(keepends=True), reference.splitlines(keepends=True)
        for line in difflib.unified_diff(*sides, f"mine/{stage}/{name}", f"{stage}/{name}"):
            same = False
            print(line if line.endswith("\n") else line + "\n", end="")
    if same:
        print(f"Your copy is the reference, word for word: {', '.join(names)}.")


def reset(options: argparse.Namespace) -> None:
    stage = mine.find_stage(options.stage)
    task = None if options.task is None else mine.find_task(stage, options.task)
    what = f"the copy of {stage}" if task is None else mine.label(stage, task)
    mine.existing(stage)
    _without_exhibit(stage)
    if not options.yes and not _confirmed(f"Begin again with {what}? A backup is kept. [y/N] "):
        print("Nothing was changed.")
        return
    print(f"{what} is empty again; the old files are in {mine.reset(stage, task)}.")


def _confirmed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("reset needs an answer, and this is not a terminal: add --yes.")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def grade(options: argparse.Namespace) -> None:
    out, junit = _output(options.out, ".json"), _output(options.junit, ".xml")
    submission = _submission(options)
    chosen = list(dict.fromkeys(mine.find_stage(name) for name in options.stages))
    if not chosen:
        known = [s for s in paths.discover() if (paths.ROOT / s / "drivers.py").is_file()]
        chosen = [stage for stage in known if (submission / stage).is_dir()] or known
    if options.submission is None:
        for stage in chosen:
            _without_exhibit(stage)
    extra = None
    if options.variant is not None:
        variant.check(*chosen)
        extra = variant.of(options.variant).extra()
    verdicts = []
    with _judge(options) as judge:
        for verdict in grading.grade(judge, chosen, submission, extra):
            verdicts.append(verdict)
            points = f"{verdict.points:3} of {verdict.task.points:3}"
            print(f"{points}  {verdict.name} ({verdict.seconds:.0f} s)", flush=True)
            for text in filter(None, (verdict.why, verdict.note and f"(to read: {verdict.note})")):
                print(textwrap.indent(text, "            "))
    points = f"{sum(verdict.points for verdict in verdicts):3}"
    print(f"{points} of {sum(verdict.task.points for verdict in verdicts):3}  all")
    if out is not None:
        out.write_text(json.dumps(grading.gradescope(verdicts), indent=2) + "\n", encoding="utf-8")
    if junit is not None:
        junit.write_text(grading.junit(verdicts), encoding="utf-8")


def grade_class(options: argparse.Namespace) -> None:
    chosen = list(dict.fromkeys(mine.find_stage(name) for name in options.stages))
    with _judge(options) as judge:
        points = grading.grade_class(judge, chosen, Path(options.folder), Path(options.out))
    for name, score in points.items():
        print(f"{score:4}  {name if name.isprintable() else ascii(name)}")


def design(options: argparse.Namespace) -> None:
    from .design import start

    stage = mine.find_stage(options.stage)
    print(f"{start(stage, options.file)} has signatures and docstrings alone: the design is yours.")
    print(f"Judge it with `python -m pytest {stage} --mine -k contract`.")


def line(options: argparse.Namespace) -> None:
    from reports import staircase

    from .capstone import ROUNDS
    from .design import line

    stage = mine.find_stage(options.stage)
    plan = staircase.BENCHMARK.quick if options.quick else staircase.FULL
    with _judge(options) as judge:
        print(line(judge, _submission(options), stage, plan, 1 if options.quick else ROUNDS))


def _output(name: str | None, suffix: str) -> Path | None:
    return None if name is None else cli.output_file(name, suffix)


def _submission(options: argparse.Namespace) -> Path:
    return mine.HOME if options.submission is None else Path(options.submission)


def _judge(options: argparse.Namespace) -> Judge:
    return Judge(Limits(options.seconds, options.memory), confined=not options.unconfined)


def capstone(options: argparse.Namespace) -> int:
    print("loading the stages", flush=True)  # this takes seconds
    from reports import staircase  # it needs the stages, and no other command does

    from .capstone import QUICK, ROUNDS, capstone, trial

    out = _output(options.out, ".json")
    if options.submission is None:
        for stage in paths.discover():
            _without_exhibit(stage)
    submission = _submission(options)
    plan = trial() if options.quick else staircase.FULL
    with _judge(options) as judge:
        judge.seeds = judge.seeds[:QUICK] if options.quick else judge.seeds
        result = capstone(judge, submission, plan, 1 if options.quick else ROUNDS)
    for name in result.failed:
        print(f"  {name}")
    if out is not None:
        out.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failed else 0


def prove(options: argparse.Namespace) -> int:
    chosen = [mine.find_stage(name) for name in options.stages]
    chosen = chosen or list(filter(mine.tasks, paths.discover()))
    problems = [problem for stage in chosen for problem in proof.check(stage)]
    problems = problems or list(proof.prove(chosen))
    for problem in problems:
        print(problem)
    if not problems:
        count = sum(len(mine.tasks(stage)) for stage in chosen)
        wrongs = sum(len(wrong.read(stage)) for stage in chosen)
        print(
            f"{count} tasks are good: the reference passes; each fails alone when it is empty, and "
            f"with each of its wrong solutions, {wrongs} in all."
        )
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int | None:
    parser = cli.Parser(
        "shared.course.exercise", "The exercises of the stages: yours to write, in mine/.", EXAMPLES
    )
    command = cli.commands(parser)

    def add_stage(subparser: argparse.ArgumentParser, **options: Any) -> None:
        subparser.add_argument("stage", help="stage04_continuous, stage04 or 4", **options)

    def submitted(subparser: argparse.ArgumentParser) -> None:
        subparser.add_argument(
            "--submission", metavar="FOLDER", help="what to judge; default: mine/"
        )

    def judged(subparser: argparse.ArgumentParser, seconds: float = Limits.seconds) -> None:
        subparser.add_argument(
            "--seconds",
            type=cli.number(1, 3600),
            default=seconds,
            metavar="S",
            help="processor time for each process",
        )
        subparser.add_argument(
            "--memory",
            type=cli.whole_number(256, 2**20),
            default=Limits.memory,
            metavar="MIB",
            help="memory for each",
        )
        subparser.add_argument(
            "--unconfined",
            action="store_true",
            help="without bubblewrap: in a container, or for your own code",
        )

    def seeded(subparser: argparse.ArgumentParser, about: str) -> None:
        subparser.add_argument("--variant", type=variant.seed, metavar="SEED", help=about)

    parsed = command("start", start, "make a copy of a stage with empty tasks")
    add_stage(parsed)
    seeded(parsed, "for stage05: add four rules of this seed, which are yours to write")
    add_stage(command("status", status, "your results: all stages, or the tasks of one"), nargs="?")
    parsed = command("hint", hint, "a task, and hints in steps")
    add_stage(parsed)
    parsed.add_argument("task", type=cli.whole_number(1, 99), help="the task's number")
    parsed.add_argument(
        "--step",
        type=cli.whole_number(1, 99),
        default=1,
        metavar="N",
        help="show the hints up to this one",
    )
    parsed = command("diff", diff, "how your copy differs from the reference (shows the solution)")
    add_stage(parsed)
    parsed.add_argument(
        "task", nargs="?", type=cli.whole_number(1, 99), help="only this task's file"
    )
    parsed = command(
        "reset", reset, "begin again with a stage or one task; asks first and keeps a backup"
    )
    add_stage(parsed)
    parsed.add_argument("task", nargs="?", type=cli.whole_number(1, 99), help="only this task")
    parsed.add_argument("--yes", action="store_true", help="do not ask")
    parsed = command("grade", grade, "judge all tasks, each in a contained process")
    parsed.add_argument("stages", nargs="*", help="which stages; default: those in the submission")
    submitted(parsed)
    seeded(parsed, "for stage05: judge the rules of this seed, too")
    parsed.add_argument("--out", metavar="FILE", help="write results for Gradescope, a .json file")
    parsed.add_argument("--junit", metavar="FILE", help="write results as JUnit XML, a .xml file")
    judged(parsed)
    parsed = command("grade-class", grade_class, "grade all submissions in a folder; can resume")
    parsed.add_argument("folder", help="holds a folder for each submission")
    parsed.add_argument("stages", nargs="+", help="which stages")
    parsed.add_argument("--out", metavar="FOLDER", required=True, help="where results go")
    judged(parsed)
    parsed = command("capstone", capstone, "an engine of your own stages 02 to 05, and 09")
    submitted(parsed)
    judged(parsed, seconds=900)
    parsed.add_argument(
        "--quick", action="store_true", help="a trial: few seeds, a tiny model, once"
    )
    parsed.add_argument("--out", metavar="FILE", help="write the result, a .json file")
    parsed = command("design", design, "empty a whole file: the open design")
    add_stage(parsed)
    parsed.add_argument("file", help="a file with tasks: scheduler.py")
    parsed = command("line", line, "an open design's line on the leaderboard, tokens proved")
    add_stage(parsed)
    submitted(parsed)
    judged(parsed, seconds=900)
    parsed.add_argument("--quick", action="store_true", help="a quarter of the workload, once")
    parsed = command("prove", prove, "for authors of tasks: are they all good? takes minutes")
    parsed.add_argument("stages", nargs="*", help="which stages; default: all")
    options = parser.parse_args(argv)
    done: int | None = options.do(options)
    return done


if __name__ == "__main__":
    cli.run(main)
