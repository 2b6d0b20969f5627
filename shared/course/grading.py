"""Grading: the tasks of a submission, each judged by judge.py, and the results as files.

A submission is a folder by an unknown author. From it comes only the one file that a task is about,
which runs nowhere but in a contained process. All else here is about points and their reports.
"""

from __future__ import annotations

import contextlib
import csv
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import paths
from ..errors import UserError
from ..task import Task
from . import gate, mine
from .judge import Extra, Judge

MOST_BYTES = 2**20  # of a submitted file
JOBS = 2  # tasks that are judged at the same time


@dataclass(frozen=True)
class Verdict:
    """The result of one task. why: "" if it passed, else the reason, for the student. note: what
    the instructor may want to read in the file."""

    stage: str
    task: Task
    passed: bool
    why: str
    seconds: float
    note: str = ""

    @property
    def name(self) -> str:
        return f"{mine.label(self.stage, self.task)}: {self.task.title}"

    @property
    def points(self) -> int:
        """All of a task's points or none: half a function is no function."""
        return self.task.points if self.passed else 0


def grade(
    judge: Judge, chosen: Sequence[str], submission: Path, extra: Extra | None = None
) -> Iterator[Verdict]:
    """Judge all tasks of some stages, in order.

    submission: a folder of stages, like mine/, or the folder with the files of the one chosen
        stage; what it lacks gets no points. extra: one more task. Raises UserError if there is no
        such folder.
    """
    if not submission.is_dir():
        raise UserError(f"There is no folder {submission}: name the submission's, such as mine.")
    for stage in chosen:
        if not (paths.ROOT / stage / "drivers.py").is_file():
            raise UserError(f"{stage} has no drivers.py to judge its tasks: name other stages.")
    folders = {stage: submitted(submission, stage, alone=len(chosen) == 1) for stage in chosen}
    tasks: list[tuple[str, Task, Extra | None]] = []
    for stage in chosen:
        tasks += [(stage, task, None) for task in mine.tasks(stage)]
        if extra is not None and extra.stage == stage:
            tasks.append((stage, extra.task, extra))

    def judged(entry: tuple[str, Task, Extra | None]) -> Verdict:
        stage, task, added = entry
        started = time.monotonic()
        source, why = file_of(folders[stage], task.file)
        note = ""
        if not why:
            why = judge.why(stage, task, source, added)
            note = gate.remark(source, stage, task.file) if added is None else ""
        return Verdict(stage, task, not why, why, time.monotonic() - started, note)

    with ThreadPoolExecutor(JOBS if judge.confined else 1) as pool:
        try:
            yield from pool.map(judged, tasks)
        except BaseException:  # Ctrl-C: a submission that sleeps would hold it up for minutes
            judge.stopped.set()
            raise


def submitted(submission: Path, stage: str, alone: bool) -> Path | None:
    """The folder of a submission that holds a stage's files."""
    places = [submission / stage, submission / "mine" / stage, *([submission] if alone else [])]
    wanted, root = mine.files(stage), submission.resolve()
    for place in places:
        with contextlib.suppress(OSError, RuntimeError):  # not ours to read, or links in a circle
            inside = place.resolve().is_relative_to(root)  # a link must not lead to the reference
            if inside and any((place / name).is_file() for name in wanted):
                return place
    return None


def file_of(folder: Path | None, name: str) -> tuple[bytes, str]:
    """A file in a submission, or why it cannot be judged."""
    path = None if folder is None else folder / name
    try:
        if folder is None or path is None or not path.is_file():
            return b"", f"There is no {name} in the submission."
        if path.resolve() != folder.resolve() / name or path.stat().st_size > MOST_BYTES:
            return b"", f"{name} is a link, or larger than {MOST_BYTES // 1024} KiB."
        return path.read_bytes(), ""
    except OSError as error:
        return b"", f"{name} cannot be read: {error.strerror}."


