"""Runs the tests of exhibits against copies, in another process.

`python -m shared.course.museum.trials FILE` reads jobs from a JSON file, a list of {"stage",
"files", "tests"}, and writes the outcomes of their tests to outcomes.json beside it. One process
serves many jobs, because importing PyTorch takes longer than most tests.
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

from shared import paths
from shared.course import mine

LONGEST = 300.0  # seconds of one job
WRITTEN = "outcomes.json"
LINES = 12  # of the error of a failed test


def outcomes(jobs: Sequence[dict[str, Any]], seconds: float = LONGEST) -> list[dict[str, str]]:
    """For each job, the tests that ran with their errors, "" for success.

    Raises TimeoutError after `seconds` a job, and RuntimeError if the process fails.
    """
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        path = Path(temporary) / "jobs.json"
        path.write_text(json.dumps(list(jobs)), encoding="utf-8")
        variables = {
            "STAIRCASE_MINE": temporary,
            "HYPOTHESIS_STORAGE_DIRECTORY": temporary,
            "PYTHONUTF8": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "shared.course.museum.trials", str(path)],
                cwd=paths.ROOT,
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
        if done.returncode or not written.is_file():  # a copy may end the process
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stderr[-2000:]}")
        errors: list[dict[str, str]] = json.loads(written.read_text(encoding="utf-8"))
    return errors


class _Outcomes:
    """A pytest plugin that keeps the error of each test, and of files that cannot be loaded."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def pytest_configure(self) -> None:
        """Keep Hypothesis from searching for the smallest example that fails: any is enough."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "trials", settings.get_profile("staircase"), phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("trials")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = _end(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.errors.setdefault(report.nodeid, "")
        if report.failed:
            self.errors[report.nodeid] = _end(report)
        elif report.skipped:
            self.errors[report.nodeid] = "skipped"


def _end(report: Any) -> str:
    return "\n".join(str(report.longrepr).splitlines()[-LINES:]) or "failed"


def again(arguments: Sequence[str], home: Path, plugins: Sequence[object] = ()) -> int:
    """Run `pytest --mine` in this process against the copies in `home`; returns its exit status.

    All modules of stages are removed first, so that pytest loads these copies, not earlier ones.
    """
    import pytest

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
    (folder / job["stage"]).mkdir(parents=True)
    for name, source in job["files"].items():
        mine.write(folder / job["stage"] / name, source)
    plugin = _Outcomes()
    again(["--tb=native", *(f"{job['stage']}/{test}" for test in job["tests"])], folder, [plugin])
    return plugin.errors


def main() -> None:
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):
        errors = [run(job, path.parent / str(number)) for number, job in enumerate(jobs)]
    path.with_name(WRITTEN).write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main()
