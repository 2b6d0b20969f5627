"""The command line: python -m exercises."""

from __future__ import annotations

import argparse
import sys

from shared import cli
from shared.errors import UserError

from . import museum, student, tasks

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
        return _do(options)
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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about)

    command("list", "the tasks").add_argument("stage", nargs="?")
    sub = command("start", "empty the functions of one task, on your own branch")
    sub.add_argument("stage", help="stage04_continuous, stage04 or 4")
    sub.add_argument("task", type=int)
    for name, about in (
        ("check", "run a task's tests on your code; default: the task started last"),
        ("hint", "show a task, and one more hint each time"),
    ):
        sub = command(name, about)
        sub.add_argument("stage", nargs="?")
        sub.add_argument("task", nargs="?", type=int)
    command("status", "which tasks have passed")
    sub = command("grade", "grade what was handed in: folders, zip files, patches")
    about = "or FILE.zip or FILE.patch, or a folder that holds a class of them"
    sub.add_argument("hand_ins", nargs="+", metavar="FOLDER", help=about)
    sub.add_argument("--stage", nargs="+", default=[], help="default: all that have tasks")
    sub.add_argument("--out", default="grades", help="folder for the results (default: grades)")
    sub.add_argument("--jobs", type=int, default=1, help="hand-ins side by side (default: 1)")
    about = "without a container: for code that you trust, or in a container of your own"
    sub.add_argument("--unconfined", action="store_true", help=about)
    sub = command("prove", "for authors: are all tasks and edits good? takes minutes")
    sub.add_argument("stage", nargs="*", help="default: all")
    sub.add_argument("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    sub.add_argument("--only", default="", metavar="TEXT", help="entries whose name has this text")
    sub = command("museum", "find bugs that real projects shipped")
    sub.add_argument("action", choices=museum.ACTIONS)
    sub.add_argument("number", nargs="?", type=int)
    return parser


def _do(options: argparse.Namespace) -> int:
    match options.command:
        case "list":
            student.listed(options.stage)
        case "start":
            student.start(tasks.find_stage(options.stage), options.task)
        case "check":
            return student.check(student.chosen(options.stage, options.task))
        case "hint":
            student.hint(student.chosen(options.stage, options.task))
        case "status":
            student.status()
        case "grade":
            from . import grade

            return grade.main(options)
        case "prove":
            from . import prove

            return prove.main(options)
        case "museum":
            return museum.main(options.action, options.number)
    return 0


if __name__ == "__main__":
    cli.run(main)
