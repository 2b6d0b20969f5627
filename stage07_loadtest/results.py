"""A run on disk: FOLDER/requests.jsonl holds every request, FOLDER/summary.json the results, and
FOLDER/latency.svg their chart. They are written point by point, so that an interrupted run keeps
what it has measured. Times are kept to the microsecond."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shared import charts
from shared.errors import UserError

from .client import Record
from .load import Point
from .metrics import E2E_INTENDED, TTFT_INTENDED, Slo, Summary, summarize

REQUESTS, SUMMARY, CHART = "requests.jsonl", "summary.json", "latency.svg"
INFINITE = "inf"  # JSON has no infinity
DIGITS = 6  # after the point of a second
SUMMARIES = TypeAdapter(Summary)


class Writer:
    """Writes one run into a folder that has none yet."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], slo: Slo) -> None:
        """Make the folder. `configuration`: the options, for readers. Raises UserError if the
        folder holds a run or cannot be made."""
        self.folder, self.slo, self.summaries = folder, slo, list[Summary]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SUMMARY).exists():
                raise UserError(f"{folder} already holds a run: name another folder with --out.")
            (folder / REQUESTS).touch()
        except OSError as error:
            raise UserError(
                f"The folder {folder} cannot be written ({error.strerror}): name another one with "
                "--out."
            ) from None
        from shared import measure  # imports PyTorch: the folder is checked first

        commit, dirty = measure.git_state()
        self.about = {"commit": commit, "dirty": dirty, "machine": measure.machine()}
        self.about |= {"versions": measure.versions(), "configuration": dict(configuration)}

    def add(self, point: Point) -> Summary:
        """Write one more point. Returns its summary. Raises UserError if it cannot be written;
        earlier points stay."""
        summary = summarize(point, self.slo)
        points = [*self.summaries, summary]
        content = self.about | {"results": [to_json(point) for point in points]}
        try:
            with (self.folder / REQUESTS).open("a", encoding="utf-8") as file:
                file.write(request_lines(len(self.summaries), point.records))
            text = json.dumps(content, indent=1, allow_nan=False)
            (self.folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"The run cannot be written to {self.folder} ({error.strerror}): free some space, "
                "and run again."
            ) from None
        self.summaries = points
        return summary

    def draw(self) -> None:
        """The chart of all points: what users wait, by load."""
        names = {"TTFT, p95": TTFT_INTENDED, "E2E latency, p95": E2E_INTENDED}
        series = {label: [self._shown(point, name) for point in self.summaries]
                  for label, name in names.items()}  # fmt: skip
        loads = [point.load for point in self.summaries]
        title = "What users wait, from the intended start"
        charts.save(charts.bars(title, "s", loads, series, digits=2), self.folder / CHART)

    def _shown(self, point: Summary, name: str) -> float:
        """The p95 of a latency; NaN, which is not drawn, if there is none or it is infinite."""
        value = point.at(name, 95, adjusted=True)
        return math.nan if value is None or math.isinf(value) else value


def request_lines(number: int, records: Sequence[Record]) -> str:
    """The requests of one point, one line of JSON each."""
    lines = [{"point": number} | encode(asdict(record)) for record in records]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def to_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values; `from_json` is the inverse."""
    values: dict[str, Any] = encode(asdict(summary))
    return values


def from_json(values: Any) -> Summary:
    """The inverse of `to_json`. Raises ValueError."""
    return SUMMARIES.validate_python(values)


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
