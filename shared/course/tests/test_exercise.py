"""The command line of the exercises, `pytest --mine`, and the proof that every task is a good one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import exercise, mine, proof
from shared.course.museum import planting
from shared.course.museum.exhibits import find
from shared.errors import UserError
from shared.task import Task

WITH_TASKS = [stage for stage in paths.discover() if mine.tasks(stage)]
STAGE = "stage02_kv_cache"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mine, "HOME", tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """say(*arguments): what the program prints."""

    def run(*arguments: str) -> str:
        exercise.main(list(arguments))
        return capsys.readouterr().out

    return run


def solve(stage: str, number: int) -> None:
    """Write a task as the reference has it."""
    task = mine.find_task(stage, number)
    path = mine.folder(stage) / task.file
    reference = mine.read(paths.ROOT / stage / task.file)
    for other in mine.tasks(stage):
        if (
            other.file == task.file
            and other != task
            and mine.is_open(mine.read(path), stage, other)
        ):
            reference = mine.emptied(reference, stage, other)
    mine.write(path, reference)


END = "==== the run has ended with status "
RUN_AGAIN = f"""
import json, sys
from pathlib import Path
from shared.course.museum import trials
for home, arguments in json.loads(sys.argv[1]):
    status = trials.again(["-rA", "--tb=line", "--color=no", *arguments], Path(home))
    print("{END}", status, flush=True)
