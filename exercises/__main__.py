"""The command line: python -m exercises. The pages README and INSTRUCTORS show how it is used."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shared import cli

from . import grade, museum, prove, student


def main(argv: list[str] | None = None) -> int | None:
    """The exit status: 0, 1 if a check or a proof fails."""
    about = "The tasks of the stages: start, check and grade them; and a museum of bugs."
    parser = argparse.ArgumentParser(prog="python -m exercises", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., Any], about: str) -> Callable[..., Any]:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub.add_argument

    add = command("list", lambda o: student.listed(o.stage), "the tasks")
    add("stage", nargs="?", help="default: all")
    for name, act, about, nargs in (
        ("start", student.start, "empty the functions of one task, on your own branch", None),
        ("check", student.check, "run a task's tests on your code; default: the last task", "?"),
        ("hint", student.hint, "show a task, and one more hint each time", "?"),
    ):
        add = command(name, lambda o, act=act: act(student.chosen(o.stage, o.task)), about)
        add("stage", nargs=nargs, help="stage04_continuous, stage04 or 4")
        add("task", nargs=nargs, type=int)
    command("status", lambda _: student.status(), "which tasks have passed")
    add = command("museum", lambda o: museum.main(o.action, o.number), "find bugs that were real")
    add("action", choices=museum.ACTIONS)
    add("number", nargs="?", type=int)
    add = command("grade", grade.main, "grade what was handed in")
    about = "a patch, a zip file, a folder with stages in it; or a folder that holds those"
    add("hand_ins", nargs="+", metavar="FOLDER", help=about)
    add("--stage", nargs="+", default=[], help="default: all")
    add("--out", default="grades", help="folder for the results (default: grades)")
    add("--jobs", type=int, default=1, help="hand-ins side by side (default: 1)")
    about = "without a container: for code that you trust, or in a container of your own"
    add("--unconfined", action="store_true", help=about)
    add = command("prove", prove.main, "for authors: are all tasks and edits good? takes minutes")
    add("stage", nargs="*", help="default: all")
    add("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    cli.run(main)
