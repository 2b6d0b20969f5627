"""The museum: bugs that real projects shipped, one edit each. Plant one; find it by its symptom.

An exhibit is an edit with a story (edits.py). `plant` makes it in the working tree, and runs the
exhibit's `shows:` before and after: what a user would see.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared import paths
from shared.errors import UserError

from . import edits, running, tasks
from .edits import Edit
from .student import git, need_clean, note, recall

ACTIONS = ("list", "plant", "hint", "check", "reveal", "clear")
WIDTH = 100  # columns


def main(action: str, number: int | None) -> int:
    """The exit status. number: of an exhibit, from 1; only `plant` needs one."""
    known = dict(enumerate(edits.exhibits(), 1))
    planted, _, commit = recall("planted").partition(" ")
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
        reveal(exhibit)
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
        raise UserError(
            f"Your {exhibit.file} is not the project's where this bug goes: plant it on a branch "
            "without your work, `git switch -c museum main`."
        ) from None
    print(f"Exhibit {number}: {exhibit.fields['title'][0]}\n")
    shows = "\n".join(exhibit.fields["shows"])
    print(textwrap.indent(shows, "    ") + "\n")
    print("running it before and after: this loads the stage twice", flush=True)
    before = symptom(shows)
    note("planted", f"{number} {git('rev-parse', 'HEAD')}")
    (paths.ROOT / exhibit.file).write_text(planted, encoding="utf-8")
    table = Table("before", "with the bug")
    table.add_row(Text(before), Text(symptom(shows)))
    Console().print(table)
    print(
        f"\nThe bug is somewhere in {exhibit.file.partition('/')[0]}/, in your working tree (git "
        "would show it: do not look).\nMend it, and then: python -m exercises museum check. There "
        "are hint, reveal and clear."
    )


def symptom(shows: str) -> str:
    """What a command or a program prints, and how it ended, if not well."""
    words = shlex.split(shows)[1:] if shows.startswith("python ") else ["-c", shows]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, *words], cwd=paths.ROOT, text=True, **pipes)
    return done.stdout.strip() + (f"\n[exit status {done.returncode}]" if done.returncode else "")


def reveal(exhibit: Edit) -> None:
    print(textwrap.fill(f"{exhibit.file}: {exhibit.what}", WIDTH) + "\n")
    for old, new in exhibit.replacements:
        print(textwrap.indent(old, "- ") + "\n" + textwrap.indent(new, "+ ") + "\n")
    print(textwrap.fill(" ".join(exhibit.fields[">"]), WIDTH))
    print(f"\nSeen in: {exhibit.fields['seen'][0]}\nCaught by: {', '.join(exhibit.tests)}")
