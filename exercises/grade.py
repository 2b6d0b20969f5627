"""Grade what a class has handed in: patches, zip files and folders, one command for all.

Each task is judged by the bodies of its functions in a clean tree: full marks need exactly the
tests of the reference's run, each with the same outcome; and one more, with a random name, that
must fail. What is aimed at these very checks from inside the process can still forge them: see
INSTRUCTORS.md.

For each hand-in OUT/NAME.json has the results in Gradescope's format, and OUT/grades.csv the
points of all. What is graded there already, and has not changed, is not judged again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from shared import paths
from shared.errors import UserError

from . import running, tasks
from .running import Run, Sandbox
from .splice import Refused, splice
from .tasks import Task

LEAST, PATIENCE = 60.0, 5.0  # seconds of a run, and times those of the reference
MOST_BYTES = 2**20  # of a file with functions
UNUSUAL = r"\b(?:sys|os|pytest|inspect|gc|open|eval|exec|importlib)\b|\b__(?!init__)"
UNUSUAL += r"|\b(?:from|import) +(?:\.|shared|stage)[\w.]*"


class Judge:
    """Judges tasks by the outcomes of the reference's run of their stage."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.seed = sandbox, 1 + secrets.randbelow(2**31 - 1)
        self.must_fail = f"test_{secrets.token_hex(6)}"
        self._references: dict[str, Run] = {}
        self._lock = threading.Lock()

    def judge(self, task: Task, submitted: str) -> tuple[str, list[str]]:
        """Why a task has not passed, "" if it has; and what a reader should know."""
        reference = tasks.source(task.file)
        try:
            source, notes = splice(reference, submitted, task.functions, task.others())
        except (Refused, RecursionError) as error:
            return str(error), []
        if unusual := {*re.findall(UNUSUAL, submitted)} - {*re.findall(UNUSUAL, reference)}:
            notes.append(f"to read: it uses {', '.join(sorted(unusual))}")
        expected = self._reference(task.stage)
        seconds = max(LEAST, PATIENCE * expected.seconds)
        changed, options = {task.file: source}, {"first": task.tests, "read_only": True}
        run = self._run(task.stage, changed, seconds, **options)
        for test, outcome in run.outcomes.items():
            if outcome != expected.outcomes.get(test):
                return f"{test.rpartition('::')[2]}: {run.reasons[test] or outcome}", notes
        if run.ended or run.outcomes != expected.outcomes:
            return run.ended or "its process ended before its tests did", notes
        return "", notes

    def _reference(self, stage: str) -> Run:
        with self._lock:  # only the first task of a stage runs it
            if stage not in self._references:
                run = self._run(stage, {}, 1800)
                failed = [test for test, outcome in run.outcomes.items() if outcome == "failed"]
                if run.ended or failed != [f"{self.must_fail}.py::{self.must_fail}"]:
                    raise UserError(f"The project's own {stage} fails: {run.ended or run.failures}")
                self._references[stage] = run
            return self._references[stage]

    def _run(self, stage: str, changed: dict[str, str], seconds: float, **options: Any) -> Run:
        """Run a stage's suite to the first test that fails: at the latest the last, which must."""
        name = self.must_fail
        changed |= {f"{name}.py": f"def {name}():\n    assert '{name}' == ''\n"}
        tests = ["-x", f"{stage}/tests", f"{name}.py"]
        return self.sandbox.run(tests, changed, seconds, seed=self.seed, **options)


def main(options: argparse.Namespace) -> int:
    container = "" if options.unconfined else running.container()
    stages = [tasks.find_stage(stage) for stage in options.stage] or paths.discover()
    chosen = [task for stage in stages for task in tasks.read(stage)]
    hand_ins = [path for name in options.hand_ins for path in find(Path(name))]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        Path(cache).chmod(0o777)  # the user of an image is another one
        run = partial(grade, Judge(Sandbox(container, Path(cache))), chosen, out)
        rows = thread_map(run, hand_ins, max_workers=options.jobs, disable=None)
    with (out / "grades.csv").open("w", newline="", encoding="utf-8") as file:
        head = ["name", "points", *(task.name for task in chosen)]
        csv.writer(file).writerows([head, *sorted(rows)])
    return 0


