"""The exhibits: bugs that real projects shipped, each as one edit of a stage's code: exhibits.toml.

An exhibit is a number, an edit whose old text occurs once in the reference and whose new text
occurs once afterwards, a symptom from symptoms.py that then prints something else, and tests that
fail. The museum's tests prove this for every exhibit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

from . import symptoms

PROSE = ("title", "hint", "bug", "story", "seen")  # fields in which a line break is a space


@dataclass(frozen=True)
class Exhibit:
    """One bug.

    title: the user's complaint. symptom: prints it, see symptoms.py.
    hint: where to look, not what to write. bug: the cause, in one line.
    story: what happened, and why it was hard to see. seen: where.
    tests: pytest ids within the stage of the tests that catch it; they start no process.
    """

    number: int
    stage: str
    file: str
    title: str
    old: str
    new: str
    symptom: Callable[[], None]
    hint: str
    bug: str
    story: str
    seen: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.number:02}"


def find(number: int) -> Exhibit:
    """Raises UserError if there is no such exhibit."""
    for exhibit in EXHIBITS:
        if exhibit.number == number:
            return exhibit
    raise UserError(f"There is no exhibit {number}: see `python -m shared.course.museum list`.")


def _read() -> Iterator[Exhibit]:
    text = Path(__file__).with_name("exhibits.toml").read_text(encoding="utf-8")
    for fields in tomllib.loads(text)["exhibit"]:
        fields |= {name: " ".join(fields[name].split()) for name in PROSE}
        fields |= {"symptom": getattr(symptoms, fields["symptom"]), "tests": (*fields["tests"],)}
        yield Exhibit(**fields)


EXHIBITS = tuple(_read())
