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
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tqdm import tqdm

from shared import paths

from . import edits, splice, tasks
from .judge import build

SECONDS = 180  # for the tests of a job
HEAVY = (
    "torch",
    "numpy",
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "fastapi",
    "httpx",
    "uvicorn",
)


@dataclass
class Job:
    """Tests to run with one file of the project changed. fails: each of them must fail."""

    name: str
    file: str
    source: str
    tests: tuple[str, ...]
    fails: bool


def jobs(stage: str) -> Iterator[Job | str]:
    """The jobs of a stage, or what is wrong with one as it is written."""
    known = {task.number: task for task in tasks.read(stage)}
    everything = dict.fromkeys(test for task in known.values() for test in task.tests)
    if known:
        file = known[1].file
        yield Job(f"{stage}: the reference", file, edits.source(file), (*everything,), False)
    for task in known.values():
        source = edits.source(task.file)
        try:
            empty = splice.emptied(task.file, source, task.functions, "empty")
        except splice.Refused as error:
            yield f"{task.name}: {error}"
            continue
        yield Job(f"{task.name}: emptied", task.file, empty, task.tests, True)
    for edit in edits.read(stage):
        task = known.get(edit.task or 0)
        if edit.task and (task is None or task.file != edit.file):
            yield f"{edit.name}: task {edit.task} is not in this file"
            continue
        try:
            source = edit.applied(edits.source(edit.file), task)
        except (OSError, LookupError, SyntaxError, splice.Refused) as error:
            yield f"{edit.name}: {error}"
            continue
        right = task.tests if edit.right and task else ()
        yield Job(edit.name, edit.file, source, edit.tests or right, not edit.right)


class Slot:
    """A copy of the project, in which one job runs at a time."""

    def __init__(self, home: Path, number: int) -> None:
        self.folder = home / str(number)
        self.tree = self.folder / "tree"
        self.folder.mkdir()
        build(self.tree, paths.discover()[-1])
        compileall.compile_dir(self.tree, quiet=2)
        self.job: Job | None = None

    def start(self, job: Job) -> int:
        """Fork a child that runs the job's tests; its process id."""
        self.job, self.original = job, (self.tree / job.file).read_bytes()
        (self.tree / job.file).write_text(job.source, encoding="utf-8")
        if child := os.fork():
            return child
        try:
            os.setpgid(0, 0)
            signal.alarm(SECONDS)
            os.chdir(self.tree)
            sys.path[:] = [str(self.tree), *sys.path[1:]]
            for name in [name for name in sys.modules if name.partition(".")[0] == "shared"]:
                del sys.modules[name]  # they are this checkout's
            with (self.folder / "output").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            self._work(job)
        finally:
            os._exit(0)

    def _work(self, job: Job) -> None:
        import torch

        from . import inside

        os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which PyTorch may do
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        torch.set_num_threads(1)
        if not job.fails:
            torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is full of NaN
        lines: list[dict[str, str]] = []
        files = sorted({test.partition("::")[0] for test in job.tests})
        with (self.folder / "lines").open("w") as file:
            inside.run(files, lines.append, only=job.tests, last="")
            json.dump(lines, file)

    def end(self) -> str:
        """What is wrong with the job, whose process has ended; "" if nothing is."""
        assert self.job is not None
        job, self.job = self.job, None
        (self.tree / job.file).write_bytes(self.original)
        Path(cache_from_source(self.tree / job.file)).unlink(missing_ok=True)
        lines = []
        with suppress(OSError, ValueError):
            lines = json.loads((self.folder / "lines").read_text())
        (self.folder / "lines").unlink(missing_ok=True)
        failed = {line["id"]: line["why"] for line in lines if line["outcome"] != "passed"}
        if job.fails:
            collected = any("::" not in test for test in failed)  # a module that cannot be imported
            alive = [t for t in job.tests if not any(belongs(test, t) for test in failed)]
            if not lines or collected or not alive:  # it also fails by a crash or by no end
                return ""
            return f"{job.name}: {', '.join(alive)} passed"
        absent = [t for t in job.tests if not any(belongs(line["id"], t) for line in lines)]
        if not lines or absent:
            text = (self.folder / "output").read_text(errors="replace")
            return f"{job.name}: {absent[0] if absent else 'its tests'} did not run: {text[-500:]}"
        return "".join(f"{job.name}: {test}: {why}" for test, why in [*failed.items()][:1])


def belongs(test: str, name: str) -> bool:
    """Whether a test id is that of `name`, which may be a file or have parameters."""
    return test == name or test.startswith((f"{name}[", f"{name}::"))


def main(options: argparse.Namespace) -> int:
    """Print what is wrong; the exit status."""
    stages = [tasks.find_stage(stage) for stage in options.stage] or [
        *dict.fromkeys([*tasks.stages(), *edits.files()])
    ]
    work = [job for stage in stages for job in jobs(stage)]
    problems = [job for job in work if isinstance(job, str)]
    todo = [j for j in work if isinstance(j, Job) and options.only in j.name]
    started = time.monotonic()
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    tqdm.monitor_interval = 0  # its thread would be forked
    with tempfile.TemporaryDirectory(prefix="staircase-") as home:
        idle = [Slot(Path(home), number) for number in range(options.jobs)]
        busy: dict[int, Slot] = {}
        with tqdm(total=len(todo), disable=None) as bar:
            for problem in problems:
                bar.write(problem)
            queue = iter(todo)
            while True:
                while idle and (job := next(queue, None)):
                    slot = idle.pop()
                    busy[slot.start(job)] = slot
                if not busy:
                    break
                child, _ = os.wait()
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                idle.append(busy.pop(child))
                if problem := idle[-1].end():
                    problems.append(problem)
                    bar.write(problem)
                bar.update()
    print(f"{len(todo)} runs, {len(problems)} problems, {time.monotonic() - started:.0f} s")
    return 1 if problems else 0
