"""The command line: python -m exercises. The pages README and INSTRUCTORS show how it is used."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from shared import cli

from . import grade, student

ONE_TASK = "stage and number: stage04_continuous, stage04 or 4, and 2; default: the last task"
HAND_INS = "a patch, a zip file, a folder with stages in it; or a folder that holds those"


def main(argv: list[str] | None = None) -> int | None:
    """The exit status: 0, 1 if a check or a proof fails."""
    about = "The tasks of the stages: start, check and grade them; and a museum of bugs."
    parser = argparse.ArgumentParser(prog="python -m exercises", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[..., Any]) -> Callable[..., Any]:
        about = (inspect.getdoc(run) or "").partition("\n\n")[0]
        name = run.__name__.strip("_")
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub.add_argument

    command(student.list_)("stages", nargs="*", metavar="STAGE", help="default: all")
    for run in (student.start, student.check, student.hint):
        command(run)("words", nargs="*", metavar="TASK", help=ONE_TASK)
    command(student.status)
    add = command(student.museum)
    add("action", choices=student.MUSEUM)
    add("number", nargs="?", type=int, help="of an exhibit, from 1, to plant")
    add = command(grade.grade)
    add("hand_ins", nargs="+", metavar="FOLDER", help=HAND_INS)
    add("--stage", nargs="+", dest="stages", default=[], help="default: all")
    add("--out", default="grades", help="folder for the results (default: grades)")
    add("--jobs", type=int, default=1, help="hand-ins side by side (default: 1)")
    add("--unconfined", action="store_true", help="without a container: code that you trust")
    add = command(grade.prove)
    add("stages", nargs="*", metavar="STAGE", help="default: all")
    add("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    options = vars(parser.parse_args(argv))
    return options.pop("run")(**options)


if __name__ == "__main__":
    cli.run(main)
