"""Proof that the tasks of a stage are good ones: for whoever writes or changes a task, and for CI.

- Each task names functions that are there and tests that are there; no function and no test belongs to two tasks.
- An empty task fails each of its tests, with its own message, and no test of any other task.
- A body that does nothing fails at least one of them too: the tests judge what a function does, and not that it can be called.
- The reference, as a copy, passes them all.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from .. import paths
from . import mine

LONGEST_LINE = 100
QUICK = (
    "-p",
    "no:cacheprovider",
    "--assert=plain",
    "--tb=native",
)  # of a failed test only the exception is looked at
LONGEST_TEST = (
    120.0  # seconds, start included, that the tests of a task may run with a body that does nothing
)
Copies = Mapping[str, Mapping[str, str]]  # stage -> file -> its source
Outcomes = dict[
    tuple[str, str], str
]  # (stage, pytest id within it) -> "" for passed or skipped, and else what was said


def check(stage: str) -> Iterator[str]:
    """What is wrong with a stage's tasks as they are written, without running anything."""
    found = mine.tasks(stage)
    if [task.number for task in found] != list(range(1, len(found) + 1)):
        yield f"{stage}: tasks are not numbered from 1 on"
    functions = [(task.file, name) for task in found for name in task.functions]
    for file, name in sorted({each for each in functions if functions.count(each) > 1}):
        yield f"{stage}: {file} {name} belongs to two tasks"
    tests = [test for task in found for test in task.tests]
    for test in sorted({each for each in tests if tests.count(each) > 1}):
        yield f"{stage}: {test} belongs to two tasks"
    for task in found:
        name = mine.label(stage, task)
        if not (task.points > 0 and task.text and task.hints and task.tests and task.functions):
            yield f"{name}: it needs functions, text, points, hints and tests"
        try:
            source = mine.emptied(mine.read(paths.ROOT / stage / task.file), stage, task)
        except (OSError, LookupError) as error:
            yield f"{name}: {task.file}: {error}"
            continue
        stub = re.search(rf'^ *"{name}: .*"$', source, re.MULTILINE)
        if stub and len(stub[0]) > LONGEST_LINE:
            yield f"{name}: its title is too long for a line of {LONGEST_LINE} characters"
        for test in task.tests:
            file, _, function = test.partition("::")
            path = paths.ROOT / stage / file
            *classes, function = function.split("::")
            # A method may be inherited from a class in a file beside it.
            files = path.parent.glob("*.py") if classes else [path]
            source = "\n".join(mine.read(each) for each in files if path.is_file())
            if not all(
                re.search(rf"^\s*(async )?(def|class) {part}\b", source, re.M)
                for part in [*classes, function]
            ):
                yield f"{name}: there is no test {test}"


def prove(chosen: Sequence[str]) -> Iterator[str]:
    """What is wrong with the tasks of some stages, found by running their tests again and again. Takes minutes."""
    most = max(len(mine.tasks(stage)) for stage in chosen)
    found = [(stage, task) for stage in chosen for task in mine.tasks(stage)]
    with tqdm(total=1 + most + len(found), unit="run", disable=None) as bar:
        yield from failures(run(copies(chosen, None)), "the reference")
        bar.update()
        for number in range(1, most + 1):
            yield from judge_empty(run(copies(chosen, number)), number)
            bar.update()
        for stage, task in found:
            if passes_idle(stage, task):
                yield f"{mine.label(stage, task)}: all tests pass though its body does nothing"
            bar.update()


def copies(chosen: Sequence[str], number: int | None) -> Copies:
    """Copies of some stages in which the task of this number, or none, is empty and everything else is written."""
    found: dict[str, dict[str, str]] = {}
    for stage in chosen:
        found[stage] = {name: mine.read(paths.ROOT / stage / name) for name in mine.files(stage)}
        for task in mine.tasks(stage):
            if task.number == number:
                found[stage][task.file] = mine.emptied(found[stage][task.file], stage, task)
    return found


