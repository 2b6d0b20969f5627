"""Grade what a class has handed in: patches, zip files and folders, one command for all. And for
authors, prove that tasks and edits are good.

Each task is judged by the bodies of its functions in a clean tree: full marks need exactly the
tests of the reference's run, each with the same outcome; and one more, with a random name, that
must fail. What is aimed at these very checks from inside the process can still forge them: see
INSTRUCTORS.md.

For each hand-in OUT/NAME.json has the results in Gradescope's format, and OUT/grades.csv the
points of all. What is graded there already, and has not changed, is not judged again.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import secrets
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from shared import paths
from shared.errors import UserError

from . import running, tasks
from .running import Run
from .splice import Refused
from .tasks import Task

LEAST, PATIENCE = 60.0, 5.0  # seconds of a run, and times those of the reference
MOST_BYTES = 2**20  # of a file with functions
PACKED = (".patch", ".diff", ".zip")
UNUSUAL = r"\b(?:sys|os|pytest|inspect|gc|open|eval|exec|importlib)\b|\b__(?!init__)"
UNUSUAL += r"|\b(?:from|import) +(?:\.|shared|stage)[\w.]*"
Job = tuple[str, str, str, list[str], bool]  # name, a file, its text, tests, whether each must fail


class Judge:
    """Judges tasks by the outcomes of the reference's run of their stage."""

    def __init__(self, container: str) -> None:
        self.container, self.seed = container, 1 + secrets.randbelow(2**31 - 1)
        self.must_fail = f"test_{secrets.token_hex(6)}"
        self.references: dict[str, Run] = {}

    def judge(self, task: Task, submitted: str) -> tuple[str, list[str]]:
        """Why a task has not passed, "" if it has; and what a reader should know."""
        reference = tasks.source(task.file)
        try:
            source, notes = task.taken(submitted, reference)
        except (Refused, RecursionError) as error:
            return str(error), []
        if unusual := {*re.findall(UNUSUAL, submitted)} - {*re.findall(UNUSUAL, reference)}:
            notes.append(f"to read: it uses {', '.join(sorted(unusual))}")
        expected = self._reference(task.stage)
        seconds = max(LEAST, PATIENCE * expected.seconds)
        run = self._run(task.stage, {task.file: source}, seconds, first=task.tests)
        for test, outcome in run.outcomes.items():
            if outcome != expected.outcomes.get(test):
                return f"{test.rpartition('::')[2]}: {run.reasons[test] or outcome}", notes
        if run.ended or run.outcomes != expected.outcomes:
            return run.ended or "its process ended before its tests did", notes
        return "", notes

    def _reference(self, stage: str) -> Run:
        if stage not in self.references:  # two threads may both run it
            run = self._run(stage, {}, 1800)
            failed = [test for test, outcome in run.outcomes.items() if outcome == "failed"]
            if run.ended or failed != [f"{self.must_fail}.py::{self.must_fail}"]:
                raise UserError(f"The project's own {stage} fails: {run.ended or run.failures}")
            self.references[stage] = run
        return self.references[stage]

    def _run(self, stage: str, changed: dict[str, str], seconds: float, **options: Any) -> Run:
        """Run a stage's suite to the first test that fails: at the latest the last, which must."""
        name = self.must_fail
        changed |= {f"{name}.py": f"def {name}():\n    assert '{name}' == ''\n"}
        tests = ["-x", f"{stage}/tests", f"{name}.py"]
        return running.contained(self.container, tests, changed, seconds, seed=self.seed, **options)


def grade(hand_ins: list[str], stages: list[str], out: str, jobs: int, unconfined: bool) -> None:
    """Grade what was handed in."""
    chosen = [task for stage in tasks.stages(stages) for task in tasks.read(stage)]
    places = [path for name in hand_ins for path in find(Path(name))]
    folder, judge = Path(out), Judge("" if unconfined else running.container())
    folder.mkdir(parents=True, exist_ok=True)
    run = partial(graded, judge, chosen, folder)
    rows = thread_map(run, places, max_workers=jobs, disable=None)
    with (folder / "grades.csv").open("w", newline="", encoding="utf-8") as file:
        head = ["name", "points", *(task.name for task in chosen)]
        csv.writer(file).writerows([head, *sorted(rows)])


