"""The capstone: one engine from a student's own stages 02 to 05, and 09 if it is there; and one
number.

`python -m shared.course.exercise capstone` lays all files of a submission over the reference's, in
one process, and judges that as grading does: every driver of these stages must return what it
returns with the reference. Then the staircase's workload runs in turn through the student's stages
and through the reference's. For an unwritten task the reference's code runs, and the task is named.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import measure
from ..errors import UserError
from . import grading, mine
from .judge import Judge

STAGES = ("stage02_kv_cache", "stage03_batching", "stage04_continuous", "stage05_paged")
LAST = "stage09_kernels"  # may be missing
OURS = "the reference's"
ROUNDS = 3  # of the workload; their median counts
QUICK, TINY = 5, "tiny"  # seeds and model of a trial


@dataclass(frozen=True)
class Result:
    """checks: how many drivers returned what they should, and how many there are. still_open:
    tasks. rates: tok/s of each stage, and of OURS."""

    checks: tuple[int, int]
    failed: list[str]
    still_open: list[str]
    rates: dict[str, float]

    @property
    def share(self) -> float:
        """The number: tok/s of the student's last stage over the reference's."""
        *_, last, ours = self.rates.values()
        return last / ours


def trial() -> Any:
    """The plan of a trial. With GPT-2's shape, weights and their packing take most of the time."""
    from reports import staircase

    return replace(staircase.BENCHMARK.quick, model=TINY)


def collect(submission: Path) -> tuple[dict[str, bytes], list[str]]:
    """The submission's files of all stages, by path, and the tasks that are open.

    Raises UserError for a missing file.
    """
    files, still_open = dict[str, bytes](), []
    for stage in (*STAGES, LAST):
        folder = grading.submitted(submission, stage, alone=False)
        if folder is None and stage == LAST:
            continue
        for task in mine.tasks(stage):
            source, why = grading.file_of(folder, task.file)
            if why:
                raise UserError(
                    f"The capstone needs all of {', '.join(STAGES)}: {stage}: {why} Make it with "
                    f"`{mine.command('start', stage)}`."
                )
            files[f"{stage}/{task.file}"] = source
            try:
                if mine.is_open(source.decode("utf-8-sig"), stage, task):
                    still_open.append(f"{mine.label(stage, task)}: {task.title}")
            except (SyntaxError, UnicodeDecodeError) as error:
                line = getattr(error, "lineno", None) or 1
                raise UserError(f"{stage}/{task.file} is not Python: line {line}.") from None
    return files, still_open


def proved_rates(
    judge: Judge, stages: Sequence[str], files: Mapping[str, bytes], plan: Any, rounds: int
) -> dict[str, float]:
    """The tok/s of `stages` with these files laid over them, and of OURS, the last one without, in
    turn; medians of the `rounds`.

    Raises UserError if the engine gives wrong tokens or none.
    """
    from reports import staircase  # it imports stages, which `exercise` must not do at its start

    def run(name: str) -> staircase.Run:
        stage, laid = (stages[-1], {}) if name == OURS else (name, files)
        print(f"running the workload: {name}", flush=True)
        return staircase.Run(**judge.measured(stage, laid, vars(plan)))

    ways = {name: partial(run, name) for name in (*stages, OURS)}
    runs_of = measure.turns(ways, rounds, warmup=0)
    try:  # every token is proved, as in the staircase
        staircase.together(plan, {name: runs_of[name] for name in stages})
    except AssertionError as error:
        raise UserError(f"The engine's tokens are wrong: {error}") from None
    tokens = sum(staircase.workload(plan)[1])
    return {
        name: tokens / statistics.median(done.seconds for done in runs)
        for name, runs in runs_of.items()
    }


def capstone(judge: Judge, submission: Path, plan: Any, rounds: int = ROUNDS) -> Result:
    """Judge the engine of a submission; `plan` is the staircase's workload.

    Raises UserError if a file is missing, or if the engine gives wrong tokens or none.
    """
    files, still_open = collect(submission)
    for name in still_open:
        print(f"still to be written, so the reference's runs: {name}")
    stages = [stage for stage in (*STAGES, LAST) if any(name.startswith(stage) for name in files)]
    tasks = [(stage, task) for stage in stages for task in mine.tasks(stage)]
    print(f"judging {len(tasks)} tasks of {', '.join(stages)}", flush=True)
    failed = []
    results = itertools.chain.from_iterable(judge.why_together(stage, files) for stage in stages)
    for (stage, task), why in zip(tasks, results, strict=True):
        name = mine.label(stage, task)
        print(f"{'fails' if why else 'right'}  {name}: {task.title}", flush=True)
        failed += [f"{name}: {why}"] if why else []
    checks = len(tasks) - len(failed), len(tasks)
    print(f"{checks[0]} of {checks[1]} checks passed")
    if failed:
        return Result(checks, failed, still_open, {})

    rates = proved_rates(judge, stages, files, plan, rounds)
    for name, rate in rates.items():
        print(f"{rate:9.1f} tok/s  {name}")
    result = Result(checks, failed, still_open, rates)
    print(f"{100 * result.share:9.0f} %      of the reference's tok/s")
    return result