def find(path: Path) -> list[Path]:
    """The hand-ins that an argument names: one, or all in a folder. Each is a patch, a zip file,
    or a folder that has stages somewhere. Raises UserError if there is none."""
    if path.is_file() or any((path / stage).is_dir() for stage in paths.discover()):
        return [path]
    packed = (".patch", ".diff", ".zip")
    hand_ins = [p for p in sorted(path.glob("[!.]*")) if p.is_dir() or p.suffix in packed]
    if not hand_ins:
        raise UserError(f"No hand-in is in {path}: give patches of git diff, zip files or folders.")
    return hand_ins


def name_of(hand_in: Path) -> str:
    """The student's, which may have dots."""
    return hand_in.name if hand_in.is_dir() else hand_in.stem


def grade(judge: Judge, chosen: list[Task], out: Path, hand_in: Path) -> list[Any]:
    """The name of a hand-in, its points and those of each task, of results that are in `out`."""
    path, texts, broken = out / f"{name_of(hand_in)}.json", dict[str, str](), ""
    try:
        texts = handed_in(hand_in, {task.file for task in chosen})
    except Exception as error:  # whatever is wrong with it, the others are graded
        broken = f"it cannot be read: {error}"
    parts = [chosen, sorted(texts.items()), broken, *(tasks.source(task.file) for task in chosen)]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"extra_data": {}}
    if result["extra_data"].get("digest") != digest:
        result = {"tests": [], "extra_data": {"digest": digest, "seed": judge.seed}}
        for task in chosen:
            why, notes = broken or f"no {task.file}, a file of at most 1 MiB, is in the hand-in", []
            if task.file in texts:
                why, notes = judge.judge(task, texts[task.file])
            result["tests"].append(
                {
                    "name": f"{task.name}: {task.title}",
                    "score": 0 if why else task.points,
                    "max_score": task.points,
                    "output": "\n".join(filter(None, [why, *notes])),
                }
            )
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    scores = [test["score"] for test in result["tests"]]
    tqdm.write(f"{sum(scores):4} of {sum(task.points for task in chosen)}  {name_of(hand_in)}")
    return [name_of(hand_in), sum(scores), *scores]


def handed_in(hand_in: Path, files: set[str]) -> dict[str, str]:
    """The files of the tasks that a hand-in has; those that a patch does not change are the
    project's. It may be anything, so nothing is read that is large or lies elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        root = hand_in if hand_in.is_dir() else Path(folder)
        if root != hand_in and hand_in.suffix == ".zip":
            with zipfile.ZipFile(hand_in) as archive:
                small = (entry for entry in archive.infolist() if entry.file_size <= MOST_BYTES)
                wanted = [entry for entry in small if entry.filename.endswith(tuple(files))]
                archive.extractall(root, wanted[: 9 * len(files)])
        elif root != hand_in:
            patch(hand_in, root, files)
        texts = {}
        for file in files:
            path = min(root.rglob(file), key=lambda place: len(place.parts), default=root)
            inside = path.is_file() and path.resolve().is_relative_to(root.resolve())  # no link out
            if inside and path.stat().st_size <= MOST_BYTES:
                texts[file] = path.read_text(encoding="utf-8", errors="replace")
        return texts


def patch(hand_in: Path, root: Path, files: set[str]) -> None:
    """Apply a patch to a copy of the tasks' files. Raises ValueError if it does not fit."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(paths.ROOT / file, root / file)
    only = [f"--include={file}" for file in files]
    words = ["git", "apply", "--whitespace=nowarn", *only, str(hand_in.resolve())]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"it does not fit this version: {done.stderr.strip()}")
