"""For authors: are the tasks and edits good?

Every edit makes each of its tests fail, and so does every emptied task; the references and the
right solutions pass, with uninitialized memory full of NaN. Each job is a process in a clean tree.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm.contrib.concurrent import thread_map

from shared import paths

from . import edits, student, tasks
from .running import Sandbox

SECONDS = 180  # for the tests of a job


@dataclass
class Job:
    """Tests to run with one file of the project changed. fails: each of them must fail."""

    name: str
    file: str
    source: str
    tests: list[str]
    fails: bool = True


def jobs(stage: str) -> Iterator[Job]:
    """The jobs of a stage. Raises UserError for an edit that does not fit its file."""
    known = {task.number: task for task in tasks.read(stage)}
    tests = [test for task in known.values() for test in task.tests]
    file = known[1].file
    yield Job(f"{stage}: the reference", file, tasks.source(file), tests, fails=False)
    for task in known.values():
        empty = student.emptied(tasks.source(task.file), task)
        yield Job(f"{task.name}: emptied", task.file, empty, task.tests)
    for edit in edits.read(stage):
        of = known.get(edit.task or 0)
        source = edit.applied(tasks.source(edit.file), of)
        tests = edit.tests or (of.tests if of else [])
        yield Job(f"{edit.file}: {edit.what}", edit.file, source, tests, edit.kind != "right")


def proved(sandbox: Sandbox, job: Job) -> str:
    """What is wrong with a job, "" if nothing is."""
    run = sandbox.run(job.tests, {job.file: job.source}, SECONDS, fill=not job.fails)
    if job.fails and (run.ended or any("::" not in test for test in run.failures)):
        return ""  # all tests fail with their process
    ran, failed = (
        {test.partition("[")[0] for test in group} for group in (run.outcomes, run.failures)
    )
    for name in job.tests:
        if name not in ran or job.fails != (name in failed):
            how = "passed" if name in ran and job.fails else run.ended or run.failures
            return f"{job.name}: {name}: {how or 'did not run'}"
    return ""


def main(options: argparse.Namespace) -> int:
    """Print what is wrong; the exit status."""
    stages = [tasks.find_stage(stage) for stage in options.stage] or paths.discover()
    todo = [job for stage in stages for job in jobs(stage)]
    with tempfile.TemporaryDirectory() as cache:
        run = partial(proved, Sandbox("", Path(cache)))
        results = thread_map(run, todo, max_workers=options.jobs, disable=None)
    problems = [result for result in results if result]
    print("\n".join([*problems, f"{len(todo)} runs, {len(problems)} problems"]))
    return 1 if problems else 0
