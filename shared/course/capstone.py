"""The capstone: one engine from a student's own stages 02 to 05, and one number.

`python -m shared.course.exercise capstone` loads all files of a submission over the reference's, in
one process. The contract of engines judges them first. Then the staircase's workload runs in turn
through each of the student's stages and through the reference's last one. For an unwritten task the
reference's code runs, and the task is counted.

As in grading, a file must pass the gate, and a process gets a copy of the project, no network, and
limits.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import measure
from ..errors import UserError
from . import gate, grading, mine

STAGES = ("stage02_kv_cache", "stage03_batching", "stage04_continuous", "stage05_paged")
CONTRACT = (
    "stage02_kv_cache/tests/test_engine.py",
    "stage03_batching/tests/test_engine.py",
    "stage04_continuous/tests/test_contract.py",
    "stage05_paged/tests/test_contract.py",
)
MODULE, OURS = "shared.course.capstone", "the reference's"
LIMITS = grading.Limits(seconds=900, memory=8192)
ROUNDS = 3  # of the workload; their median counts
Say = Callable[[str], object]


@dataclass(frozen=True)
class Result:
    """tests: how many passed, and how many there are. still_open: tasks. rates: tok/s of each
    stage, and of OURS."""

    tests: tuple[int, int]
    failed: list[str]
    still_open: list[str]
    rates: dict[str, float]

    @property
    def share(self) -> float:
        """The number: tok/s of the student's last stage over the reference's."""
        return self.rates[STAGES[-1]] / self.rates[OURS]


def collect(submission: Path, target: Path, trust: bool = False) -> list[str]:
    """Copy the submission's files of all four stages to `target`; returns the tasks that are open.

    Raises UserError for a missing file, and for one that the gate refuses.
    """
    still_open = []
    for stage in STAGES:
        folder = grading.submitted(submission, stage, alone=False)
        (target / stage).mkdir(parents=True)
        for name in mine.files(stage):
            path = None if folder is None else folder / name
            if path is None or not path.is_file() or path.is_symlink():
                raise UserError(
                    f"The capstone needs all of {', '.join(STAGES)}, and {submission} has no "
                    f"{stage}/{name}: make it with `{mine.command('start', stage)}`."
                )
            source = path.read_bytes()
            if not trust and (why := gate.refused(source, stage, name)):
                raise UserError(f"{stage}: {why}")
            (target / stage / name).write_bytes(source)
            tasks = [task for task in mine.tasks(stage) if task.file == name]
            try:
                unwritten = [task for task in tasks if mine.is_open(mine.read(path), stage, task)]
            except SyntaxError as error:
                raise UserError(
                    f"{stage}/{name} is not Python: line {error.lineno or 1}."
                ) from None
            still_open += [f"{mine.label(stage, task)}: {task.title}" for task in unwritten]
    return sorted(still_open)


def judge(submission: Path, plan: Any = None, trust: bool = False, say: Say = print) -> Result:
    """Judge the engine of a submission; `plan` is the staircase's workload.

    Raises UserError if a file is missing, or if the engine gives wrong tokens or none.
    """
    from ..bench import staircase  # it imports stages, which `exercise` must not do at its start

    plan = plan or staircase.FULL
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        base = Path(temporary).resolve()
        still_open = collect(submission, base / "mine", trust)
        for name in still_open:
            say(f"still to be written, so the reference's runs: {name}")
        grading.copy_project(base / "project")
        outcomes = _child(base, {"tests": CONTRACT})["tests"]
        failed = sorted(name for name, why in outcomes.items() if why and why != "skipped")
        tests = len(outcomes) - len(failed), len(outcomes)
        say(f"contract: {tests[0]} of {tests[1]} tests passed")
        if failed or not outcomes:
            return Result(tests, failed, still_open, {})
        job: dict[str, Any] = {"plan": vars(plan), "threads": torch.get_num_threads()}

        def run(name: str) -> staircase.Run:
            return staircase.Run(**_child(base, {**job, "variant": name}))

        ways = {name: partial(run, name) for name in (*STAGES, OURS)}
        runs_of = measure.turns(ways, ROUNDS, warmup=0)
    try:  # every token is proved, as in the staircase
        staircase.together(plan, {name: runs_of[name] for name in STAGES})
    except AssertionError as error:
        raise UserError(f"The engine's tokens are wrong: {error}") from None
    tokens = sum(staircase.workload(plan)[1])
    rates = {
        name: tokens / statistics.median(done.seconds for done in runs)
        for name, runs in runs_of.items()
    }
    for name, rate in rates.items():
        say(f"{rate:9.1f} tok/s  {name}")
    result = Result(tests, failed, still_open, rates)
    say(f"{100 * result.share:9.0f} %      of the reference's tok/s")
    return result


def _child(base: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What a process with all files of the submission reports."""
    scratch = base / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    word = secrets.token_hex(16)
    common = {"word": word, "folder": str(base / "mine"), "scratch": str(scratch)}
    job |= common | {"seconds": LIMITS.seconds}
    ended, report, output = grading.run_job(job, base / "project", scratch, LIMITS, MODULE)
    reported = grading.read_report(report, word)
    if reported is None or "error" in reported:
        why = ended if reported is None else str(reported["error"])
        raise UserError(f"The engine failed: {grading.plain(why)}\n{grading.plain(output)}")
    return reported


def _prepare(job: grading.Job) -> None:
    if job.get("variant") != OURS:
        for stage in STAGES:
            mine.overlay(stage, Path(job["folder"]) / stage)


def _work(job: grading.Job) -> dict[str, Any]:
    try:
        if "tests" in job:
            return {"tests": grading.run_tests(job["tests"])}
        from ..bench import staircase

        name = STAGES[-1] if job["variant"] == OURS else job["variant"]
        return asdict(staircase.work(name, job["plan"], job["threads"]))
    except Exception as error:  # from the submission, or from the code around it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    grading.child(_prepare, _work)
