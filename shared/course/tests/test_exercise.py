"""The command line of the exercises, `pytest --mine`, and the proof that each task is good."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import exercise, mine, proof, wrong
from shared.course.museum import planting, trials
from shared.course.museum.exhibits import find
from shared.course.wrong import Wrong
from shared.errors import UserError
from shared.task import Task

WITH_TASKS = list(filter(mine.tasks, paths.discover()))
STAGE = "stage02_kv_cache"
TEST_OF_4 = mine.find_task(STAGE, 4).tests[0]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """say(*arguments): the program's output."""

    def run(*arguments: str) -> str:
        exercise.main(list(arguments))
        return capsys.readouterr().out

    return run


def solve(stage: str, *numbers: int) -> None:
    """Write some tasks of one file as the reference has them, and leave the others open."""
    file = mine.find_task(stage, numbers[0]).file
    source = mine.read(paths.ROOT / stage / file)
    for task in mine.tasks(stage):
        if task.file == file and task.number not in numbers:
            source = mine.emptied(source, stage, task)
    mine.write(mine.folder(stage) / file, source)


END = "==== the run has ended with status "
RUN_AGAIN = f"""
import json, sys
from pathlib import Path
from shared.course.museum import trials
for home, arguments in json.loads(sys.argv[1]):
    status = trials.again(["-rps", "--color=no", *arguments], Path(home))
    print("{END}", status, flush=True)
"""


