"""Whether the named tests catch a bug: the tests of exhibits against copies, in a process of their own.

`python -m shared.course.museum.trials FILE` reads jobs from a JSON file, a list of {"stage", "files", "tests"}, and writes the
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

from shared import paths
from shared.course import mine

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
        if done.returncode or not written.is_file():  # a copy may end the process as it likes
            raise RuntimeError(
                f"the tests ended with status {done.returncode}:\n{done.stderr[-2000:]}"
            )
        found: list[dict[str, str]] = json.loads(written.read_text(encoding="utf-8"))
    return found


class _Outcomes:
    """A plugin of pytest's that keeps what became of each test, and of files that cannot be loaded."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def pytest_configure(self) -> None:
        """Keep Hypothesis from looking for the smallest example that fails: that it fails is enough here, and soon said."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "trials", settings.get_profile("staircase"), phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("trials")

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


def again(arguments: Sequence[str], home: Path, plugins: Sequence[object] = ()) -> int:
    """Run `pytest --mine` in this process, against the copies in `home`, as if it were a new process; its exit status.

    All modules of stages are forgotten before, so that it sees these copies and not those of the run before.
    """
    import pytest

    known = paths.discover()
    for name in [name for name in sys.modules if name.partition(".")[0] in known]:
        del sys.modules[name]
    mine.ACTIVE.clear()
    mine.HOME = home
    # Plain asserts, since nobody reads what they say; and that plugin collects all garbage ten times a run.
    quick = ("--assert=plain", "-p", "no:unraisableexception", "-p", "no:cacheprovider")
    return int(pytest.main(["--mine", "-q", *quick, *arguments], plugins=list(plugins)))


def run(job: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run one job in this process."""
    (folder / job["stage"]).mkdir(parents=True)
    for name, source in job["files"].items():
        mine.write(folder / job["stage"] / name, source)
    found = _Outcomes()
    again(["--tb=native", *(f"{job['stage']}/{test}" for test in job["tests"])], folder, [found])
    return found.said


def main() -> None:
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):
        found = [run(job, path.parent / str(number)) for number, job in enumerate(jobs)]
    path.with_name(WRITTEN).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