def passes_idle(stage: str, task: mine.Task) -> bool:
    """Whether all tests of a task pass with bodies that do nothing. One that makes them run for ever does not pass."""
    stub = f'raise NotImplementedError("{mine.message(stage, task)}")'
    sources = copies([stage], task.number)[stage]
    sources = {name: source.replace(stub, "pass") for name, source in sources.items()}
    with laid_out({stage: sources}) as home:
        try:
            return (
                _pytest(
                    home, [f"{stage}/{test}" for test in task.tests], "-x", seconds=LONGEST_TEST
                ).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False


def run(given: Copies, most: int | None = None) -> Outcomes:
    """Run the tests of all tasks of some stages against copies of them, of each task all or so many.

    Raises RuntimeError if pytest itself fails.
    """
    tests = [
        f"{stage}/{test}"
        for stage in given
        for task in mine.tasks(stage)
        for test in task.tests[:most]
    ]
    with laid_out(given) as home:
        done = _pytest(home, tests, f"--junit-xml={home / 'out.xml'}")
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return read_outcomes(home / "out.xml")


@contextlib.contextmanager
def laid_out(given: Copies) -> Iterator[Path]:
    """A folder with these copies below "mine", for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        for stage, sources in given.items():
            folder = Path(temporary) / "mine" / stage
            folder.mkdir(parents=True)
            for name, source in sources.items():
                mine.write(folder / name, source)
        yield Path(temporary)


def _pytest(
    home: Path, tests: Sequence[str], *options: str, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--mine", "-q", *QUICK, *options, *tests],
        cwd=paths.ROOT,
        env=os.environ
        | {
            "STAIRCASE_MINE": str(home / "mine"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(home / "hypothesis"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
    )


def read_outcomes(path: Path) -> Outcomes:
    """The outcomes in a JUnit XML file of pytest's."""
    outcomes: Outcomes = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        # stage.tests.test_x.TestClass: classes follow the module.
        stage, *rest = case.attrib["classname"].split(".")
        end = next(place for place, part in enumerate(rest, 1) if part.startswith("test_"))
        test = "::".join([f"{'/'.join(rest[:end])}.py", *rest[end:], case.attrib["name"]])
        bad = [*case.findall("failure"), *case.findall("error")]
        said = "".join(f"{each.attrib.get('message', '')}\n{each.text or ''}" for each in bad)
        outcomes[stage, test] = said
    return outcomes


def failures(outcomes: Outcomes, whose: str) -> Iterator[str]:
    """Every test that failed."""
    for (stage, test), said in outcomes.items():
        if said:
            yield f"{stage}: {test} fails with {whose}: {said[:200]}"


def judge_empty(outcomes: Outcomes, number: int | None, most: int | None = None) -> Iterator[str]:
    """What is wrong where the task of this number in each stage, or each task, was empty; `most` as it was for `run`."""
    for stage in sorted({stage for stage, _ in outcomes}):
        for task in mine.tasks(stage):
            empty = number in (None, task.number)
            for test in task.tests[:most]:
                said = _of(outcomes, stage, test)
                name = mine.label(stage, task)
                if not said:
                    yield f"{name}: {test} was not run"
                elif empty and not any(said):
                    yield f"{name}: {test} passes though the task is empty"
                for each in filter(None, said):
                    if not empty:
                        yield f"{name}: {test} fails because task {number} is empty: {each[:200]}"
                    elif mine.message(stage, task) not in each:
                        yield f"{name}: {test} fails with another message than the task's own: {each[:200]}"


def _of(outcomes: Outcomes, stage: str, test: str) -> list[str]:
    """What the items of one test said; parameters make several of it."""
    wanted = mine.Task(0, "", (), "", "", 0, (), (test,))
    return [
        said
        for (where, name), said in outcomes.items()
        if where == stage and wanted.judged_by(name)
    ]
