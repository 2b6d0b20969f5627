"""A run on disk: FOLDER/requests.jsonl holds every request, FOLDER/summary.json the results.

Both are written point by point, so that an interrupted run keeps what it has measured. Times are
kept to the microsecond. Reading is strict: content that this version would not have written is
rejected, and the error says where it is.
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

from shared.errors import UserError
from shared.files import read_text

from .client import Record
from .load import Point
from .metrics import Slo, Summary, summarize

SCHEMA = 1  # of a folder
MOST_BYTES = 2**30  # of the requests: a million of them
KIND = "stage07_loadtest"
REQUESTS, SUMMARY = "requests.jsonl", "summary.json"
INFINITE = "inf"  # JSON has no infinity
DIGITS = 6  # after the point of a second


# ---- writing ------------------------------------------------------------------------------------


class Writer:
    """Writes one run into a folder that has none yet."""

    def __init__(
        self,
        folder: Path,
        configuration: Mapping[str, Any],
        *,
        slo: Slo,
        seed: int,
        secret: str = "",
    ) -> None:
        """Make the folder. `configuration`: the options, for readers. `secret`: a key to hide in
        the recorded command line. Raises UserError if the folder holds a run or cannot be made."""
        self.folder, self.slo = folder, slo
        self.summaries: list[Summary] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = any((folder / name).exists() for name in (REQUESTS, SUMMARY))
        except OSError as error:
            raise UserError(
                f"The folder {folder} cannot be created or read ({error.strerror}): "
                "name another one with --out."
            ) from None
        if taken:
            raise UserError(
                f"{folder} already holds a run: name another folder with --out, or move that run."
            )
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder} is not writable: name another folder with --out.")
        from shared import measure  # imports PyTorch: the folder is checked first

        commit, dirty = measure.git_state()
        self.about = {
            "schema": SCHEMA,
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
        """Write one more point. Returns its summary as written, so that its charts equal those
        drawn from the file. Raises UserError if it cannot be written; earlier points stay."""
        summary, number = from_json(to_json(summarize(point, self.slo))), len(self.summaries)
        points = [*self.summaries, summary]
        content = self.about | {"results": [to_json(point) for point in points]}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        part = self.folder / f"{SUMMARY}.{os.getpid()}.part"
        try:
            with (self.folder / REQUESTS).open("a", encoding="utf-8", newline="\n") as file:
                file.write(request_lines(number, point.records))
            part.write_text(text, encoding="utf-8", newline="\n")
            part.replace(self.folder / SUMMARY)
        except OSError as error:
            raise UserError(
                f"The run cannot be written to {self.folder} ({error.strerror}): "
                "free some space, and run again."
            ) from None
        finally:
            part.unlink(missing_ok=True)
        self.summaries = points
        return summary


def request_lines(number: int, records: Sequence[Record]) -> str:
    """The requests of one point, one line of JSON each."""
    return "".join(
        json.dumps({"point": number} | encode(asdict(record)), allow_nan=False) + "\n"
        for record in records
    )


def without(secret: str, command: str) -> str:
    """The command line with the key replaced by "hidden"."""
    if not secret:
        return command
    return shlex.join(
        word.removesuffix(secret) + "hidden"
        if word == secret or word.endswith(f"={secret}")
        else word
        for word in shlex.split(command)
    )


def to_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values; `from_json` is the inverse."""
    return encode(asdict(summary))


def encode(value: Any) -> Any:
    """`value` with infinity as a string and floats rounded. Raises ValueError for NaN."""
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError("a measurement is NaN")
        return INFINITE if value == math.inf else round(value, DIGITS)
    return value


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The content of summary.json."""

    about: dict[str, Any]  # command, commit, machine, versions, seed, configuration and so on
    points: list[Summary]


def load(folder: Path) -> Run:
    """Raises UserError if the run is missing, damaged, or of another version."""
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(
            f"{folder} holds no run ({SUMMARY} is missing): "
            f"write one with python -m {KIND} --out {folder}."
        )
    from shared import measure

    about = measure.load(path, SCHEMA)
    points = about.pop("results", None)
    if about.get("kind") != KIND or not isinstance(points, list):
        raise UserError(
            f"{path} is not from a load test: name a folder written by python -m {KIND} --out."
        )
    try:
        return Run(
            about, [from_json(point, f"results[{number}]") for number, point in enumerate(points)]
        )
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run the load test again.") from None


def load_requests(folder: Path) -> list[list[Record]]:
    """The records of each point. Raises UserError with the line if something is missing or
    damaged."""
    path = folder / REQUESTS
    try:
        text = read_text(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(
            f"{path} cannot be read ({reason}): name a folder written by python -m {KIND} --out."
        ) from None
    points: list[list[Record]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("not a request")
            point = decode(int, content.pop("point", None), "point")
            if point == len(points):
                points.append([])
            if point != len(points) - 1:
                raise ValueError(f"point {point} does not follow point {len(points) - 1}")
            points[point].append(decode(Record, content, "request"))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}): "
                "delete the line, or run the load test again."
            ) from None
    return points


def from_json(value: Any, where: str = "point") -> Summary:
    """The inverse of `to_json`. Raises ValueError that names what is invalid, and where."""
    summary: Summary = decode(Summary, value, where)
    return summary


def decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as the type `kind`: a dataclass with exactly its fields, a list, a dict, or a plain
    value. Raises ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # a type or None
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return decode(kind, value, where)
    if is_dataclass(kind):
        _check(isinstance(value, dict), where, "not an object")
        names = [field.name for field in fields(kind)]
        for name in sorted({*names} ^ {*value}):
            raise ValueError(f"{where}.{name} is {'missing' if name in names else 'unknown'}")
        hints = types_of(kind)  # type: ignore[arg-type]
        values = {name: decode(hints[name], value[name], f"{where}.{name}") for name in names}
        return kind(**values)  # type: ignore[operator]
    if origin is list:
        _check(isinstance(value, list), where, "not a list")
        return [
            decode(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)
        ]
    if origin is dict:
        _check(isinstance(value, dict), where, "not an object")
        return {name: decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float and value == INFINITE:
        return math.inf
    plain = isinstance(value, int | float if kind is float else kind)
    valid = plain and (kind is bool or not isinstance(value, bool))
    _check(valid, where, f"not {'an' if kind is int else 'a'} {kind.__name__}")
    return float(value) if kind is float else value


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, evaluated once: evaluating takes longer than decoding."""
    return get_type_hints(kind)


def _check(valid: bool, where: str, problem: str) -> None:
    if not valid:
        raise ValueError(f"{where} is {problem}")
