"""The pytest plugin of the exercises: --mine, and -k by tasks.

`pytest stage04_continuous --mine` runs the tests against the student's copy of that stage: see
mine.py. `-k task2` chooses the tests of task 2, with --mine or without. A failed test prints one
line, unless --tb asks for more, and a test that computes without end is ended. A task's first
failed test runs again beside the reference's other tasks: if it passes there, another task is the
cause, and is named.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .. import paths
from ..chat_template import RENDERER
from ..task import Task
from . import mine, patience

# Programs that run beside the tests and import nothing of a stage.
HARMLESS = (RENDERER, paths.ROOT / "stage11_speculative" / "trial.py")

CAUSES = True  # whether to look for the task that makes another one fail


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mine",
        action="store_true",
        help="test your own copy of a stage, made by `python -m shared.course.exercise start`",
    )
    parser.addoption(
        "--alone",
        action="store_true",
        help="with --mine: test each task beside the reference's other tasks, as grading does",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Lay the copies over their stages before the stages are imported."""
    options = early_config.known_args_namespace
    if not options.mine:
        return
    wanted = _stages_of(options.file_or_dir or ["."], early_config.invocation_params.dir)
    copies = [stage for stage in wanted if mine.folder(stage).is_dir()]
    if not copies:
        name = wanted[0] if len(wanted) == 1 else "stage01_forward"
        whose = name if len(wanted) == 1 else "a stage"
        advice = f"make one with `{mine.command('start', name)}`"
        raise pytest.UsageError(f"--mine: there is no copy of {whose} in {mine.HOME}: {advice}.")
    for stage in copies:
        mine.overlay(stage, only=frozenset() if options.alone else None)


def _stages_of(arguments: Sequence[str], directory: Path) -> list[str]:
    """The stages named by the arguments of pytest."""
    known, named = paths.discover(), []
    for argument in arguments:
        path = (directory / argument.split("::")[0]).resolve()
        if path == paths.ROOT:
            return known
        if path.is_relative_to(paths.ROOT):
            named.append(path.relative_to(paths.ROOT).parts[0])
    return [stage for stage in known if stage in named]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("mine"):
        short = config.option.tbstyle == "auto"
        if short:
            config.option.tbstyle = "no"
            config.option.reportchars = config.option.reportchars.replace("f", "").replace("E", "")
        config.pluginmanager.register(_Mine(short))


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

    def __init__(self, short: bool) -> None:
        self.short = short  # one line for each failed test
        self.collected: list[str] = []  # ids of the tests of the copies, chosen or not
        self.passed: dict[str, bool] = {}  # by id, of the tests that ran
        self.failed: dict[str, str] = {}  # by id: why, in one line
        self.causes: dict[tuple[str, int], str] = {}  # by stage and task: what else is to blame
        self._patch = pytest.MonkeyPatch()

    def pytest_sessionstart(self) -> None:
        """Skip tests that start Python: the new process would run the reference, not the copy. Chat
        templates run in one that imports neither, and so does the trial of a grammar."""
        start = subprocess.Popen.__init__

        def begin(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
            words = [args] if isinstance(args, (str, bytes)) else [str(word) for word in args]
            if sys.executable in words[:1] and not {*map(str, HARMLESS)} & {*words}:
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
        """An open task raises its error in the tests that judge it, but not in fixtures, which
        other tests may share."""
        judged = mine.ACTIVE[item.nodeid.partition("/")[0]].judged
        judged.update(task.number for task in _tasks_of(item.nodeid))
        try:
            with self._patience(item):
                return (yield)
        finally:
            judged.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._patience(item):
            return (yield)

    def _patience(self, item: pytest.Item) -> contextlib.AbstractContextManager[None]:
        """A limit for endless loops. A worker of xdist has no terminal for news."""
        plugins = item.config.pluginmanager
        terminal, capture = map(plugins.getplugin, ("terminalreporter", "capturemanager"))

        def say(line: str) -> None:
            if terminal:
                with capture.global_and_fixture_disabled():
                    terminal.write_line(f"\n{line}")

        stuck = any("Endless" in why for why in self.failed.values())
        most = patience.AGAIN if stuck else patience.MOST
        return patience.patience(item.nodeid, say, most, min(patience.NEWS, most))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and not report.failed
        if report.failed:
            self.failed.setdefault(report.nodeid, _why(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of the student's that cannot be imported: the error would not be shown."""
        if report.failed:
            self.failed.setdefault(report.nodeid, _why(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Function, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        """Look for the cause of a task's first failure among the student's other tasks."""
        result = yield
        stage = item.nodeid.partition("/")[0]
        tasks = _tasks_of(item.nodeid) if CAUSES else []
        if tasks and not self.passed.get(item.nodeid, True) and mine.ACTIVE[stage].only is None:
            key = stage, tasks[0].number
            if key not in self.causes:
                self.causes[key] = _cause(item, nextitem, mine.ACTIVE[stage], tasks[0])
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line per failed test; and the tasks that fail because of another one."""
        write = terminalreporter.write_line
        tests: dict[str, list[str]] = {}
        for test, why in self.failed.items() if self.short else ():
            tests.setdefault(test.partition("[")[0], []).append(why)
        for test, reasons in tests.items():
            more = f" (and {len(reasons) - 1} more cases)" if len(reasons) > 1 else ""
            write(f"FAILED {test} - {reasons[0]}{more}", red=True)
        for line in filter(None, self.causes.values()):
            write(line, bold=True)
        if self.short and self.failed:
            write("Each line is the end of a traceback: add --tb=short to see it whole.")

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


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The error of a failed test in one line, with its place unless the task is still open."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        text = str(report.longrepr)
        *_, (file, line) = [("", ""), *re.findall(r'([^/\\"\s]+\.py)"?(?:, line |:)(\d+)', text)]
        error = (text.strip().splitlines() or ["failed"])[-1].removeprefix("E").strip()
        return f"{file}:{line}: {error}" if file else error
    error, _, message = str(crash.message).partition("\n")[0].partition(": ")
    if error == "NotImplementedError" and "shared.course.exercise hint" in message:
        return f"still to write: {message}"
    return f"{Path(crash.path).name}:{crash.lineno}: {str(crash.message).partition(chr(10))[0]}"


def _cause(
    item: pytest.Function, nextitem: pytest.Item | None, active: mine.Overlay, task: Task
) -> str:
    """A sentence if another task makes this test of `task` fail, else ""."""

    def passes(*numbers: int) -> bool:
        active.only = frozenset(numbers)
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        return not any(report.failed for report in reports)

    def written(other: Task) -> bool:
        path = active.folder / other.file
        return path.is_file() and not mine.is_open(mine.read(path), active.stage, other)

    try:
        if not passes():
            return ""
        others = [other for other in mine.tasks(active.stage) if other != task and written(other)]
        blamed = [other.number for other in others if not passes(other.number)]
    finally:
        active.only = None
    names = " and ".join(f"task {number}" for number in blamed) or "your other tasks together"
    return (
        f"{mine.label(active.stage, task)}: its first failure comes from {names}. Beside the "
        "reference's other tasks that test passes, as it will when graded."
    )