def find(path: Path) -> list[Path]:
    """The hand-ins that an argument names: one, or all in a folder. Each is a patch, a zip file,
    or a folder that has stages somewhere. Raises UserError if there is none."""
    if path.is_file() or any((path / stage).is_dir() for stage in paths.discover()):
        return [path]
    hand_ins = [p for p in sorted(path.glob("[!.]*")) if p.is_dir() or p.suffix in PACKED]
    if not hand_ins:
        raise UserError(f"No hand-in is in {path}: give patches of git diff, zip files or folders.")
    return hand_ins


def graded(judge: Judge, chosen: list[Task], out: Path, hand_in: Path) -> list[Any]:
    """The name of a hand-in, its points and those of each task, of results that are in `out`."""
    name = hand_in.stem if hand_in.suffix in PACKED else hand_in.name
    path, texts, broken = out / f"{name}.json", dict[str, str](), ""
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
            output = "\n".join(filter(None, [why, *notes]))
            test = {"name": f"{task.name}: {task.title}", "output": output}
            test |= {"score": 0 if why else task.points, "max_score": task.points}
            result["tests"].append(test)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    scores = [test["score"] for test in result["tests"]]
    tqdm.write(f"{sum(scores):4} of {sum(task.points for task in chosen)}  {name}")
    return [name, sum(scores), *scores]


def handed_in(hand_in: Path, files: set[str]) -> dict[str, str]:
    """The files of the tasks that a hand-in has; those that a patch does not change are the
    project's. It may be anything, so nothing is read that is large or lies elsewhere. Raises
    ValueError for a patch that does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        root = hand_in if hand_in.is_dir() else Path(folder)
        if hand_in.suffix == ".zip":
            with zipfile.ZipFile(hand_in) as archive:
                small = (entry for entry in archive.infolist() if entry.file_size <= MOST_BYTES)
                wanted = [entry for entry in small if entry.filename.endswith(tuple(files))]
                archive.extractall(root, wanted[: 9 * len(files)])
        elif root != hand_in:
            words = ["git", "apply", "--whitespace=nowarn", str(hand_in.resolve())]
            for file in files:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(paths.ROOT / file, root / file)
                words.append(f"--include={file}")
            done = subprocess.run(words, cwd=root, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"it does not fit this version: {done.stderr.strip()}")
        texts = {}
        for file in files:
            path = min(root.rglob(file), key=lambda place: len(place.parts), default=root)
            inside = path.is_file() and path.resolve().is_relative_to(root.resolve())  # no link out
            if inside and path.stat().st_size <= MOST_BYTES:
                texts[file] = path.read_text(encoding="utf-8", errors="replace")
        return texts


def prove(stages: list[str], jobs: int) -> int:
    """For authors: do all edits and emptied tasks fail, and the references and right solutions
    pass, with uninitialized memory full of NaN? Takes minutes."""
    todo = [job for stage in tasks.stages(stages) for job in to_prove(stage)]
    results = thread_map(proved, todo, max_workers=jobs, disable=None)
    problems = [result for result in results if result]
    print("\n".join([*problems, f"{len(todo)} runs, {len(problems)} problems"]))
    return 1 if problems else 0


def to_prove(stage: str) -> Iterator[Job]:
    """The jobs of a stage. Raises UserError for an edit that does not fit its file."""
    known = tasks.read(stage)
    file, tests = known[0].file, [test for task in known for test in task.tests]
    yield f"{stage}: the reference", file, tasks.source(file), tests, False
    for task in known:
        empty = task.emptied(tasks.source(task.file))
        yield f"{task.name}: emptied", task.file, empty, task.tests, True
    for edit in tasks.edits(stage):
        source = edit.applied(tasks.source(edit.file))
        yield f"{edit.file}: {edit.what}", edit.file, source, edit.tests, edit.kind != "right"


def proved(job: Job) -> str:
    """What is wrong with a job, "" if nothing is."""
    name, file, source, tests, fails = job
    run = running.contained("", tests, {file: source}, 180, fill=not fails)
    if fails and (run.ended or any("::" not in test for test in run.failures)):
        return ""  # all tests fail with their process
    for test in tests:
        outcomes = {o for full, o in run.outcomes.items() if full.partition("[")[0] == test}
        if "failed" not in outcomes if fails else outcomes != {"passed"}:
            return f"{name}: {test}: {run.ended or run.failures or outcomes or 'did not run'}"
    return ""
