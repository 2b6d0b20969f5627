"""The museum: bugs that real projects shipped, one edit each. Plant one; find it by its symptom.

An exhibit is an edit with a story (edits.py). `plant` makes it in the working tree, and runs the
exhibit's `shows:` before and after: what a user would see.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import textwrap
from itertools import zip_longest

from shared import paths
from shared.errors import UserError

from . import edits, running
from .edits import Edit
from .student import SECONDS, State, need_clean, read

ACTIONS = ("list", "plant", "hint", "check", "reveal", "clear")
PATIENCE = 120.0  # seconds for a symptom
WIDTH, SHOWN = 100, 40  # columns; lines


def main(action: str, number: int | None) -> int:
    """The exit status. number: of an exhibit, from 1; only `plant` needs one."""
    if action == "list":
        for place, exhibit in enumerate(edits.exhibits(), 1):
            print(f"{place:3}  {exhibit.stage[:7]}  {exhibit.title}")
        return 0
    if action == "plant":
        if number is None:
            raise UserError("Which exhibit? `python -m exercises museum list` shows them.")
        plant(number)
        return 0
    state = State()
    if not state.planted:
        raise UserError("No bug is planted: `python -m exercises museum plant 1` plants the first.")
    exhibit = find(state.planted["number"])
    if action == "hint":
        print(_filled(exhibit.hint))
    elif action == "check":
        return check(exhibit)
    elif action == "reveal":
        reveal(exhibit)
    else:
        clear(exhibit, state)
    return 0


def find(number: int) -> Edit:
    known = edits.exhibits()
    if not 1 <= number <= len(known):
        raise UserError(f"There is no exhibit {number}: they are 1 to {len(known)}.")
    return known[number - 1]


def plant(number: int) -> None:
    """Make the edit in the working tree, and show what it does, beside what was there."""
    exhibit, state = find(number), State()
    if state.planted:
        raise UserError(
            f"Exhibit {state.planted['number']} is planted already: "
            "`python -m exercises museum clear` removes it."
        )
    need_clean(exhibit.file, "a planted bug")
    text = read(exhibit.file)
    try:
        planted = exhibit.applied(text)
    except (LookupError, SyntaxError):
        raise UserError(
            f"Your {exhibit.file} is not the project's where this bug goes: plant it on a branch "
            "without your work, `git switch -c museum main`."
        ) from None
    print(f"Exhibit {number}: {exhibit.title}\n")
    print(textwrap.indent(exhibit.shows, "    ") + "\n")
    print("loading the stage twice", flush=True)
    before = symptom(exhibit)
    (paths.ROOT / exhibit.file).write_text(planted, encoding="utf-8")
    state.planted = {"number": number, "text": text, "planted": planted}
    state.save()
    print(beside(before, symptom(exhibit)))
    print(
        f"\nThe bug is somewhere in {exhibit.stage}/, in your working tree (git would show it: do "
        "not look).\nMend it, and then: python -m exercises museum check. There are hint, reveal "
        "and clear."
    )


def symptom(exhibit: Edit) -> str:
    """What the exhibit's command or program prints; how it ended, if not well."""
    words = shlex.split(exhibit.shows) if exhibit.shows.startswith("python ") else []
    command = [sys.executable, *(words[1:] or ["-c", exhibit.shows])]
    try:
        done = subprocess.run(
            command,
            cwd=paths.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        return f"{shown[-2000:]}\n[no end after {PATIENCE:.0f} s]"
    ended = f"\n[exit status {done.returncode}]" if done.returncode else ""
    lines = done.stdout.strip().splitlines()
    if len(lines) > SHOWN:
        lines[SHOWN // 2 : -SHOWN // 2] = ["..."]
    return "\n".join(lines) + ended


def beside(left: str, right: str) -> str:
    """Two texts in two columns."""
    width = (min(WIDTH + 40, shutil.get_terminal_size((WIDTH, 24)).columns) - 3) // 2
    columns = [[f"-- {name} ".ljust(width, "-")] for name in ("before", "with the bug")]
    for column, text in zip(columns, (left, right), strict=True):
        for line in text.splitlines():
            column += textwrap.wrap(line, width, drop_whitespace=False) or [""]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{a.ljust(width)} | {b}".rstrip() for a, b in rows)


def check(exhibit: Edit) -> int:
    """Whether the tests that catch the bug pass again."""
    run = running.here({"tests": exhibit.tests}, paths.ROOT, SECONDS)
    if not (run.ended or run.failures) and run.outcomes:
        print("Mended: the tests that this bug failed pass. `museum reveal` tells its story.")
        return 0
    for test, why in run.failures:
        print(f"  {test.rpartition('::')[2]}: {why}")
    print(run.ended or "Not yet: the bug is still there, or there is another one.")
    return 1


def reveal(exhibit: Edit) -> None:
    print(_filled(f"{exhibit.file}: {exhibit.what}") + "\n")
    for old, new in exhibit.replacements:
        print(textwrap.indent(old, "- ") + "\n" + textwrap.indent(new, "+ ") + "\n")
    print(_filled(exhibit.story) + f"\n\nSeen in: {exhibit.seen}")
    print("Caught by: " + ", ".join(exhibit.tests))


def clear(exhibit: Edit, state: State) -> None:
    """Restore the file as it was before the bug. What the student wrote since is kept."""
    text = read(exhibit.file)
    if text not in (state.planted["text"], state.planted["planted"]):
        kept = state.path.with_name("exercises-museum.txt")
        kept.write_text(text, encoding="utf-8")
        print(f"Your {exhibit.file} is kept in {kept}.")
    (paths.ROOT / exhibit.file).write_text(state.planted["text"], encoding="utf-8")
    state.planted = {}
    state.save()
    print(f"{exhibit.file} is as it was before the bug.")


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH)
