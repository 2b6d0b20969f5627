"""For authors: are the tasks and edits good?

Every edit makes each of its tests fail, and so does every emptied task; the reference and the right
solutions pass, with uninitialised memory full of NaN. The jobs are forks of this process, which has
imported what takes long (PyTorch) and computed nothing, each in a copy of the project.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tqdm import tqdm

from shared import paths

from . import edits, inside, splice, student, tasks
from .grade import build

SECONDS = 180  # for the tests of a job
HEAVY = ["torch", "numpy", "hypothesis", "safetensors.torch", "fastapi", "httpx2", "uvicorn"]


@dataclass
class Job:
    """Tests to run with one file of the project changed. fails: each of them must fail."""

    name: str
    file: str
    source: str
    tests: tuple[str, ...]
    fails: bool = True


def jobs(stage: str) -> Iterator[Job | str]:
    """The jobs of a stage, or what is wrong with one as it is written."""
    known = {task.number: task for task in tasks.read(stage)}
    for task in known.values():
        source = tasks.source(task.file)
        yield Job(f"{task.name}: the reference", task.file, source, task.tests, fails=False)
        empty = student.emptied(source, task)
        yield Job(f"{task.name}: emptied", task.file, empty, task.tests)
    for edit in edits.read(stage):
        task = known.get(edit.task or 0)
        if edit.task and (task is None or task.file != edit.file):
            yield f"{edit.name}: task {edit.task} is not in this file"
            continue
        try:
            source = edit.applied(tasks.source(edit.file), task)
        except (OSError, LookupError, splice.Refused) as error:
            yield f"{edit.name}: {error}"
            continue
        right = task.tests if edit.kind == "right" and task else ()
        yield Job(edit.name, edit.file, source, edit.tests or right, fails=not right)


def proved(job: Job) -> str:
    """What is wrong with a job, "" if nothing is. Runs in a worker, whose working directory is a
    copy of the project."""
    file, lines, output = (Path(x) for x in (job.file, "../lines", "../output"))
    original = file.read_bytes()
    file.write_text(job.source, encoding="utf-8")
    Path(cache_from_source(file)).unlink(missing_ok=True)
    lines.write_text("")
    if not (child := os.fork()):
        try:
            os.setpgid(0, 0)
            signal.alarm(SECONDS)
            _run(job, lines, output)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    file.write_bytes(original)
    Path(cache_from_source(file)).unlink(missing_ok=True)
    entries = [json.loads(line) for line in lines.read_text().splitlines()]
    outcomes = {entry["id"]: entry for entry in entries if "id" in entry}
    failed = {test: x["why"] for test, x in outcomes.items() if x["outcome"] != "passed"}
    crashed = not any("status" in entry for entry in entries) or any("::" not in t for t in failed)
    for name in [] if crashed and job.fails else job.tests:
        of_name = {test for test in outcomes if test == name or test.startswith(f"{name}[")}
        if not of_name:
            return f"{job.name}: {name} did not run: {output.read_text()[-500:]}"
        if job.fails and not of_name & {*failed}:
            return f"{job.name}: {name} passed"
        if not job.fails and (bad := of_name & {*failed}):
            return f"{job.name}: {min(bad)}: {failed[min(bad)]}"
    return ""


def _run(job: Job, lines: Path, output: Path) -> None:
    import torch

    torch.set_num_threads(1)
    if not job.fails:
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is full of NaN
    with output.open("w") as printed, lines.open("w") as written:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        inside.run(job.tests, lambda line: print(json.dumps(line), file=written, flush=True))


def _prepare(home: Path) -> None:
    """Make a worker: it moves to a copy of the project."""
    tree = home / str(os.getpid()) / "tree"
    tree.parent.mkdir()
    build(tree, paths.discover()[-1])
    compileall.compile_dir(tree, quiet=2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *sys.path[1:]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "shared"]:
        del sys.modules[name]  # they are this checkout's
    os.environ |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tree.parent / "cache")}
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which PyTorch may do


def main(options: argparse.Namespace) -> int:
    """Print what is wrong; the exit status."""
    stages = [tasks.find_stage(stage) for stage in options.stage] or tasks.stages()
    todo, problems = [], 0
    for job in (job for stage in stages for job in jobs(stage)):
        if isinstance(job, str):
            print(job)
            problems += 1
        elif options.only in job.name:
            todo.append(job)
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="staircase-") as home:
        fork = multiprocessing.get_context("fork")
        with fork.Pool(options.jobs, _prepare, [Path(home)]) as pool:
            done = pool.imap_unordered(proved, todo)
            for problem in filter(None, tqdm(done, total=len(todo), disable=None)):
                tqdm.write(problem)
                problems += 1
    print(f"{len(todo)} runs, {problems} problems")
    return 1 if problems else 0
