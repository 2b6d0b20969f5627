"""The command line: python -m exercises."""

from __future__ import annotations

import argparse
import sys

from shared import cli
from shared.errors import UserError

from . import grade, museum, prove, student

EXAMPLES = """examples:
  git switch -c mine
  python -m exercises start stage02 1
  python -m exercises check
  python -m exercises museum plant 1
  python -m exercises grade hand-ins/ --stage stage02 --out grades"""


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1 if a check or a proof fails, 2 for what the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m exercises",
        description="The tasks of the stages: start, check and grade them; and a museum of bugs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub

    sub = command("list", lambda o: student.listed(o.stage), "the tasks")
    sub.add_argument("stage", nargs="?")
    for name, act, about, nargs in (
        ("start", student.start, "empty the functions of one task, on your own branch", None),
        ("check", student.check, "run a task's tests on your code; default: the last task", "?"),
        ("hint", student.hint, "show a task, and one more hint each time", "?"),
    ):
        sub = command(name, lambda o, act=act: act(student.chosen(o.stage, o.task)), about)
        sub.add_argument("stage", nargs=nargs, help="stage04_continuous, stage04 or 4")
        sub.add_argument("task", nargs=nargs, type=int)
    command("status", lambda _: student.status(), "which tasks have passed")
    sub = command("museum", lambda o: museum.main(o.action, o.number), "find bugs that were real")
    sub.add_argument("action", choices=museum.ACTIONS)
    sub.add_argument("number", nargs="?", type=int)
    sub = command("grade", grade.main, "grade what was handed in")
    about = "a patch, a zip file, a folder with stages in it; or a folder that holds those"
    sub.add_argument("hand_ins", nargs="+", metavar="FOLDER", help=about)
    sub.add_argument("--stage", nargs="+", default=[], help="default: all")
    sub.add_argument("--out", default="grades", help="folder for the results (default: grades)")
    sub.add_argument("--jobs", type=int, default=1, help="hand-ins side by side (default: 1)")
    about = "without a container: for code that you trust, or in a container of your own"
    sub.add_argument("--unconfined", action="store_true", help=about)
    sub = command("prove", prove.main, "for authors: are all tasks and edits good? takes minutes")
    sub.add_argument("stage", nargs="*", help="default: all")
    sub.add_argument("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    sub.add_argument("--only", default="", metavar="TEXT", help="entries whose name has this text")
    return parser


if __name__ == "__main__":
    cli.run(main)