"""


def pytest_mine(*runs: tuple[Path, list[str]]) -> list[tuple[int, str]]:
    """`pytest --mine` as a student runs it, against the copies in each folder; exit statuses and outputs.

    All in one process, which is what it takes most of the time to start.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN_AGAIN,
            json.dumps([(str(home), arguments) for home, arguments in runs]),
        ],
        cwd=paths.ROOT,
        env=os.environ | {"PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    outputs = done.stdout.split(END)
    assert len(outputs) == len(runs) + 1, done.stdout[-2000:]
    return [(int(after.split()[0]), before) for before, after in itertools.pairwise(outputs)]


def ran(output: str, outcome: str) -> set[str]:
    """The tests that ended so, FAILED, ERROR or PASSED, by ids without parameters."""
    return {
        line.split()[1].partition("[")[0]
        for line in output.splitlines()
        if line.startswith(f"{outcome} ")
    }


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
def test_every_task_is_judged_by_its_tests_and_by_no_others() -> None:
    """The reference passes; a task that is empty, or does nothing, fails, and no other task's tests fail because of it."""
    assert list(proof.prove(WITH_TASKS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_with_all_tasks_open_all_other_tests_pass(stage: str, home: Path) -> None:
    mine.start(stage)
    ((_, output),) = pytest_mine((home, [stage]))
    tests = [each.partition("/")[2] for each in ran(output, "FAILED") | ran(output, "ERROR")]
    assert tests, output[-2000:]
    assert [
        test for test in tests if not any(task.judged_by(test) for task in mine.tasks(stage))
    ] == []


def test_the_proof_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(number: int, function: str, *tests: str, title: str = "title") -> Task:
        return Task(number, "cache.py", (function,), title, "text", 1, ("hint",), tests)

    made = (
        task(1, "KVCache.crop", "tests/test_cache.py::test_none", "tests/test_engine.py"),
        task(3, "KVCache.crop", "tests/test_engine.py"),
        task(3, "KVCache.none", "tests/test_none.py", title="long" * 30),
        task(4, "KVCache.extend", "tests/test_cache.py", title="long" * 30),
        Task(5, "cache.py", (), "title", "", 0, (), ()),
    )
    monkeypatch.setattr(mine, "tasks", lambda stage: made)
    said = "\n".join(proof.check(STAGE))
    for words in (
        "not numbered", "KVCache.crop belongs to two", "tests/test_engine.py belongs to two", "there is no test tests/test_cache",
        "there is no KVCache.none", "task 4: its title is too long", "task 5: it needs",
    ):  # fmt: skip
        assert words in said
    two = (
        task(1, "KVCache.crop", "tests/a.py::test_a", "tests/a.py::test_b"),
        task(2, "KVCache.extend", "tests/a.py::test_c"),
    )
    monkeypatch.setattr(mine, "tasks", lambda stage: two)
    own = mine.message(STAGE, two[0])
    said_by = {"test_a[1]": own, "test_a[2]": "", "test_b": own, "test_c": ""}
    outcomes = {(STAGE, f"tests/a.py::{name}"): said for name, said in said_by.items()}
    assert list(proof.judge_empty(outcomes, 1)) == []
    assert "task 2: tests/a.py::test_c passes though" in "".join(proof.judge_empty(outcomes, None))
    assert "test_b was not run" in "".join(
        proof.judge_empty({each: outcomes[each] for each in list(outcomes)[:2]}, 1)
    )
    outcomes[STAGE, "tests/a.py::test_b"] = "AssertionError"
    outcomes[STAGE, "tests/a.py::test_c"] = own
    said = "".join(proof.judge_empty(outcomes, 1))
    assert (
        "test_b fails with another message" in said
        and "task 2: tests/a.py::test_c fails because task 1 is empty" in said
    )
    assert "test_c fails with the reference" in "".join(proof.failures(outcomes, "the reference"))


# ---- pytest --mine ----


def test_a_student_starts_fails_writes_and_passes(
    tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(name: str) -> Path:
        monkeypatch.setattr(mine, "HOME", tmp_path / name)
        return tmp_path / name

    def status() -> str:
        return str(say("status", "2"))

    fresh = at("fresh")
    mine.start(STAGE)
    assert "to write" in status() and "written" not in status()
    solved = at("solved")
    mine.start(STAGE)
    solve(STAGE, 1)
    assert "1  written" in status()
    spoilt = at("spoilt")
    path = mine.start(STAGE) / "cache.py"
    solve(STAGE, 1)
    mine.write(path, mine.read(path).replace("self.length = length", "pass"))
    serving = at("serving")
    mine.start("stage06_serving")

    runs = pytest_mine(
        (fresh, [STAGE]),
        (solved, [STAGE, "-k", "task1"]),
        (spoilt, [STAGE, "-k", "task1", "-x"]),
        (serving, ["stage06_serving/tests/test_text.py", "-k", "streams_say or overlap"]),
        (tmp_path / "none", [STAGE]),
    )
    (
        (failure, of_fresh),
        (success, of_solved),
        (spoilt_failure, _),
        (_, of_serving),
        (usage_error, of_none),
    ) = runs

    assert failure == 1
    assert ran(of_fresh, "FAILED") == {
        f"{STAGE}/{test}" for task in mine.tasks(STAGE) for test in task.tests
    }, of_fresh
    assert ran(of_fresh, "PASSED")  # tests that no task has
    for task in mine.tasks(STAGE):
        assert mine.message(STAGE, task) in of_fresh
    at("fresh")
    assert "to write" in status() and "written" not in status() and "passes" not in status()

    assert success == 0
    assert ran(of_solved, "PASSED") == {
        f"{STAGE}/{test}" for test in mine.find_task(STAGE, 1).tests
    }, of_solved
    at("solved")
    assert "1  passes" in status() and "  20 of 100" in say("status")

    assert spoilt_failure == 1
    at("spoilt")
    assert "1  fails" in status()

    # What starts a process is skipped, and says why.
    assert (
        "1 failed, 1 skipped" in of_serving
        and "it starts a process, and that would run the reference" in of_serving
    ), of_serving
    # Without a copy there is nothing to test.
    assert usage_error == 4 and "python -m shared.course.exercise start stage02" in of_none, of_none


# ---- the commands ----


def test_start_tells_what_to_do(home: Path, say: Any) -> None:
    said = say("start", "2")
    assert str(home / STAGE) in said and f"python -m pytest {STAGE} --mine -k task1" in said
    for task in mine.tasks(STAGE):
        assert task.title in said
    assert (home / STAGE / "cache.py").is_file()


def test_status_of_all_stages(home: Path, say: Any) -> None:
    assert say("status").count("not started") == len(WITH_TASKS)
    mine.start(STAGE)
    solve(STAGE, 4)
    (line,) = [line for line in say("status").splitlines() if line.startswith(STAGE)]
    assert line.split() == [STAGE, "4", "3", "1", "0", "0", "of", "100"]
    mine.write(mine.folder(STAGE) / "engine.py", "x = 1\ndef (:\n")
    assert "no Python: line 2" in say("status", "2")


def test_hints_come_in_steps(say: Any) -> None:
    task = mine.find_task(STAGE, 3)
    first = say("hint", "stage02", "3")
    assert (
        "Hint 1 of 3" in first and "Hint 2 of 3" not in first and "hint stage02 3 --step 2" in first
    )
    assert all(f"{STAGE}/{test}" in first for test in task.tests)
    last = say("hint", "stage02", "3", "--step", "3")
    assert "Hint 1 of 3" in last and "Hint 3 of 3" in last and "--step" not in last
    with pytest.raises(UserError, match="--step is from 1 to 3"):
        say("hint", "2", "3", "--step", "4")


def test_a_task_says_the_words_of_its_errors(say: Any) -> None:
    """Some tests look for them, and nobody can guess them."""
    said = say("hint", "2", "1")
    assert "ValueError(f'cannot crop to {length}: the cache holds {self.length} tokens')" in said
    assert "of {self.capacity} slots are taken')" in said
    assert "Errors" not in say("hint", "6", "6")  # it raises an error that it was given


def test_diff_shows_what_is_otherwise(home: Path, say: Any) -> None:
    with pytest.raises(UserError, match="no copy"):
        say("diff", "2")
    mine.start(STAGE)
    said = say("diff", "2", "4")
    assert (
        "-        raise NotImplementedError(" in said
        and "+        while reason is None:" in said
        and "cache.py" not in said
    )
    for task in mine.tasks(STAGE):
        solve(STAGE, task.number)
    assert "word for word" in say("diff", "2")


def test_reset_asks_first(home: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.start(STAGE)
    path = mine.folder(STAGE) / "cache.py"
    mine.write(path, "my work")

    class Terminal:
        def isatty(self) -> bool:
            return True

    with pytest.raises(UserError, match="add --yes"):  # standard input is no terminal here
        say("reset", "2")
    monkeypatch.setattr(sys, "stdin", Terminal())
    for answer in ("", "n", "what?"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert "Nothing was changed" in say("reset", "2") and mine.read(path) == "my work"
    monkeypatch.setattr("builtins.input", lambda question: "y")
    said = say("reset", "2")
    assert mine.read(path) == mine.fresh(STAGE, "cache.py")
    (kept,) = (home / "backups").iterdir()
    assert str(kept) in said and mine.read(kept / "cache.py") == "my work"
    solve(STAGE, 1)
    solve(STAGE, 2)
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


def test_diff_of_a_file_that_is_no_text(home: Path, say: Any) -> None:
    (mine.start(STAGE) / "cache.py").write_bytes(b"\xff")
    with pytest.raises(UserError, match="cache.py is not UTF-8"):
        say("diff", "2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["start"], "required: stage"),
        (["hint", "2"], "required: task"),
        (["hint", "2", "x"], "not a whole number"),
        (["hint", "2", "9"], "its tasks are 1 to"),
        (["grade", "--out", "x.txt"], "ends in .json"),
        (["grade", "--submission", "nowhere"], "holds no stage"),
        (["grade", "--seconds", "0"], "not a number"),
        (["none"], "invalid choice"),
        ([], "COMMAND"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], says: str, home: Path, say: Any
) -> None:
    with pytest.raises(UserError, match=says):
        say(*arguments)


def test_grade_writes_both_kinds_of_results(
    home: Path, say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the judge, which has tests of its own: the first task is right and the others are not."""
    mine.start(STAGE)
    judged = []

    def judge(stage: str, task: Task, *rest: Any) -> str:
        judged.append((stage, task.number))
        return "" if task.number == 1 else "wrong\nand why"

    monkeypatch.setattr("shared.course.grading._judge", judge)
    out, junit = tmp_path / "results.json", tmp_path / "results.xml"
    said = say("grade", "--out", str(out), "--junit", str(junit))
    assert judged == [(STAGE, task.number) for task in mine.tasks(STAGE)]
    assert (
        " 20 of  20  stage02 task 1" in said
        and "  0 of  30  stage02 task 2" in said
        and " 20 of 100  all" in said
    )
    assert json.loads(out.read_text(encoding="utf-8"))["score"] == 20
    assert 'failures="3"' in junit.read_text(encoding="utf-8")
