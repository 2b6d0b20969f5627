"""Bugs in the student's copy: planted, taken out again, and nothing of the student's is ever lost.

One exhibit is planted at a time. A note, museum.json beside the copies, says which, in what state its file was left, and where
the file is that was there before.
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
    """What is planted.

    own: the bug is in a file of the student's, and not in one that was put there for the museum. digest: of that file with the
    bug. backup: of what was in its place before, if there was something.
    """

    number: int
    own: bool
    digest: str
    backup: str | None


def place(exhibit: Exhibit) -> Path:
    """Where the exhibit's file is in the student's copy, whether it is there or not."""
    return mine.folder(exhibit.stage) / exhibit.file


def read(path: Path) -> str:
    """The text of the student's file. Raises UserError if it is none."""
    try:
        return mine.read(path)
    except SyntaxError:
        raise UserError(f"{path} is not UTF-8 text: save it as such, or move it away.") from None


def edit(source: str, old: str, new: str) -> str | None:
    """`source` with `new` in place of `old`, whatever its line ends; None if `old` does not occur exactly once."""
    if "\r\n" in source:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    return source.replace(old, new) if source.count(old) == 1 else None


def with_bug(exhibit: Exhibit) -> str:
    """The reference's file with the bug in it."""
    source = edit(mine.read(paths.ROOT / exhibit.stage / exhibit.file), exhibit.old, exhibit.new)
    if source is None:
        raise RuntimeError(
            f"exhibit {exhibit.name} does not fit {exhibit.stage}/{exhibit.file} any more"
        )
    return source


def planted() -> Planted | None:
    """What is planted now."""
    try:
        found = json.loads((mine.HOME / "museum.json").read_text(encoding="utf-8"))
        state = Planted(
            int(found["number"]), bool(found["own"]), str(found["digest"]), found["backup"]
        )
        find(state.number)
        return state
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        UserError,
    ):  # there is none, or somebody wrote another one
        return None


def plant(exhibit: Exhibit, reference: bool = False) -> list[str]:
    """Write the bug into the student's copy, which is made if there is none; what was done, in sentences.

    The student's own file is used as it is, or with `reference` put away for as long as the bug is there. Raises UserError, and
    changes nothing, if the bug does not fit the student's file, and RuntimeError if another one is planted.
    """
    if planted() is not None:
        raise RuntimeError("another exhibit is planted: clear it first")
    path, done = place(exhibit), []
    changed = backup = None
    if path.is_file():
        own = read(path)
        changed = None if reference else edit(own, exhibit.old, exhibit.new)
        if not reference and (changed is None or _in_the_way(exhibit, own)):
            raise UserError(
                f"{path} is your own work, and the bug does not fit in: what it changes is still to be written there, or is "
                f"written in another way. `python -m shared.course.museum plant {exhibit.name} --reference` puts your file away and "
                "plants the bug in the reference's, and `python -m shared.course.museum clear` brings yours back."
            )
        backup = mine.backup(exhibit.stage) / exhibit.file
        done.append(f"Your {exhibit.file} as it was is in {backup}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = with_bug(exhibit) if changed is None else changed
    state = Planted(
        exhibit.number,
        changed is not None,
        _digest(source),
        None if backup is None else str(backup),
    )
    # The note comes first: should this end in between, `clear` finds a note without a bug, and not a bug without a note.
    (mine.HOME / "museum.json").write_text(
        json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8"
    )
    mine.write(path, source)
    return done


def _in_the_way(exhibit: Exhibit, source: str) -> bool:
    """Whether a task that is still open would fail the exhibit's tests, bug or no bug."""
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
    """Take the bug out again and put everything back as it was; what was done, in sentences."""
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
                f"Exhibit {exhibit.name} is gone from your {exhibit.file} already, which is left as it is."
            )
    else:
        if touched and source != mine.read(paths.ROOT / exhibit.stage / exhibit.file):
            done.append(
                f"{path} was not as it was planted: it is kept in {mine.backup(exhibit.stage)}."
            )
        if state.backup is not None and Path(state.backup).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Path(state.backup).read_bytes())
            done.append(f"Your own {exhibit.file} is back.")
        elif source is not None:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
            done.append(f"Exhibit {exhibit.name} is cleared away, with its {exhibit.file}.")
    (mine.HOME / "museum.json").unlink()
    return done


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8")).hexdigest()
