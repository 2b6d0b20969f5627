"""Grade what a class has handed in: folders, zip files and patches, one command for all.

For each hand-in OUT/NAME.json has the results in Gradescope's format, and OUT/grades.csv the
points of all. What is graded there already, and has not changed, is not judged again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared import paths
from shared.errors import UserError

from . import tasks
from .judge import Judge, Verdict
from .tasks import Task

MOST_BYTES = 2**20  # of a file with functions


def main(options: argparse.Namespace) -> int:
    stages = [tasks.find_stage(stage) for stage in options.stage] or tasks.stages()
    chosen = [task for stage in stages for task in tasks.read(stage)]
    if not chosen:
        raise UserError(f"{', '.join(stages)} has no tasks.")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    sources = list(find(options.hand_ins))
    with Judge(not options.unconfined, options.memory) as judge:
        pool = ThreadPoolExecutor(options.jobs)
        grades = [pool.submit(grade, judge, chosen, source, out) for source in sources]
        try:
            bar = tqdm(total=len(grades), unit="hand-in", disable=None)
            for done in as_completed(grades):
                name, result = done.result()
                points = sum(test["score"] for test in result["tests"])
                tqdm.write(f"{points:4} of {sum(task.points for task in chosen)}  {name}")
                if len(sources) == 1:
                    for test in result["tests"]:
                        tqdm.write(f"  {test['score']:3} of {test['max_score']}  {test['name']}")
                        for line in filter(None, test["output"].splitlines()):
                            tqdm.write(f"        {line}")
                bar.update()
            bar.close()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    table(out)
    return 0


def find(names: list[str]) -> Iterator[Path]:
    """The hand-ins among the arguments: each a folder with stages in it (at most one folder below),
    a zip file or a patch; or a folder that holds them. Raises UserError for what is none."""
    for name in names:
        path = Path(name)
        if not path.exists():
            raise UserError(f"There is no {name}: name folders, zip files or patches.")
        if path.is_dir() and _root(path) is None:
            inner = sorted(p for p in path.iterdir() if not p.name.startswith("."))
            inner = [p for p in inner if p.is_dir() or p.suffix in (".zip", ".patch", ".diff")]
            if inner:
                yield from inner
                continue
        if path.is_file() and path.suffix not in (".zip", ".patch", ".diff"):
            raise UserError(f"{name} is no hand-in: give a folder, a .zip, a .patch or a .diff.")
        yield path


def grade(judge: Judge, chosen: list[Task], source: Path, out: Path) -> tuple[str, dict[str, Any]]:
    """The name of a hand-in and its results, which are also written to `out`."""
    name = source.name if source.is_dir() else source.stem
    path = out / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        texts = {task.file: read(source, task.file, Path(folder)) for task in chosen}
        digest = _digest(chosen, texts)
        if path.is_file():
            old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if old.get("extra_data", {}).get("digest") == digest:
                return name, old
        tests = []
        for task in chosen:
            text = texts[task.file]
            verdict = Verdict(False, str(text)) if isinstance(text, UserError) else None
            verdict = verdict or judge.judge(task, text)  # type: ignore[arg-type]
            lines = [*([verdict.why] if verdict.why else []), *verdict.notes]
            tests.append(
                {
                    "name": f"{task.name}: {task.title}",
                    "score": task.points if verdict.passed else 0,
                    "max_score": task.points,
                    "status": "passed" if verdict.passed else "failed",
                    "output": "\n".join(lines),
                }
            )
    result = {"tests": tests, "extra_data": {"digest": digest, "seed": judge.seed}}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return name, result


def read(source: Path, file: str, folder: Path) -> str | UserError:
    """A file of a hand-in as text, or why there is none. folder: for what has to be unpacked."""
    try:
        if source.suffix == ".zip" and source.is_file():
            data = _from_zip(source, file)
        elif source.is_file():
            data = _from_patch(source, file, folder)
        else:
            root = _root(source)
            path = None if root is None else root / file
            if path is None or not path.is_file() or path.is_symlink():
                raise UserError(f"{file} is not in the hand-in")
            with path.open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{file} has more than {MOST_BYTES >> 20} MiB")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return UserError(f"{file} is not UTF-8")
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        return UserError(f"{source.name} cannot be read: {error}")
    except UserError as error:
        return error


def _root(folder: Path) -> Path | None:
    """Where the stages of a hand-in are: in the folder, or in the only folder that has some."""
    inner = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir())]
    for path in inner:
        if any((path / stage).is_dir() for stage in paths.discover()):
            return path if path == folder or len(inner) == 2 else None
    return None


def _from_zip(source: Path, file: str) -> bytes:
    with zipfile.ZipFile(source) as archive:
        names = [n for n in archive.namelist() if n == file or n.endswith(f"/{file}")]
        names = [name for name in names if "__MACOSX" not in name]
        if len(names) != 1:
            raise UserError(f"{file} is {'not' if not names else 'more than once'} in the hand-in")
        with archive.open(names[0]) as stream:
            return stream.read(MOST_BYTES + 1)


def _from_patch(source: Path, file: str, folder: Path) -> bytes:
    """The project's file with a patch of `git diff`. A file that it does not change is not done."""
    place = folder / file
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(paths.ROOT / file, place)
        done = subprocess.run(
            [
                "git",
                "apply",
                "--unsafe-paths",
                "--whitespace=nowarn",
                f"--include={file}",
                str(source.resolve()),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={"GIT_CEILING_DIRECTORIES": str(folder.parent), "PATH": os.environ["PATH"]},
        )
        if done.returncode:
            place.unlink()
            why = done.stderr.strip().partition("\n")[0]
            raise UserError(f"the patch does not fit this version of {file}: {why}")
    return place.read_bytes()


def _digest(chosen: list[Task], texts: dict[str, str | UserError]) -> str:
    """Of all that the results depend on: the tasks, the files, and the stages' own code."""
    parts = [repr(chosen), *(f"{file}\0{text}" for file, text in sorted(texts.items()))]
    for stage in sorted({task.stage for task in chosen}):
        files = sorted((paths.ROOT / stage).rglob("*.py"))
        parts += [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def table(out: Path) -> None:
    """OUT/grades.csv: a line for each hand-in, a column for each task."""
    rows, columns = [], dict[str, None]()
    for path in sorted(out.glob("*.json")):
        tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
        scores = {test["name"].partition(":")[0]: test["score"] for test in tests}
        columns |= dict.fromkeys(scores)
        rows.append({"name": path.stem, "points": sum(scores.values()), **scores})
    with (out / "grades.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["name", "points", *columns])
        writer.writeheader()
        writer.writerows(rows)
