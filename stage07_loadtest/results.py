"""A run on disk: FOLDER/requests.jsonl holds every request, FOLDER/summary.json the results, and
FOLDER/latency.svg their chart. They are written point by point, so that an interrupted run keeps
what it has measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared import charts
from shared.errors import UserError

from .load import Point
from .metrics import E2E_INTENDED, TTFT_INTENDED, Summary

REQUESTS, SUMMARY, CHART = "requests.jsonl", "summary.json", "latency.svg"
INFINITE = "inf"  # JSON has no infinity


class Writer:
    """Writes one run into a folder that has none yet."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        """Make the folder. `configuration`: the options, for readers. Raises UserError if the
        folder holds a run or cannot be made."""
        self.folder, self.summaries = folder, list[Summary]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SUMMARY).exists():
                raise UserError(f"{folder} already holds a run: name another folder.")
            (folder / REQUESTS).write_text("", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"The folder {folder} cannot be written ({error.strerror}): name another one."
            ) from None
        from shared import measure  # imports PyTorch: the folder is checked first

        commit, dirty = measure.git_state()
        self.about = {"commit": commit, "dirty": dirty, "machine": measure.machine()}
        self.about |= {"versions": measure.versions(), "configuration": dict(configuration)}

    def add(self, point: Point, summary: Summary) -> None:
        """Write one more point."""
        number, self.summaries = len(self.summaries), [*self.summaries, summary]
        content = self.about | {"results": [encode(asdict(each)) for each in self.summaries]}
        with (self.folder / REQUESTS).open("a", encoding="utf-8") as file:
            for record in point.records:
                file.write(json.dumps({"point": number} | asdict(record)) + "\n")
        text = json.dumps(content, indent=1, allow_nan=False)
        (self.folder / SUMMARY).write_text(text + "\n", encoding="utf-8")

    def draw(self) -> None:
        """The chart of all points: what users wait, by load. No bar where it is infinite."""
        names = {"TTFT, p95": TTFT_INTENDED, "E2E latency, p95": E2E_INTENDED}
        series = {}
        for label, name in names.items():
            values = [point.at(name, 95, adjusted=True) for point in self.summaries]
            known = [math.nan if value in (None, math.inf) else value for value in values]
            if not all(map(math.isnan, known)):
                series[label] = known
        loads = [point.load for point in self.summaries]
        title = "What users wait, from the intended start"
        if series:
            figure = charts.bars(title, "s", loads, series, digits=2)
            (self.folder / CHART).write_bytes(charts.render(figure))


def encode(value: Any) -> Any:
    """`value` with infinity as a string."""
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    return INFINITE if value == math.inf else value
