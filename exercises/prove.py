"""For authors: are the tasks and edits good?

Every edit makes each of its tests fail, and so does every emptied task; the references and the
right solutions pass, with uninitialized memory full of NaN. Each job is a process in a copy of the
project.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from shared import paths

from . import edits, running, splice, student, tasks
from .grade import build

SECONDS = 180  # for the tests of a job


@dataclass
class Job:
    """Tests to run with one file of the project changed. fails: each of them must fail."""

    name: str
    file: str
    source: str
    tests: list[str]
    fails: bool = True


def jobs(stage: str) -> Iterator[Job | str]:
    """The jobs of a stage, or what is wrong with one as it is written."""
    known = {task.number: task for task in tasks.read(stage)}
    tests = [test for task in known.values() for test in task.tests]
    file = known[1].file
    yield Job(f"{stage}: the reference", file, tasks.source(file), tests, fails=False)
    for task in known.values():
        empty = student.emptied(tasks.source(task.file), task)
        yield Job(f"{task.name}: emptied", task.file, empty, task.tests)
    for edit in edits.read(stage):
        name, task = f"{edit.file}: {edit.what}", known.get(edit.task or 0)
        if edit.task and (task is None or task.file != edit.file):
            yield f"{name}: task {edit.task} is not in this file"
            continue
        try:
            source = edit.applied(tasks.source(edit.file), task)
        except (OSError, LookupError, splice.Refused) as error:
            yield f"{name}: {error}"
            continue
        right = task.tests if edit.kind == "right" and task else []
        yield Job(name, edit.file, source, edit.tests or right, fails=not right)


def proved(job: Job, trees: queue.Queue[Path]) -> str:
    """What is wrong with a job, "" if nothing is. trees: unused copies of the project."""
    tree = trees.get()
    original = (tree / job.file).read_text(encoding="utf-8")
    (tree / job.file).write_text(job.source, encoding="utf-8")
    words = running.inside({"tests": job.tests, "fill": not job.fails})
    run = running.start(words, tree, SECONDS, subprocess.DEVNULL)
    (tree / job.file).write_text(original, encoding="utf-8")
    trees.put(tree)
    crashed = run.ended or any("::" not in test for test in run.failures)
    for name in [] if crashed and job.fails else job.tests:
        of_name = {test for test in run.outcomes if test == name or test.startswith(f"{name}[")}
        bad = of_name & {*run.failures}
        if not of_name:
            return f"{job.name}: {name} did not run: {run.ended or run.failures}"
        if job.fails != bool(bad):
            return f"{job.name}: {name} {run.failures[min(bad)] if bad else 'passed'}"
    return ""


def main(options: argparse.Namespace) -> int:
    """Print what is wrong; the exit status."""
    stages = [tasks.find_stage(stage) for stage in options.stage] or paths.discover()
    todo = [job for stage in stages for job in jobs(stage)]
    problems = [job for job in todo if isinstance(job, str)]
    chosen = [job for job in todo if isinstance(job, Job) and options.only in job.name]
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(options.jobs) as pool:
        os.environ["XDG_CACHE_HOME"] = f"{home}/cache"
        for number in range(options.jobs):
            build(Path(home, f"tree{number}"), paths.discover()[-1])
            trees.put(Path(home, f"tree{number}"))
        done = pool.map(lambda job: proved(job, trees), chosen)
        problems += filter(None, tqdm(done, total=len(chosen), disable=None))
    print("\n".join([*problems, f"{len(chosen)} runs, {len(problems)} problems"]))
    return 1 if problems else 0
