"""Whether the named tests catch a bug: the tests of exhibits against copies, in a process of their own.

`python -m shared.museum.trials FILE` reads jobs from a JSON file, a list of {"stage", "files", "tests"}, and writes the
outcomes of their tests to outcomes.json beside it. Many jobs take one process: to import PyTorch costs more than to run a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import mine, stages

LONGEST = 300.0  # seconds of one job
WRITTEN = "outcomes.json"
LINES = 12  # of what a failed test says, that are kept


def outcomes(jobs: Sequence[dict[str, Any]], seconds: float = LONGEST) -> list[dict[str, str]]:
    """Of each job, the tests that were run and what they said: "" for passed.

    Raises TimeoutError if it takes longer than `seconds` a job, and RuntimeError if the process fails.
    """
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        path = Path(temporary) / "jobs.json"
        path.write_text(json.dumps(list(jobs)), encoding="utf-8")
        variables = {"STAIRCASE_MINE": temporary, "HYPOTHESIS_STORAGE_DIRECTORY": temporary, "PYTHONUTF8": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "shared.museum.trials", str(path)],
                cwd=stages.ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds * len(jobs),
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the tests took longer than {seconds * len(jobs):g} s") from None
        written = path.with_name(WRITTEN)
        if done.returncode or not written.is_file():  # a copy may end the process as it likes
            raise RuntimeError(f"the tests ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        found: list[dict[str, str]] = json.loads(written.read_text(encoding="utf-8"))
    return found


class _Outcomes:
    """A plugin of pytest's that keeps what became of each test, and of files that cannot be loaded."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.said[report.nodeid] = _end(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.said.setdefault(report.nodeid, "")
        if report.failed:
            self.said[report.nodeid] = _end(report)
        elif report.skipped:
            self.said[report.nodeid] = "skipped, so that it says nothing"


def _end(report: Any) -> str:
    return "\n".join(str(report.longrepr).splitlines()[-LINES:]) or "failed"


def run(job: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run one job in this process. Modules of stages are forgotten before: each job must see its own copy."""
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] in stages.discover()]:
        del sys.modules[name]
    mine.ACTIVE.clear()
    mine.HOME = folder
    (folder / job["stage"]).mkdir(parents=True)
    for name, source in job["files"].items():
        mine.write(folder / job["stage"] / name, source)
    found = _Outcomes()
    tests = [f"{job['stage']}/{test}" for test in job["tests"]]
    pytest.main(["--mine", "-q", "-p", "no:cacheprovider", *tests], plugins=[found])
    return found.said


def main() -> None:
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):
        found = [run(job, path.parent / str(number)) for number, job in enumerate(jobs)]
    path.with_name(WRITTEN).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
