"""Runs the tests of exhibits against copies, in another process.

`python -m shared.course.museum.trials FILE SECONDS` reads jobs from a JSON file, a list of
{"files", "tests", "options", "brief"} with files by path and tests by id, and writes the outcomes
of their tests to outcomes.json beside it. In a brief job, a test ends at its first case that fails.
One process serves many jobs, because importing PyTorch takes longer than most tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import mine

LONGEST = 300.0  # seconds of one job
LATE = 75  # exit status
WRITTEN = "outcomes.json"
SKIPPED = "skipped"  # in place of an error


def job(stage: str, files: Mapping[str, str], tests: Sequence[str]) -> dict[str, Any]:
    """Tests of one stage against its files, both by their names in it."""
    sources = {f"{stage}/{name}": source for name, source in files.items()}
    return {"files": sources, "tests": [f"{stage}/{test}" for test in tests]}


def outcomes(jobs: Sequence[dict[str, Any]], seconds: float = LONGEST) -> list[dict[str, str]]:
    """For each job, the tests that ran with their errors, "" for success.

    Raises TimeoutError if a job takes more than `seconds`, and RuntimeError if the process fails.
    """
    done, error = _process(jobs, seconds)
    if error is not None:
        raise error
    return done


def each(jobs: Sequence[dict[str, Any]], seconds: float = LONGEST) -> Iterator[dict[str, str]]:
    """The same, where a job that takes too long or ends the process has the error of no test."""
    left = list(jobs)
    while left:
        done, error = _process(left, seconds)
        yield from done
        if error is not None:
            yield {"": str(error)}
        left = left[len(done) + (error is not None) :]


def _process(
    jobs: Sequence[dict[str, Any]], seconds: float
) -> tuple[list[dict[str, str]], Exception | None]:
    """Run jobs in one process: the outcomes, and what stopped it, if anything."""
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        path = Path(temporary) / "jobs.json"
        path.write_text(json.dumps(list(jobs)), encoding="utf-8")
        variables = {
            "STAIRCASE_MINE": temporary,
            "HYPOTHESIS_STORAGE_DIRECTORY": temporary,
            "PYTHONUTF8": "1",
        }
        ended = subprocess.run(
            [sys.executable, "-m", "shared.course.museum.trials", str(path), str(seconds)],
            cwd=paths.ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        written = path.with_name(WRITTEN)
        done = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else []
    if ended.returncode == LATE:
        return done, TimeoutError(f"the tests took longer than {seconds:g} s")
    if ended.returncode or len(done) < len(jobs):  # a copy may end the process
        return done, RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return done, None


class _Outcomes:
    """A pytest plugin that keeps the error of each test, and of files that cannot be loaded."""

    def __init__(self, brief: bool) -> None:
        self.errors: dict[str, str] = {}
        self.brief, self.failed, self.left_out = brief, set[str](), set[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if self.brief and item.nodeid.partition("[")[0] in self.failed:
            self.left_out.add(item.nodeid)
            pytest.skip("another case has failed")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr) or "failed"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid in self.left_out:
            return
        self.errors.setdefault(report.nodeid, "")
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr) or "failed"
            self.failed.add(report.nodeid.partition("[")[0])
        elif report.skipped:
            self.errors[report.nodeid] = SKIPPED


def again(arguments: Sequence[str], home: Path, plugins: Sequence[object] = ()) -> int:
    """Run `pytest --mine` in this process against the copies in `home`; returns its exit status.

    All modules of stages are removed first, so that pytest loads these copies, not earlier ones.
    """
    known = paths.discover()
    for name in [name for name in sys.modules if name.partition(".")[0] in known]:
        del sys.modules[name]
    mine.ACTIVE.clear()
    mine.HOME = home
    # Plain asserts: their texts are not read. unraisableexception collects garbage ten times.
    quick = ("--assert=plain", "-p", "no:unraisableexception", "-p", "no:cacheprovider")
    return int(pytest.main(["--mine", "-q", *quick, *arguments], plugins=list(plugins)))


def run(job: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run one job in this process."""
    for name, source in job["files"].items():
        mine.write(folder / name, source)
    plugin, options = (
        _Outcomes(job.get("brief", False)),
        ["--tb=native", "--hypothesis-profile=any"],
    )
    again([*options, *job.get("options", ()), *job["tests"]], folder, [plugin])
    return plugin.errors


def main() -> None:
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    errors: list[dict[str, str]] = []
    with contextlib.redirect_stdout(sys.stderr):
        for number, job in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            timer = threading.Timer(seconds, os._exit, [LATE])  # the main thread may be anywhere
            timer.daemon = True
            timer.start()
            errors.append(run(job, path.parent / str(number)))
            timer.cancel()
            path.with_name(WRITTEN).write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main()
