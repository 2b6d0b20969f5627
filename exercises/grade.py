"""Grade what a class has handed in: patches, zip files and folders, one command for all.

Each task is judged by the bodies of its functions in a clean tree of `shared` and the stages up to
its own: full marks need exactly the tests of the reference's run, each with the same outcome; and
one more, with a random name, that must fail. What is aimed at these very checks from inside the
process can still forge them: see INSTRUCTORS.md.

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
import textwrap
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared import paths
from shared.errors import UserError

from . import running, tasks
from .running import Run
from .splice import Refused, splice
from .tasks import Task

LEFT_OUT = shutil.ignore_patterns(*(".*", "__pycache__", "*.md", "*.ipynb", "*.svg", "*.png"))
LEAST, PATIENCE = 60.0, 5.0  # seconds of a run, and times those of the reference
MOST_BYTES = 2**20  # of a file with functions
UNUSUAL = re.compile(r"\b(?:sys|os|pytest|inspect|gc|open|eval|exec|importlib)\b|\b__(?!init__)")


def build(tree: Path, stage: str) -> None:
    """A clean tree: `shared` and the stages up to this one, with nothing that shows a solution."""
    tree.mkdir(parents=True)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy2(paths.ROOT / name, tree / name)
    for name in ("shared", *(s for s in paths.discover() if s <= stage)):
        shutil.copytree(paths.ROOT / name, tree / name, ignore=LEFT_OUT)


class Judge:
    """Judges tasks, within `home`, an empty folder. container: of `running`."""

    def __init__(self, home: Path, container: str) -> None:
        self.container, self.home, self.cache = container, home, home / "cache"
        self.cache.mkdir()
        home.chmod(0o755)
        self.cache.chmod(0o777)  # the reference's runs write here, and no hand-in's
        self.seed = 1 + secrets.randbelow(2**31 - 1)
        self._references: dict[str, Run] = {}
        self._lock = threading.Lock()

    def judge(self, task: Task, submitted: str) -> tuple[str, list[str]]:
        """Why a task has not passed, "" if it has; and what a reader should know."""
        reference = tasks.source(task.file)
        try:
            source, notes = splice(reference, submitted, task.functions, task.others())
        except Refused as error:
            return str(error), []
        left, right = (set(UNUSUAL.findall(text)) for text in (reference, submitted))
        if right - left:
            notes.append(f"to read: it uses {', '.join(sorted(right - left))}")
        return self._verdict(task, source), notes

    def _verdict(self, task: Task, source: str) -> str:
        with self._lock:  # only the first task of a stage runs the reference
            if task.stage not in self._references:
                run, must_fail = self._run(task, tasks.source(task.file), 1800, keep=True)
                failed = [why for outcome, why in run.outcomes.values() if outcome == "failed"]
                if run.ended or len(failed) != 1 or not run.outcomes.pop(must_fail, None):
                    why = run.ended or "; ".join(failed)
                    raise UserError(f"The project's own {task.stage} fails: {why}")
                self._references[task.stage] = run
            reference = self._references[task.stage]
        run, must_fail = self._run(task, source, max(LEAST, PATIENCE * reference.seconds))
        if run.ended:
            return run.ended
        expected = {test: outcome for test, (outcome, _) in reference.outcomes.items()}
        expected[must_fail] = "failed"
        outcomes = {test: outcome for test, (outcome, _) in run.outcomes.items()}
        for test, outcome in outcomes.items():
            if outcome != expected.get(test) and test != must_fail:
                return f"{test.rpartition('::')[2]}: {run.outcomes[test][1] or outcome}"
        return "" if outcomes == expected else "its results are not those of the tests"

    def _run(self, task: Task, source: str, seconds: float, keep: bool = False) -> tuple[Run, str]:
        """Run the suite of the task's stage in a fresh tree, the task's own tests first, to the
        first that fails. Also returns the id of the test that must fail, which is the last."""
        name = secrets.token_hex(6)
        tree = self.home / name / "tree"
        file = f"{task.stage}/tests/test_{name}.py"
        test = f"{file}::test_{name}"
        job = {"tests": [f"{task.stage}/tests"], "seed": self.seed, "first": task.tests}
        job |= {"last": test, "options": ["-x"]}
        try:
            build(tree, task.stage)
            (tree / task.file).write_text(source, encoding="utf-8")
            (tree / file).write_text(f"def test_{name}():\n    assert '{name}' == ''\n")
            run = running.contained(self.container, job, tree, self.cache, seconds, keep)
            return run, test
        finally:
            shutil.rmtree(tree.parent, ignore_errors=True)


def main(options: argparse.Namespace) -> int:
    container = "" if options.unconfined else running.container()
    stages = [tasks.find_stage(stage) for stage in options.stage] or paths.discover()
    chosen = [task for stage in stages for task in tasks.read(stage)]
    hand_ins = [path for name in options.hand_ins for path in find(Path(name))]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        judge = Judge(Path(home), container)
        with ThreadPoolExecutor(options.jobs) as pool:
            grades = pool.map(lambda path: grade(judge, chosen, path, out), hand_ins)
            progress = tqdm(grades, total=len(hand_ins), disable=None)
            for path, tests in zip(hand_ins, progress, strict=True):
                scores = [test["score"] for test in tests]
                rows.append([name_of(path), sum(scores), *scores])
                tqdm.write(f"{sum(scores):4} of {sum(x.points for x in chosen)}  {name_of(path)}")
    for test in tests if len(hand_ins) == 1 else []:
        print(f"  {test['score']:3} of {test['max_score']}  {test['name']}")
        print(textwrap.indent(test["output"], " " * 8))
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


def grade(judge: Judge, chosen: list[Task], hand_in: Path, out: Path) -> list[dict[str, Any]]:
    """The results of a hand-in, which are also written to `out`."""
    path, texts, broken = out / f"{name_of(hand_in)}.json", dict[str, str](), ""
    try:
        texts = handed_in(hand_in, {task.file for task in chosen})
    except Exception as error:  # whatever is wrong with it, the others are graded
        broken = f"it cannot be read: {error}"
    parts = [chosen, texts, broken, *(tasks.source(task.file) for task in chosen)]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["extra_data"]["digest"] == digest:
            return old["tests"]
    tests = []
    for task in chosen:
        why, notes = broken or f"no {task.file}, a file of at most 1 MiB, is in the hand-in", []
        if task.file in texts:
            why, notes = judge.judge(task, texts[task.file])
        tests.append(
            {
                "name": f"{task.name}: {task.title}",
                "score": 0 if why else task.points,
                "max_score": task.points,
                "status": "failed" if why else "passed",
                "output": "\n".join(filter(None, [why, *notes])),
            }
        )
    result = {"tests": tests, "extra_data": {"digest": digest, "seed": judge.seed}}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return tests


def handed_in(hand_in: Path, files: set[str]) -> dict[str, str]:
    """The files of the tasks that a hand-in has; those that a patch does not change are the
    project's. It may be anything, so nothing is read that is large or lies elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        root = hand_in if hand_in.is_dir() else Path(folder)
        if hand_in.suffix == ".zip" and hand_in.is_file():
            unzip(hand_in, root, files)
        elif hand_in.is_file():
            patch(hand_in, root, files)
        texts = {}
        for file in sorted(files):
            places = sorted(root.rglob(file), key=lambda path: len(path.parts))
            for path in (path for path in places[:1] if path.is_file()):
                inside = path.resolve().is_relative_to(root.resolve())  # links may lead outside
                if inside and path.stat().st_size <= MOST_BYTES:
                    texts[file] = path.read_text(encoding="utf-8", errors="replace")
        return texts


def unzip(hand_in: Path, root: Path, files: set[str]) -> None:
    """Extract the files of the tasks, but none that is larger unpacked than a file may be."""
    with zipfile.ZipFile(hand_in) as archive:
        for file in files:
            entries = [e for e in archive.infolist() if f"/{e.filename}".endswith(f"/{file}")]
            outer = min(entries, key=lambda entry: entry.filename.count("/"), default=None)
            if outer and outer.file_size <= MOST_BYTES:
                archive.extract(outer, root)


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