def grade_class(
    judge: Judge, chosen: Sequence[str], submissions: Path, out: Path
) -> dict[str, int]:
    """Grade every folder in `submissions`: a file of results for each in `out`, and all points in
    grades.csv. What is in `out` already is kept, so that an interrupted run goes on. Returns the
    points by name. Raises UserError if what is there is of other stages."""
    if not submissions.is_dir():
        raise UserError(f"There is no folder {submissions}: name the one of all submissions.")
    out.mkdir(parents=True, exist_ok=True)
    folders = sorted(p for p in submissions.iterdir() if p.is_dir() and not p.is_symlink())
    folders = [folder for folder in folders if folder.resolve() != out.resolve()]
    chosen = sorted(chosen)  # results are in this order
    numbers = [number_of(stage, task) for stage in chosen for task in mine.tasks(stage)]
    results: dict[str, Any] = {}
    for folder in folders:
        if (path := out / f"{folder.name}.json").is_file():
            results[folder.name] = json.loads(path.read_text("utf-8"))
            if [test["number"] for test in results[folder.name]["tests"]] != numbers:
                raise UserError(f"{path} has results of other stages: name another folder.")
    todo = [folder for folder in folders if folder.name not in results]
    with tqdm(total=len(todo) * len(numbers), unit="task", disable=None) as bar:
        for folder in todo:
            bar.set_description(folder.name[:20])
            verdicts = []
            for verdict in grade(judge, chosen, folder):
                verdicts.append(verdict)
                bar.update()
            results[folder.name] = gradescope(verdicts)
            write(out / f"{folder.name}.json", json.dumps(results[folder.name], indent=2) + "\n")
    # A name may be no text: some other system's bytes.
    with open(
        out / "grades.csv", "w", newline="", encoding="utf-8", errors="backslashreplace"
    ) as file:
        rows = csv.writer(file)
        rows.writerow(["submission", "score", *numbers])
        for name, result in sorted(results.items()):
            scores = [test["score"] for test in result["tests"]]
            rows.writerow([name, result["score"], *scores])
    return {name: int(result["score"]) for name, result in sorted(results.items())}


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


# ---- results ----


def number_of(stage: str, task: Task) -> str:
    """The number of a task among those of all stages: "4.1"."""
    return f"{int(stage[5:7])}.{task.number}"


def gradescope(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The content of Gradescope's /autograder/results/results.json."""
    verdicts = list(verdicts)
    return {
        "score": sum(verdict.points for verdict in verdicts),
        "execution_time": round(sum(verdict.seconds for verdict in verdicts)),
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": verdict.name,
                "number": number_of(verdict.stage, verdict.task),
                "score": verdict.points,
                "max_score": verdict.task.points,
                "status": "passed" if verdict.passed else "failed",
                "output": verdict.why or "As the reference, for every seed.",
                "visibility": "visible",
            }
            for verdict in verdicts
        ],
    }


def junit(verdicts: Iterable[Verdict]) -> str:
    """JUnit XML: a suite for each stage, a case for each task, its points as a property."""
    root, by_stage = ET.Element("testsuites"), dict[str, list[Verdict]]()
    for verdict in verdicts:
        by_stage.setdefault(verdict.stage, []).append(verdict)
    for stage, judged in by_stage.items():
        counts = {
            "tests": str(len(judged)),
            "failures": str(sum(not verdict.passed for verdict in judged)),
            "errors": "0",
            "skipped": "0",
            "time": f"{sum(verdict.seconds for verdict in judged):.1f}",
        }
        suite = ET.SubElement(root, "testsuite", {"name": stage, **counts})
        for verdict in judged:
            seconds, points = f"{verdict.seconds:.1f}", (verdict.points, verdict.task.points)
            case = ET.SubElement(
                suite, "testcase", classname=stage, name=verdict.name, time=seconds
            )
            properties = ET.SubElement(case, "properties")
            for name, value in zip(("points", "max_points"), points, strict=True):
                ET.SubElement(properties, "property", name=name, value=str(value))
            if not verdict.passed:
                first = verdict.why.partition("\n")[0]
                ET.SubElement(case, "failure", message=first).text = verdict.why
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
