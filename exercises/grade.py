"""Grade what a class has handed in: folders, zip files and patches, one command for all.

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
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from shared import paths
from shared.errors import UserError

from . import running, tasks
from .running import Run
from .splice import Refused, segment, splice
from .tasks import Task

LEFT_OUT = shutil.ignore_patterns(*(".*", "__pycache__", "*.md", "*.ipynb", "*.svg", "*.png"))
LEAST, PATIENCE = 60.0, 5.0  # seconds of a run, and times those of the reference
MOST_BYTES = 2**20  # of a file with functions
PACKED = (".zip", ".patch", ".diff")
UNUSUAL = re.compile(r"\b(?:sys|os|pytest|inspect|gc|open|eval|exec|importlib)\b|\b__(?!init__)")


def build(tree: Path, stage: str) -> None:
    """A clean tree: `shared` and the stages up to this one, with nothing that shows a solution."""
    tree.mkdir()
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy2(paths.ROOT / name, tree / name)
    for name in ("shared", *(s for s in paths.discover() if s <= stage)):
        shutil.copytree(paths.ROOT / name, tree / name, ignore=LEFT_OUT)


class Judge:
    """Judges tasks, within `home`, an empty folder. Raises UserError if nothing can contain what it
    runs."""

    def __init__(self, home: Path, confined: bool = True) -> None:
        self.container = running.container(confined)
        self.home, self.cache = home, home / "cache"
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
            same = [segment(reference, f) == segment(submitted, f) for f in task.functions]
            source, notes = splice(reference, submitted, task.functions, task.others())
        except Refused as error:
            return str(error), []
        if all(same):
            return "not done: its functions are the project's, to the letter", []
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
        expected = {test: outcome for test, (outcome, _) in reference.outcomes.items()}
        expected[must_fail] = "failed"
        for test, (outcome, why) in run.outcomes.items():
            if outcome != expected.get(test) and test != must_fail and not run.ended:
                return f"{test.rpartition('::')[2]}: {why or outcome}"
        outcomes = {test: outcome for test, (outcome, _) in run.outcomes.items()}
        if run.ended or outcomes == expected:
            return run.ended
        return "its results are not those of the tests"

    def _run(self, task: Task, source: str, seconds: float, keep: bool = False) -> tuple[Run, str]:
        """Run the suite of the task's stage in a fresh tree, the task's own tests first, to the
        first that fails. Also returns the id of the test that must fail, which is the last."""
        place = Path(tempfile.mkdtemp(dir=self.home))
        place.chmod(0o755)
        tree, name = place / "tree", secrets.token_hex(6)
        test = f"{task.stage}/tests/test_{name}.py"
        try:
            build(tree, task.stage)
            (tree / task.file).write_text(source, encoding="utf-8")
            (tree / test).write_text(f"def test_{name}():\n    assert '{name}' == ''\n")
            job = {"tests": [f"{task.stage}/tests"], "seed": self.seed, "first": task.tests}
            job |= {"last": f"{test}::test_{name}", "options": ["-x", "-m", "not slow and not gpu"]}
            run = running.contained(self.container, job, tree, self.cache, seconds, keep)
            return run, f"{test}::test_{name}"
        finally:
            shutil.rmtree(place, ignore_errors=True)


def main(options: argparse.Namespace) -> int:
    stages = [tasks.find_stage(stage) for stage in options.stage] or tasks.stages()
    chosen = [task for stage in stages for task in tasks.read(stage)]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    sources = list(find(options.hand_ins))
    results = {}
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as home:
        judge = Judge(Path(home), not options.unconfined)
        pool = ThreadPoolExecutor(options.jobs)
        grades = [pool.submit(grade, judge, chosen, source, out) for source in sources]
        try:
            for done in tqdm(as_completed(grades), total=len(grades), unit="hand-in", disable=None):
                name, tests = done.result()
                results[name] = tests
                points = sum(test["score"] for test in tests)
                tqdm.write(f"{points:4} of {sum(task.points for task in chosen)}  {name}")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for test in tests if len(results) == 1 else []:
        print(f"  {test['score']:3} of {test['max_score']}  {test['name']}")
        print(end="".join(f"        {line}\n" for line in test["output"].splitlines()))
    with (out / "grades.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "points", *(task.name for task in chosen)])
        for name, tests in sorted(results.items()):
            scores = [test["score"] for test in tests]
            writer.writerow([name, sum(scores), *scores])
    return 0


def find(names: list[str]) -> Iterator[Path]:
    """The hand-ins among the arguments: each a folder with stages in it, a zip file or a patch; or
    a folder that holds them. Raises UserError for what is none."""
    for path in map(Path, names):
        if not path.is_dir() and not (path.is_file() and path.suffix in PACKED):
            raise UserError(f"{path} is no hand-in: give a folder, a .zip, a .patch or a .diff.")
        inner = sorted(path.iterdir()) if path.is_dir() else []
        inner = [p for p in inner if p.suffix in PACKED or p.is_dir() and p.name[0] != "."]
        yield from inner if inner and not _has_stages(path) else [path]


def _has_stages(folder: Path) -> bool:
    return any((folder / stage).is_dir() for stage in paths.discover())


def grade(judge: Judge, chosen: list[Task], source: Path, out: Path) -> tuple[str, list[dict]]:
    """The name of a hand-in and its results, which are also written to `out`."""
    name = source.name if source.is_dir() else source.stem
    path = out / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        try:
            root = _opened(source, Path(folder), {task.file for task in chosen})
            texts = {task.file: _read(root / task.file) for task in chosen}
        except (OSError, UserError, zipfile.BadZipFile, RuntimeError) as error:
            texts = {
                task.file: UserError(f"{source.name} cannot be read: {error}") for task in chosen
            }
    ours = [tasks.source(file) for file in texts]
    digest = hashlib.sha256(repr((chosen, texts, ours)).encode()).hexdigest()
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["extra_data"]["digest"] == digest:
            return name, old["tests"]
    tests = []
    for task in chosen:
        text = texts[task.file]
        why, notes = (str(text), []) if isinstance(text, UserError) else judge.judge(task, text)
        tests.append(
            {
                "name": f"{task.name}: {task.title}",
                "score": 0 if why else task.points,
                "max_score": task.points,
                "status": "failed" if why else "passed",
                "output": "\n".join([*([why] if why else []), *notes]),
            }
        )
    result = {"tests": tests, "extra_data": {"digest": digest, "seed": judge.seed}}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return name, tests


def _opened(source: Path, folder: Path, files: set[str]) -> Path:
    """The folder of a hand-in in which its stages are. folder: to unpack it in. files: of tasks."""
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(tuple(files)) and entry.file_size <= MOST_BYTES:
                    archive.extract(entry, folder)
    elif source.is_file():
        # Files that the patch does not change are the project's: not done.
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(paths.ROOT / file, folder / file)
        only = [f"--include={file}" for file in files]
        words = ["git", "apply", "--whitespace=nowarn", *only, str(source.resolve())]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"it does not fit this version: {done.stderr.strip()}")
    else:
        folder = source
    inner = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())]
    return next(filter(_has_stages, inner), folder)


def _read(path: Path) -> str | UserError:
    """A file of a hand-in as text, or why there is none."""
    file = f"{path.parent.name}/{path.name}"
    if not path.is_file() or path.is_symlink():
        return UserError(f"{file} is not in the hand-in")
    if path.stat().st_size > MOST_BYTES:
        return UserError(f"{file} has more than {MOST_BYTES >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return UserError(f"{file} is not UTF-8")
