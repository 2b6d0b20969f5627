"""Planting bugs in the student's copy and removing them, without losing the student's work.

One exhibit is planted at a time. A note, museum.json beside the copies, holds its number, the
digest of the planted file, and the place of the file that was there before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shared import paths
from shared.course import mine
from shared.errors import UserError

from .exhibits import Exhibit, find


@dataclass(frozen=True)
class Planted:
    """The planted exhibit.

    own: whether the bug is in the student's own file, not in one made for the museum. digest: of
    that file with the bug. backup: the file that was there before, if any.
    """

    number: int
    own: bool
    digest: str
    backup: str | None


def place(exhibit: Exhibit) -> Path:
    """The place of the exhibit's file in the student's copy, which need not exist."""
    return mine.folder(exhibit.stage) / exhibit.file


def read(path: Path) -> str:
    """The text of the student's file. Raises UserError if it is not UTF-8."""
    try:
        return mine.read(path)
    except SyntaxError:
        raise UserError(f"{path} is not UTF-8 text: save it as such, or move it away.") from None


def edit(source: str, old: str, new: str) -> str | None:
    """`source`, with any line ends, with `new` in place of `old`; None unless `old` occurs once."""
    if "\r\n" in source:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    return source.replace(old, new) if source.count(old) == 1 else None


def with_bug(exhibit: Exhibit) -> str:
    """The reference's file with the bug in it."""
    source = edit(mine.read(paths.ROOT / exhibit.stage / exhibit.file), exhibit.old, exhibit.new)
    if source is None:
        file = f"{exhibit.stage}/{exhibit.file}"
        raise RuntimeError(f"exhibit {exhibit.name} no longer fits {file}")
    return source


def planted() -> Planted | None:
    """The planted exhibit, if any."""
    try:
        note = json.loads((mine.HOME / "museum.json").read_text(encoding="utf-8"))
        number, in_copy, digest = int(note["number"]), bool(note["own"]), str(note["digest"])
        find(number)
        return Planted(number, in_copy, digest, note["backup"])
    except (OSError, ValueError, LookupError, TypeError, UserError):  # none, or not ours
        return None


def plant(exhibit: Exhibit, reference: bool = False) -> list[str]:
    """Write the bug into the student's copy, which is made if there is none; returns sentences on
    what was done.

    reference: put the student's file away while the bug is planted, in place of changing it. Raises
    UserError, and changes nothing, if the bug does not fit the student's file, and RuntimeError if
    another exhibit is planted.
    """
    if planted() is not None:
        raise RuntimeError("another exhibit is planted: clear it first")
    path, done = place(exhibit), []
    changed = backup = None
    if path.is_file():
        students = read(path)
        changed = None if reference else edit(students, exhibit.old, exhibit.new)
        if not reference and (changed is None or _in_the_way(exhibit, students)):
            command = f"python -m shared.course.museum plant {exhibit.name} --reference"
            raise UserError(
                f"{path} is your own work, and the bug does not fit: the code that it changes is "
                f"still to be written there, or differs. Use `{command}` to put your file away and "
                "plant the bug in the reference's; `python -m shared.course.museum clear` restores "
                "yours."
            )
        backup = mine.backup(exhibit.stage) / exhibit.file
        done.append(f"A backup of your {exhibit.file} is {backup}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = with_bug(exhibit) if changed is None else changed
    saved = None if backup is None else str(backup)
    state = Planted(exhibit.number, changed is not None, _digest(source), saved)
    # The note comes first: after a crash in between, `clear` finds a note without a bug, never a
    # bug without a note.
    (mine.HOME / "museum.json").write_text(
        json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8"
    )
    mine.write(path, source)
    return done


def _in_the_way(exhibit: Exhibit, source: str) -> bool:
    """Whether an open task would fail the exhibit's tests without the bug, too."""
    try:
        return any(
            task.file == exhibit.file
            and any(task.judged_by(test) for test in exhibit.tests)
            and mine.is_open(source, exhibit.stage, task)
            for task in mine.tasks(exhibit.stage)
        )
    except SyntaxError:
        return True


def clear() -> list[str]:
    """Remove the bug and restore the files; returns sentences on what was done."""
    state = planted()
    if state is None:
        return []
    exhibit = find(state.number)
    path, done = place(exhibit), []
    source = read(path) if path.is_file() else None
    touched = source is not None and _digest(source) != state.digest
    if state.own:
        if source is not None and (clean := edit(source, exhibit.new, exhibit.old)) is not None:
            mine.write(path, clean)
            done.append(f"Exhibit {exhibit.name} is out of your {exhibit.file}.")
        else:
            done.append(
                f"Exhibit {exhibit.name} is gone from your {exhibit.file}, which stays as it is."
            )
    else:
        if touched and source != mine.read(paths.ROOT / exhibit.stage / exhibit.file):
            done.append(f"{path} had been changed: a backup is in {mine.backup(exhibit.stage)}.")
        if state.backup is not None and Path(state.backup).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Path(state.backup).read_bytes())
            done.append(f"Your own {exhibit.file} is back.")
        elif source is not None:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
            done.append(f"Exhibit {exhibit.name} is removed, with its {exhibit.file}.")
    (mine.HOME / "museum.json").unlink()
    return done


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8")).hexdigest()