def pytest_mine(*runs: tuple[Path, list[str]]) -> list[tuple[int, str]]:
    """`pytest --mine` as a student runs it, against the copies in each folder: exit statuses and
    outputs. One process serves all runs, because starting it takes most of the time."""
    given = json.dumps([(str(home), arguments) for home, arguments in runs])
    done = subprocess.run(
        [sys.executable, "-c", RUN_AGAIN, given],
        cwd=paths.ROOT,
        env=os.environ | {"PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    outputs = done.stdout.split(END)
    assert len(outputs) == len(runs) + 1, done.stdout[-2000:]
    return [(int(after.split()[0]), before) for before, after in itertools.pairwise(outputs)]


def ended(output: str, outcome: str) -> set[str]:
    """The tests with an outcome, FAILED, ERROR or PASSED, by ids without parameters."""
    lines = [line.split() for line in output.splitlines() if line.startswith(f"{outcome} ")]
    return {words[1].partition("[")[0] for words in lines}


def of(stage: str, *tasks: Task) -> set[str]:
    return {f"{stage}/{test}" for task in tasks for test in task.tests}


# ---- the tasks ----


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_tasks_are_well_formed(stage: str) -> None:
    assert list(proof.check(stage)) == []


def test_an_empty_task_fails_with_its_own_message() -> None:
    """One test of each task, in all stages; the rest takes minutes and is below."""
    fresh = {
        stage: {file: mine.fresh(stage, file) for file in mine.files(stage)} for stage in WITH_TASKS
    }
    assert list(proof.judge_empty(proof.run(fresh, most=1), None, most=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_every_task_is_judged_by_its_tests_and_by_no_others(stage: str) -> None:
    """The reference passes; a task that is empty or wrong fails, and fails no other one."""
    assert list(proof.prove([stage])) == []


def test_a_wrong_solution_fails_its_own_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample: one of each task, and one that is right."""
    jobs = list(proof.wrong_jobs(STAGE, most=1))
    good = Wrong(
        mine.find_task(STAGE, 1), "right", (("self.length = length", "self.length=length"),)
    )
    jobs.append(proof._job(STAGE, [good], good.task.tests))
    assert list(itertools.chain(*proof.judge_wrong(jobs))) == [
        "stage02 task 1 passes with a wrong solution: right"
    ]
    other = jobs[0][0], jobs[-1][1]  # the tests of the right one are said to be another's
    monkeypatch.setattr(trials, "each", lambda jobs, seconds: [{f"{STAGE}/{TEST_OF_4}": "failed"}])
    assert list(proof.judge_wrong([other])) == [
        [
            "stage02 task 1 passes with a wrong solution: 0 tokens are accepted",
            "stage02 task 4 fails because of tasks 1 (0 tokens are accepted)",
        ]
    ]


def test_bad_wrong_solutions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        "task 1: one\n- self.length = length\n+ pass",
        "task 1: the same\n- self.length = length\n+ pass",
        "task 1: no change\n- self.length = length\n+ self.length = length",
        "task 1: elsewhere\n- self.square = start == 0\n+ pass",
        "task 1: twice\n- self.length\n+ pass",
        "task 1: no Python\n- self.length = length\n+ def",
    )
    given = {"text": "\n\n".join(entries)}
    monkeypatch.setattr(wrong, "text", lambda stage: given["text"])
    problems = "\n".join(wrong.check(STAGE))
    for words in (
        "the same: it is", "no change: it is", "elsewhere: 'self.square = start == 0' occurs 0",
        "twice: 'self.length' occurs", "no Python: ", "task 2 has 0 wrong solutions",
    ):  # fmt: skip
        assert words in problems
    assert "task 1 has" not in problems and "one: " not in problems
    for bad in ("task 1: half\n- self.length", "task x: what\n+ pass", "task 1: stray\npass"):
        given["text"] = bad
        assert "wrong.txt" in "".join(wrong.check(STAGE))


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_with_all_tasks_open_all_other_tests_pass(stage: str, home: Path) -> None:
    mine.start(stage)
    ((_, output),) = pytest_mine((home, [stage]))
    failed = {test.partition("/")[2] for test in ended(output, "FAILED") | ended(output, "ERROR")}
    assert failed, output[-2000:]
    tasks = mine.tasks(stage)
    assert [test for test in failed if not any(task.judged_by(test) for task in tasks)] == []


def test_bad_tasks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(number: int, function: str, *tests: str, title: str = "long" * 30) -> Task:
        return Task(number, "cache.py", (function,), title, "text", 1, ("hint",), tests)

    bad = (
        task(1, "KVCache.crop", "tests/test_cache.py::test_none", "tests/test_engine.py"),
        task(3, "KVCache.crop", "tests/test_engine.py", title="title"),
        task(3, "KVCache.none", "tests/test_none.py"),
        task(4, "KVCache.extend", "tests/test_cache.py"),
        Task(5, "cache.py", (), "title", "", 0, (), ()),
    )
    monkeypatch.setattr(mine, "tasks", lambda stage: bad)
    found = "\n".join(proof.check(STAGE))
    for words in (
        "not numbered", "KVCache.crop belongs to two", "tests/test_engine.py belongs to two",
        "there is no test tests/test_cache", "there is no KVCache.none",
        "task 4: its title is too long", "task 5: it needs",
    ):  # fmt: skip
        assert words in found


def test_outcomes_of_bad_tasks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = "tests/a.py::test_a", "tests/a.py::test_b"
    one = Task(1, "cache.py", ("KVCache.crop",), "one", "text", 1, ("hint",), tests)
    two = Task(2, "cache.py", ("KVCache.extend",), "two", "", 1, ("hint",), ("tests/a.py::test_c",))
    monkeypatch.setattr(mine, "tasks", lambda stage: (one, two))
    own = mine.message(STAGE, one)

    def problems(number: int | None, **errors: str) -> str:
        given = {(STAGE, f"tests/a.py::test_{name}"): error for name, error in errors.items()}
        return "".join(proof.judge_empty(given, number))

    good = {"a[1]": own, "a[2]": "", "b": own, "c": ""}
    assert problems(1, **good) == ""
    assert "task 2: tests/a.py::test_c passes though" in problems(None, **good)
    assert "test_b was not run" in problems(1, **{"a[1]": own, "c": ""})
    assert "test_b fails with another message" in problems(1, **good | {"b": "AssertionError"})
    bad = problems(1, **good | {"c": own})
    assert "task 2: tests/a.py::test_c fails because task 1 is empty" in bad
    failed = "".join(proof.failures({(STAGE, "test_c"): own}, "the reference"))
    assert "test_c fails with the reference" in failed


# ---- pytest --mine ----


def test_a_student_starts_fails_writes_and_passes(
    tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(name: str) -> Path:
        monkeypatch.setattr(mine, "HOME", tmp_path / name)
        return tmp_path / name

    tasks = mine.tasks(STAGE)
    fresh = at("fresh")
    mine.start(STAGE)
    assert "to write" in say("status", "2") and "written" not in say("status", "2")
    solved = at("solved")
    mine.start(STAGE)
    solve(STAGE, 1)
    assert "1  written" in say("status", "2")
    spoilt = at("spoilt")  # task 2 is right, and fails because of task 1
    path = mine.start(STAGE) / "cache.py"
    solve(STAGE, 1, 2)
    first = "start, self.length = self.length, self.length + count"
    mine.write(path, mine.read(path).replace(first, "start = self.length"))
    serving = at("serving")
    mine.start("stage06_serving")
    broken = at("broken")
    mine.write(mine.start(STAGE) / "engine.py", "x = 1\ndef (:\n")

    runs = pytest_mine(
        (fresh, [STAGE, "-k", "task1 or task3 or task4 or interpolated"]),
        (solved, [STAGE, "-k", "task1"]),
        (spoilt, [STAGE, "-k", "task1 or task2"]),
        (serving, ["stage06_serving/tests/test_text.py", "-k", "streams_equal or overlap"]),
        (tmp_path / "none", [STAGE]),
        (broken, [STAGE]),
    )
    (statuses, outputs) = zip(*runs, strict=True)
    assert (*statuses[:3], statuses[4]) == (1, 0, 1, 4)
    tested = [task for task in tasks if task.number != 2]
    assert ended(outputs[0], "FAILED") == of(STAGE, *tested), outputs[0]
    assert ended(outputs[0], "PASSED")  # tests that no task has
    for task in tested:
        assert f" - still to write: {mine.message(STAGE, task)}" in outputs[0]
    # One line a test, whatever its cases.
    assert len(outputs[0].splitlines()) <= len(of(STAGE, *tested)) + 8, outputs[0]
    cause = "stage02 task 2: its first failure comes from task 1. Beside the reference's other"
    assert cause in outputs[2] and "stage02 task 1: its first" not in outputs[2], outputs[2]
    assert " - cache.py:" in outputs[2] or " - test_cache.py:" in outputs[2]
    assert ended(outputs[1], "PASSED") == of(STAGE, tasks[0]), outputs[1]
    # Tests that start a process are skipped, with the reason.
    assert "1 failed, 1 skipped" in outputs[3], outputs[3]
    assert "it starts a process, and that would run the reference" in outputs[3]
    assert "python -m shared.course.exercise start stage02" in outputs[4]
    assert " - engine.py:2: SyntaxError: invalid syntax" in outputs[5], outputs[5]

    at("fresh")
    status = say("status", "2")
    assert "to write" in status and "written" not in status and "passes" not in status
    at("solved")
    assert "1  passes" in say("status", "2") and "  20 of 100" in say("status")
    at("spoilt")
    assert "1  fails" in say("status", "2")


# ---- the commands ----


def test_start_status_and_diff(home: Path, say: Any) -> None:
    assert say("status").count("not started") == len(WITH_TASKS)
    with pytest.raises(UserError, match="no copy"):
        say("diff", "2")
    out = say("start", "2")
    assert str(home / STAGE) in out and f"python -m pytest {STAGE} --mine -k task1" in out
    assert all(task.title in out for task in mine.tasks(STAGE))
    out = say("diff", "2", "4")
    assert "-        raise NotImplementedError(" in out and "cache.py" not in out
    assert "+        while reason is None:" in out
    solve(STAGE, 4)
    (line,) = [line for line in say("status").splitlines() if line.startswith(STAGE)]
    assert line.split() == [STAGE, "4", "3", "1", "0", "0", "of", "100"]
    solve(STAGE, 1, 2, 3)
    assert "word for word" in say("diff", "2")
    mine.write(mine.folder(STAGE) / "engine.py", "x = 1\ndef (:\n")
    assert "no Python: line 2" in say("status", "2")
    (mine.folder(STAGE) / "cache.py").write_bytes(b"\xff")
    with pytest.raises(UserError, match="cache.py is not UTF-8"):
        say("diff", "2")


def test_hints_come_in_steps_and_show_the_texts_of_errors(say: Any) -> None:
    first = say("hint", "stage02", "3")
    assert "Hint 1 of 3" in first and "Hint 2 of 3" not in first
    assert "hint stage02 3 --step 2" in first
    assert all(test in first for test in of(STAGE, mine.find_task(STAGE, 3)))
    last = say("hint", "stage02", "3", "--step", "3")
    assert "Hint 1 of 3" in last and "Hint 3 of 3" in last and "--step" not in last
    with pytest.raises(UserError, match="--step is from 1 to 3"):
        say("hint", "2", "3", "--step", "4")
    out, errors = say("hint", "2", "1"), mine.errors(STAGE, mine.find_task(STAGE, 1))
    assert len(errors) > 1 and all(error in out for error in errors)
    assert all(error.startswith("ValueError(f'") for error in errors)
    assert "Errors" not in say("hint", "6", "6")  # it raises an error that it was given


def test_reset_asks_first(home: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.start(STAGE)
    path = mine.folder(STAGE) / "cache.py"
    mine.write(path, "my work")
    with pytest.raises(UserError, match="add --yes"):  # standard input is no terminal here
        say("reset", "2")
    monkeypatch.setattr(sys, "stdin", argparse.Namespace(isatty=lambda: True))
    for answer in ("", "n", "what?"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert "Nothing was changed" in say("reset", "2") and mine.read(path) == "my work"
    monkeypatch.setattr("builtins.input", lambda question: "y")
    out = say("reset", "2")
    assert mine.read(path) == mine.fresh(STAGE, "cache.py")
    (kept,) = (home / "backups").iterdir()
    assert str(kept) in out and mine.read(kept / "cache.py") == "my work"
    solve(STAGE, 1, 2)
    say("reset", "2", "1", "--yes")
    states = [exercise.state(STAGE, mine.find_task(STAGE, number)) for number in (1, 2)]
    assert states == ["to write", "written"]


def test_a_bug_of_the_museum_is_not_taken_for_work(home: Path, say: Any) -> None:
    planting.plant(find(2))
    before = mine.read(planting.place(find(2)))
    for arguments in (["start", "2"], ["reset", "2", "--yes"], ["grade"], ["grade", "2"]):
        with pytest.raises(UserError, match="Exhibit 02 .* shared.course.museum clear"):
            say(*arguments)
    assert mine.read(planting.place(find(2))) == before
    assert "Exhibit 02 of the museum is planted" in say("status")
    planting.clear()
    say("start", "2")
    assert "Exhibit" not in say("status")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("start", "required: stage"),
        ("hint 2 x", "not a whole number"),
        ("hint 2 9", "its tasks are 1 to"),
        ("grade --out x.txt", "ends in .json"),
        ("grade --submission nowhere", "holds no stage"),
        ("grade --seconds 0", "not a number"),
        ("none", "invalid choice"),
        ("", "COMMAND"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: str, error: str, home: Path, say: Any) -> None:
    with pytest.raises(UserError, match=error):
        say(*arguments.split())


def test_grade_writes_both_kinds_of_results(
    home: Path, say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge, which has tests of its own, is replaced: the first task is right."""
    mine.start(STAGE)
    judged = []

    def judge(stage: str, task: Task, *rest: Any) -> str:
        judged.append((stage, task.number))
        return "" if task.number == 1 else "wrong\nand why"

    monkeypatch.setattr("shared.course.grading._judge", judge)
    out, junit = tmp_path / "results.json", tmp_path / "results.xml"
    shown = say("grade", "--out", str(out), "--junit", str(junit))
    assert judged == [(STAGE, task.number) for task in mine.tasks(STAGE)]
    for line in (" 20 of  20  stage02 task 1", "  0 of  30  stage02 task 2", " 20 of 100  all"):
        assert line in shown
    assert json.loads(out.read_text(encoding="utf-8"))["score"] == 20
    assert 'failures="3"' in junit.read_text(encoding="utf-8")
