"""The museum of bugs: `python -m shared.course.museum list`, `plant 07`, `check 07`, `reveal 07`.

Its bugs were shipped by real projects. `plant` writes one into the student's copy of a stage, in
mine/, and shows its symptom. The student finds and repairs it; `check` tests the repair, and
`reveal` shows the bug and where it happened.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import textwrap
from collections.abc import Callable

from shared import cli, paths
from shared.course import mine
from shared.errors import UserError

from . import planting, trials
from .exhibits import EXHIBITS, Exhibit, find
from .show import show

WIDTH = 100
SECONDS = 120.0  # for the tests of one exhibit
LINES = 12  # of an error
EXAMPLES = """  python -m shared.course.museum list
  python -m shared.course.museum plant 07
  python -m shared.course.museum hint 07
  python -m shared.course.museum check 07
  python -m shared.course.museum reveal 07
  python -m shared.course.museum clear"""


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def for_student(name: str, seed: str = "") -> Exhibit:
    """The exhibit of a student: always the same one for an id and a seed, on every machine."""
    digest = hashlib.sha256(f"{seed}\n{name.strip().casefold()}".encode()).digest()
    known = sorted(EXHIBITS, key=lambda exhibit: exhibit.number)
    return known[int.from_bytes(digest[:8], "big") % len(known)]


def chosen(options: argparse.Namespace) -> Exhibit:
    """The exhibit that a command is about. Raises UserError unless it is named in one way."""
    if (options.number is None) == (options.student is None):
        raise UserError("Name an exhibit by its number, such as 07, or by --student, not by both.")
    if options.student is None:
        return find(options.number)
    return for_student(options.student, options.seed)


def list_all(_: argparse.Namespace) -> None:
    now = planting.planted()
    stage = ""
    for exhibit in sorted(EXHIBITS, key=lambda exhibit: (exhibit.stage, exhibit.number)):
        if exhibit.stage != stage:
            stage = exhibit.stage
            print(stage)
        mark = " (planted)" if now is not None and now.number == exhibit.number else ""
        line = f"  {exhibit.name}  {exhibit.title}{mark}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 6))
    print("\nPlant one with `python -m shared.course.museum plant 01`.")


def plant(options: argparse.Namespace) -> None:
    exhibit = chosen(options)
    clear_away()
    for line in planting.plant(exhibit, options.reference):
        print(wrapped(line))
    path, state = planting.place(exhibit), planting.planted()
    print(wrapped(f"Exhibit {exhibit.name}: {exhibit.title}.") + "\n")
    print(wrapped(" ".join((exhibit.symptom.__doc__ or "").split())) + "\n", flush=True)
    right, wrong = show(exhibit, [None, path.parent])
    print(f"With the reference:\n\n{textwrap.indent(right.rstrip(), '  ')}\n")
    print(f"With your copy:\n\n{textwrap.indent(wrong.rstrip(), '  ')}\n")
    in_own_work = state is not None and state.own
    whose = "in your own work" if in_own_work else "which is the reference's except for one place"
    print(
        wrapped(f"The bug is somewhere in {paths.shown(path)}, {whose}. Find it, and fix it there.")
        + "\n"
    )
    print(
        f"  Is it gone?     python -m shared.course.museum check {exhibit.name}\n"
        f"  A nudge         python -m shared.course.museum hint {exhibit.name}\n"
        f"  The answer      python -m shared.course.museum reveal {exhibit.name}\n"
        "  All as before   python -m shared.course.museum clear"
    )


def hint(options: argparse.Namespace) -> None:
    print(wrapped(chosen(options).hint))


def check(options: argparse.Namespace) -> int:
    exhibit = chosen(options)
    state, path = planting.planted(), planting.place(exhibit)
    if state is None or state.number != exhibit.number or not path.is_file():
        advice = f"plant it with `python -m shared.course.museum plant {exhibit.name}`"
        raise UserError(f"Exhibit {exhibit.name} is not planted: {advice}.")
    source = planting.read(path)
    try:
        mine.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno or 1} of {paths.shown(path)}"
        raise UserError(
            f"There is a syntax error in {where} ({error.msg}): fix it first."
        ) from None
    job = trials.job(exhibit.stage, {exhibit.file: source}, exhibit.tests)
    same = planting.edit(source, exhibit.new, exhibit.old) is not None
    verdict = (
        "The bug is still there" if same else "The planted code has changed, and is still wrong"
    )
    try:
        (outcomes,) = trials.outcomes([job], SECONDS)
    except (TimeoutError, RuntimeError) as error:
        print(f"{verdict}: {error}")
        return 1
    failed = {name: error for name, error in outcomes.items() if error}
    if outcomes and not failed:
        print(f"It is gone: {len(outcomes)} tests that catch it pass. The story:")
        print(f"  python -m shared.course.museum reveal {exhibit.name}")
        return 0
    print(f"{verdict}: {len(failed)} of {len(outcomes)} tests fail.\n")
    for name, text in failed.items():
        print(f"  {name}")
        if "::" not in name:  # the file cannot be loaded; the error of a test would tell too much
            print(textwrap.indent("\n".join(text.splitlines()[-LINES:]), "    "))
    first = next(iter(failed), exhibit.stage)
    print(f"\nWhy they do: python -m pytest {first.partition('::')[0]} --mine")
    return 1


def reveal(options: argparse.Namespace) -> None:
    exhibit = chosen(options)
    print(wrapped(f"Exhibit {exhibit.name}: {exhibit.bug}.") + "\n")
    before = mine.read(paths.ROOT / exhibit.stage / exhibit.file).replace("\r\n", "\n")
    after = planting.with_bug(exhibit).replace("\r\n", "\n")
    names = f"{exhibit.stage}/{exhibit.file}", f"the same with exhibit {exhibit.name}"
    sides = before.splitlines(keepends=True), after.splitlines(keepends=True)
    print("".join(difflib.unified_diff(*sides, *names)))
    print(wrapped(exhibit.story) + "\n")
    print(wrapped(f"Seen in: {exhibit.seen}.") + "\n")
    print("Caught by\n" + "\n".join(f"  {exhibit.stage}/{test}" for test in exhibit.tests))


def clear(_: argparse.Namespace) -> None:
    if not clear_away():
        print("Nothing is planted.")


def clear_away() -> bool:
    """Clear, and print what was done; False if nothing was planted."""
    done = planting.clear()
    for line in done:
        print(wrapped(line))
    return bool(done)


def main(argv: list[str] | None = None) -> int | None:
    parser = cli.Parser(
        "shared.course.museum",
        "A museum of bugs: plant one, find it, and read where it happened.",
        EXAMPLES,
    )
    command = cli.commands(parser)

    def of_one(
        name: str, do: Callable[[argparse.Namespace], int | None], about: str
    ) -> argparse.ArgumentParser:
        subparser = command(name, do, about)
        numbers = cli.whole_number(1, 99)
        subparser.add_argument(
            "number", nargs="?", type=numbers, help="the exhibit's number, such as 07"
        )
        subparser.add_argument(
            "--student", metavar="ID", help="the exhibit of this student instead"
        )
        subparser.add_argument(
            "--seed", default="", metavar="TEXT", help="with --student: another one each term"
        )
        return subparser

    command("list", list_all, "all exhibits, by the users' complaint")
    planting_parser = of_one("plant", plant, "write the bug into your copy, and see its symptom")
    planting_parser.add_argument(
        "--reference",
        action="store_true",
        help="put your own file away, and plant in the reference's",
    )
    of_one("hint", hint, "a nudge")
    of_one("check", check, "run the tests that catch it against your copy")
    of_one("reveal", reveal, "the bug, where it happened, and the tests that catch it")
    command("clear", clear, "remove the bug, and restore your files")
    options = parser.parse_args(argv)
    done: int | None = options.do(options)
    return done


if __name__ == "__main__":
    cli.run(main)
