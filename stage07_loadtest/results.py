"""A run on disk: FOLDER/requests.jsonl has every request as it was, FOLDER/summary.json what they say.

Both are written point by point, so that a run that is cut short keeps what it had measured. Times are kept to the microsecond.
Reading is strict: what this version would not have written is refused, with the place where it stands.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from shared import measure
from shared.errors import UserError

from .client import Record
from .load import Point
from .metrics import Slo, Summary, summarize

KIND = "stage07_loadtest"
REQUESTS, SUMMARY = "requests.jsonl", "summary.json"
INFINITE = "inf"  # JSON has no infinity
DIGITS = 6  # after the point of a second


# ---- writing --------------------------------------------------------------------------------------------------------


class Writer:
    """Writes one run. Nothing that is in the folder already is written over."""

    def __init__(
        self,
        folder: Path,
        configuration: Mapping[str, Any],
        *,
        slo: Slo,
        seed: int,
        secret: str = "",
    ) -> None:
        """Make the folder. `configuration`: what was asked for, for readers. `secret`: a key, which is kept out of the command
        line that is written down. UserError if the folder holds a run, or cannot be made."""
        self.folder, self.slo = folder, slo
        self.summaries: list[Summary] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = any((folder / name).exists() for name in (REQUESTS, SUMMARY))
        except OSError as error:
            raise UserError(
                f"The folder {folder} cannot be made or read ({error.strerror}): name another one with --out."
            ) from None
        if taken:
            raise UserError(
                f"{folder} holds a run already: name another folder with --out, or move that one."
            )
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder} cannot be written: name another folder with --out.")
        commit, dirty = measure.git_state()
        self.about = {
            "schema": measure.SCHEMA,
            "kind": KIND,
            "command": without(secret, measure.command()),
            "commit": commit,
            "dirty": dirty,
            "machine": measure.machine(),
            "versions": measure.versions(),
            "seed": seed,
            "configuration": dict(configuration),
        }

    def add(self, point: Point) -> Summary:
        """Write one more point; returns its summary as it was written, so that charts of it are charts of the file. UserError if
        it cannot be written; what was written before stays."""
        summary, number = from_json(to_json(summarize(point, self.slo))), len(self.summaries)
        points = [*self.summaries, summary]
        text = (
            json.dumps(
                self.about | {"results": [to_json(each) for each in points]},
                indent=1,
                allow_nan=False,
            )
            + "\n"
        )
        part = self.folder / f"{SUMMARY}.{os.getpid()}.part"
        try:
            with (self.folder / REQUESTS).open("a", encoding="utf-8", newline="\n") as file:
                file.write(request_lines(number, point.records))
            part.write_text(text, encoding="utf-8", newline="\n")
            part.replace(self.folder / SUMMARY)
        except OSError as error:
            raise UserError(
                f"The run cannot be written to {self.folder} ({error.strerror}): make room, and run again."
            ) from None
        finally:
            part.unlink(missing_ok=True)
        self.summaries = points
        return summary


def request_lines(number: int, records: Sequence[Record]) -> str:
    """The requests of one point, a line of JSON each."""
    return "".join(
        json.dumps({"point": number} | encode(asdict(record)), allow_nan=False) + "\n"
        for record in records
    )


def without(secret: str, command: str) -> str:
    """A command line that does not tell the key that was in it."""
    if not secret:
        return command
    words = shlex.split(command)
    return shlex.join(
        word.removesuffix(secret) + "hidden"
        if word == secret or word.endswith(f"={secret}")
        else word
        for word in words
    )


def to_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON has it; `from_json` turns it back."""
    return encode(asdict(summary))


def encode(value: Any) -> Any:
    """`value` without infinity, and with no more digits than a clock has. Raises ValueError for what is not a number."""
    if isinstance(value, dict):
        return {name: encode(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError("a measurement that is not a number is a mistake")
        return INFINITE if value == math.inf else round(value, DIGITS)
    return value


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What summary.json says."""

    about: dict[str, Any]  # command, commit, machine, versions, seed, configuration and so on
    points: list[Summary]


def load(folder: Path) -> Run:
    """UserError if the run is absent, damaged, or of another version."""
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(
            f"{folder} holds no run: {SUMMARY} is not there. Write one with python -m {KIND} --out {folder}."
        )
    about = measure.load(path)
    points = about.pop("results", None)
    if about.get("kind") != KIND or not isinstance(points, list):
        raise UserError(
            f"{path} is not of a load test: name a folder that python -m {KIND} --out has written."
        )
    try:
        return Run(
            about, [from_json(point, f"results[{number}]") for number, point in enumerate(points)]
        )
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run the load test again.") from None


def load_requests(folder: Path) -> list[list[Record]]:
    """The records of each point. UserError, with the line, if something is absent or damaged."""
    path = folder / REQUESTS
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"{path} cannot be read ({why}): name a folder that python -m {KIND} --out has written."
        ) from None
    points: list[list[Record]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("it is no request")
            point = decode(int, content.pop("point", None), "point")
            if point == len(points):
                points.append([])
            if point != len(points) - 1:
                raise ValueError(f"point {point} does not follow point {len(points) - 1}")
            points[point].append(decode(Record, content, "request"))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}): delete the line, or run the load test again."
            ) from None
    return points


def from_json(value: Any, where: str = "point") -> Summary:
    """The summary that `to_json` turned into JSON. Raises ValueError that names what does not fit, and where."""
    found: Summary = decode(Summary, value, where)
    return found


def decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type `kind`: a dataclass with exactly its fields, a list, a dict, or a plain value. Raises ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # of something and None
        return (
            None
            if value is None
            else decode(
                next(each for each in arguments if each is not types.NoneType), value, where
            )
        )
    if is_dataclass(kind):
        _check(isinstance(value, dict), where, "no object")
        names = [each.name for each in fields(kind)]
        for name in sorted({*names} ^ {*value}):
            raise ValueError(f"{where}.{name} is {'missing' if name in names else 'unknown'}")
        hints = types_of(kind)  # type: ignore[arg-type]
        return kind(**{name: decode(hints[name], value[name], f"{where}.{name}") for name in names})  # type: ignore[operator]
    if origin is list:
        _check(isinstance(value, list), where, "no list")
        return [
            decode(arguments[0], each, f"{where}[{number}]") for number, each in enumerate(value)
        ]
    if origin is dict:
        _check(isinstance(value, dict), where, "no object")
        return {name: decode(arguments[1], each, f"{where}.{name}") for name, each in value.items()}
    if kind is float and value == INFINITE:
        return math.inf
    plain = isinstance(value, int | float if kind is float else kind)
    _check(plain and (kind is bool or not isinstance(value, bool)), where, f"no {kind.__name__}")
    return float(value) if kind is float else value


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields: read from the source once, for that takes longer than all else here."""
    return get_type_hints(kind)


def _check(good: bool, where: str, problem: str) -> None:
    if not good:
        raise ValueError(f"{where} is {problem}")
