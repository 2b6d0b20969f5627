"""The pytest plugin of the exercises: --mine, and -k by tasks.

`pytest stage04_continuous --mine` runs the tests against the student's copy of that stage: see
mine.py. `-k task2` chooses the tests of task 2, with --mine or without.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .. import paths
from ..task import Task
from . import mine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mine",
        action="store_true",
        help="test your own copy of a stage, made by `python -m shared.course.exercise start`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Lay the copies over their stages before the stages are imported."""
    given = early_config.known_args_namespace
    if not given.mine:
        return
    wanted = _stages_of(given.file_or_dir or ["."], early_config.invocation_params.dir)
    copies = [stage for stage in wanted if mine.folder(stage).is_dir()]
    if not copies:
        name = wanted[0] if len(wanted) == 1 else "stage01_forward"
        whose = name if len(wanted) == 1 else "a stage"
        advice = f"make one with `{mine.command('start', name)}`"
        raise pytest.UsageError(f"--mine: there is no copy of {whose} in {mine.HOME}: {advice}.")
    for stage in copies:
        mine.overlay(stage)


def _stages_of(arguments: Sequence[str], directory: Path) -> list[str]:
    """The stages named by the arguments of pytest."""
    known, found = paths.discover(), []
    for argument in arguments:
        path = (directory / argument.split("::")[0]).resolve()
        if path == paths.ROOT:
            return known
        if path.is_relative_to(paths.ROOT):
            found.append(path.relative_to(paths.ROOT).parts[0])
    return [stage for stage in known if stage in found]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("mine"):
        config.pluginmanager.register(_Mine())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let -k choose tests by task."""
    for item in items:
        item.extra_keyword_matches.update(f"task{task.number}" for task in _tasks_of(item.nodeid))


def _tasks_of(nodeid: str) -> list[Task]:
    """The tasks that a test judges."""
    stage, _, test = nodeid.partition("/")
    return [task for task in mine.tasks(stage) if task.judged_by(test)]


class _Mine:
    """The plugin that --mine adds, once the copies are laid over their stages."""

    def __init__(self) -> None:
        self.collected: list[str] = []  # ids of the tests of the copies, chosen or not
        self.passed: dict[str, bool] = {}  # by id, of the tests that ran
        self._patch = pytest.MonkeyPatch()

    def pytest_sessionstart(self) -> None:
        """Skip tests that start Python: the new process would run the reference, not the copy."""
        start = subprocess.Popen.__init__

        def begin(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
            if not isinstance(args, (str, bytes)) and str(next(iter(args), "")) == sys.executable:
                pytest.skip("it starts a process, and that would run the reference")
            start(popen, args, *rest, **options)

        self._patch.setattr(subprocess.Popen, "__init__", begin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the tests of other stages."""
        others = [item for item in items if item.nodeid.partition("/")[0] not in mine.ACTIVE]
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid.partition("/")[0] in mine.ACTIVE]
        self.collected = [item.nodeid for item in items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """An open task raises its error in the tests that judge it, but in no fixture: other tests
        may share those."""
        judged = mine.ACTIVE[item.nodeid.partition("/")[0]].judged
        judged.update(task.number for task in _tasks_of(item.nodeid))
        try:
            return (yield)
        finally:
            judged.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and not report.failed

    def pytest_sessionfinish(self) -> None:
        """Keep the results of tasks whose tests all ran, for `python -m shared.course.exercise
        status`."""
        self._patch.undo()
        for stage in mine.ACTIVE:
            results = {}
            for task in mine.tasks(stage):
                ids = [
                    test
                    for test in self.collected
                    if test.startswith(f"{stage}/") and task in _tasks_of(test)
                ]
                known = {test.partition("/")[2].partition("[")[0] for test in ids}
                whole = all(
                    test in known or any(name.startswith(f"{test}::") for name in known)
                    for test in task.tests
                )
                if any(not self.passed.get(test, True) for test in ids):
                    results[task.number] = False
                elif whole and all(test in self.passed for test in ids):
                    results[task.number] = True
            mine.record(stage, results)
