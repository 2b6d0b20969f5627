"""The command line of the exercises, `pytest --mine`, the capstone, and the proof that each task is
good."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from reports import staircase
from shared import paths
from shared.course import capstone, exercise, judge, mine, proof, wrong
from shared.course.judge import Ended, Judge, Limits
from shared.course.museum import planting, trials
from shared.course.museum.exhibits import find
from shared.course.wrong import Wrong
from shared.errors import UserError
from shared.task import Task
from shared.testing import python

WITH_TASKS = list(filter(mine.tasks, paths.discover()))
STAGE, SERVING = "stage02_kv_cache", "stage06_serving"
TEST_OF_4 = mine.find_task(STAGE, 4).tests[0]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """say(*arguments): the program's output."""

    def run(*arguments: str) -> str:
        exercise.main(list(arguments))
        return capsys.readouterr().out

    return run


def states() -> list[str]:
    return [exercise.state(STAGE, task) for task in mine.tasks(STAGE)]


def solve(*numbers: int) -> None:
    """Write some tasks of one file as the reference has them, and leave the others open."""
    file = mine.find_task(STAGE, numbers[0]).file
    source = mine.read(paths.ROOT / STAGE / file)
    for task in mine.tasks(STAGE):
        if task.file == file and task.number not in numbers:
            source = mine.emptied(source, STAGE, task)
    mine.write(mine.folder(STAGE) / file, source)


RUN_AGAIN = """
import json, sys
from pathlib import Path
from shared.course.museum import trials
for home, arguments in json.load(sys.stdin):
    status = trials.again(["-rps", "--color=no", *arguments], Path(home))
    print("\\x00", status, "\\x00", sep="", end="", flush=True)
"""


def pytest_mine(*runs: tuple[Path, list[str]]) -> list[tuple[int, str]]:
    """`pytest --mine` as a student runs it, against the copies in each folder: exit statuses and
    outputs. One process serves all runs, because starting it takes most of the time."""
    environment = os.environ | {"PYTHONUTF8": "1"}
    given = {"input": json.dumps(runs, default=str), "env": environment}
    done = python("-c", RUN_AGAIN, stderr=subprocess.STDOUT, **given)
    outputs = done.stdout.split("\0")
    assert len(outputs) == 2 * len(runs) + 1, done.stdout[-2000:]
    return list(zip(map(int, outputs[1::2]), outputs[:-1:2], strict=True))


def ended(output: str, outcome: str) -> set[str]:
    """The tests with an outcome, FAILED, ERROR or PASSED, by ids without parameters."""
    lines = [line.split() for line in output.splitlines() if line.startswith(f"{outcome} ")]
    return {words[1].partition("[")[0] for words in lines}


def of(stage: str, *tasks: Task) -> set[str]:
    return {f"{stage}/{test}" for task in tasks for test in task.tests}


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_tasks_are_well_formed(stage):
    assert list(proof.check(stage)) == []


def test_an_empty_task_fails_with_its_own_message():
    """One test of each task, in all stages; the rest takes minutes and is below."""
    fresh = {f"{s}/{file}": mine.fresh(s, file) for s in WITH_TASKS for file in mine.files(s)}
    assert list(proof.judge_empty(proof.run(WITH_TASKS, fresh, most=1), None, most=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_every_task_is_judged_by_its_tests_and_by_no_others(stage):
    """The reference passes; a task that is empty or wrong fails, and fails no other one."""
    assert list(proof.prove([stage])) == []


def test_a_wrong_solution_fails_its_own_task_alone(monkeypatch):
    """A sample: one of each task, and one that is right."""
    jobs, task = list(proof.wrong_jobs(STAGE, most=1)), mine.find_task(STAGE, 1)
    good = Wrong(task, "right", (("self.length = length", "self.length=length"),))
    jobs.append(proof._job(STAGE, [good], task.tests))
    passes = "stage02 task 1 passes with a wrong solution: "
    assert list(itertools.chain(*proof.judge_wrong(jobs))) == [f"{passes}right"]
    other = *jobs[0][:2], jobs[-1][2]  # the tests of the right one are said to be another's
    monkeypatch.setattr(trials, "each", lambda jobs, seconds: [{f"{STAGE}/{TEST_OF_4}": "failed"}])
    first = "memory for all query heads"
    fails = f"stage02 task 4 fails because of tasks 1 ({first})"
    assert list(proof.judge_wrong([other])) == [[f"{passes}{first}", fails]]


def test_bad_wrong_solutions_are_found(monkeypatch):
    line, entry = "self.length = length", "task 1: {}\n- {}\n+ {}".format

    def problems(*entries: str) -> str:
        monkeypatch.setattr(wrong, "text", lambda stage, file="": "\n\n".join(entries))
        return "\n".join(wrong.check(STAGE))

    edits = {  # (name, old text, new text): the problem
        ("the same", line, "pass"): "it is",
        ("no change", line, line): "it is",
        ("elsewhere", "self.square = start == 0", "pass"): "'self.square = start == 0' occurs 0",
        ("twice", "self.length", "pass"): "'self.length' occurs",
        ("no Python", line, "def"): "",
    }
    found = problems(entry("one", line, "pass"), *(entry(*edit) for edit in edits))
    assert all(f"{name}: {words}" in found for (name, *_), words in edits.items())
    assert "task 2 has 0 wrong solutions" in found
    assert "task 1 has" not in found and "one: " not in found
    for bad in ("task 1: half\n- self.length", "task x: what\n+ pass", "task 1: stray\npass"):
        assert "wrong.txt" in problems(bad)


@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_with_all_tasks_open_all_other_tests_pass(stage, home):
    mine.start(stage)
    ((_, output),) = pytest_mine((home, [stage]))
    failed = {test.partition("/")[2] for test in ended(output, "FAILED") | ended(output, "ERROR")}
    assert failed, output[-2000:]
    tasks = mine.tasks(stage)
    assert [test for test in failed if not any(task.judged_by(test) for task in tasks)] == []


def test_bad_tasks_are_found(monkeypatch):
    def task(number: int, function: str, *tests: str, title: str = "title", text: str = "") -> Task:
        return Task(number, "cache.py", (function,), title, text, 1, ("hint",), tests)

    tests = "tests/test_cache.py::test_none", "tests/test_engine.py"
    bad = (
        task(1, "KVCache.crop", *tests, title="long" * 30, text="text"),
        task(3, "KVCache.crop", tests[1]),
        task(4, "KVCache.none"),
    )
    monkeypatch.setattr(mine, "tasks", lambda stage: bad)
    found = "\n".join(proof.check(STAGE))
    for words in (
        "not numbered", "KVCache.crop belongs to two", "tests/test_engine.py belongs to two",
        "there is no test tests/test_cache", "there is no KVCache.none",
        "task 1: its title is too long", "task 3: it needs",
    ):  # fmt: skip
        assert words in found and "task 1: it needs" not in found


def test_outcomes_of_bad_tasks_are_found(monkeypatch):
    one = Task(1, "cache.py", ("KVCache.crop",), "one", "", 1, (), ("a.py::test_a", "a.py::test_b"))
    two = Task(2, "cache.py", ("KVCache.extend",), "two", "", 1, (), ("a.py::test_c",))
    monkeypatch.setattr(mine, "tasks", lambda stage: (one, two))
    own = mine.message(STAGE, one)
    good = {"a[1]": own, "a[2]": "", "b": own, "c": ""}
    for number, errors, problem in (
        (1, good, ""),
        (None, good, "task 2: a.py::test_c passes though"),
        (1, {"a[1]": own, "c": ""}, "test_b was not run"),
        (1, good | {"b": "AssertionError"}, "test_b fails with another message"),
        (1, good | {"c": own}, "task 2: a.py::test_c fails because task 1 is empty"),
    ):
        outcomes = {f"{STAGE}/a.py::test_{name}": error for name, error in errors.items()}
        found = "".join(proof.judge_empty(outcomes, number))
        assert problem in found and bool(problem) == bool(found)
    failed = "".join(proof.failures({f"{STAGE}/test_c": own}, "the reference"))
    assert "test_c fails with the reference" in failed


def test_a_student_starts_fails_writes_and_passes(tmp_path, say, monkeypatch):
    def student(name: str, stage: str = STAGE) -> Path:
        """Go on as the student of this name, who has started a stage."""
        monkeypatch.setattr(mine, "HOME", tmp_path / name)
        if not mine.HOME.exists():
            mine.start(stage)
        return mine.HOME

    fresh, serving, solved = student("fresh"), student("serving", SERVING), student("solved")
    solve(1)
    assert states() == ["written", *["to write"] * 3]
    spoilt = student("spoilt")  # task 2 is right, and fails because of task 1
    solve(1, 2)
    path, first = spoilt / STAGE / "cache.py", "start, self.length = self.length, "
    mine.write(path, mine.read(path).replace(f"{first}self.length + count", "start = self.length"))
    broken = student("broken")
    mine.write(broken / STAGE / "engine.py", "x = 1\ndef (:\n")

    runs = pytest_mine(
        (fresh, [STAGE, "-k", "task1 or task3 or task4 or interpolated"]),
        (solved, [STAGE, "-k", "task1"]),
        (spoilt, [STAGE, "-k", "task1 or task2"]),
        (serving, [f"{SERVING}/tests/test_text.py", "-k", "streams_equal or overlap"]),
        (tmp_path / "none", [STAGE]),
        (broken, [STAGE]),
    )
    (statuses, outputs) = zip(*runs, strict=True)
    assert (*statuses[:3], statuses[4]) == (1, 0, 1, 4)
    tested = [task for task in mine.tasks(STAGE) if task.number != 2]
    assert ended(outputs[0], "FAILED") == of(STAGE, *tested), outputs[0]
    assert ended(outputs[0], "PASSED")  # tests that no task has
    for task in tested:
        assert f" - still to write: {mine.message(STAGE, task)}" in outputs[0]
    # One line a test, whatever its cases.
    assert len(outputs[0].splitlines()) <= len(of(STAGE, *tested)) + 8, outputs[0]
    cause = "stage02 task 2: its first failure comes from task 1. Beside the reference's other"
    assert cause in outputs[2] and "stage02 task 1: its first" not in outputs[2], outputs[2]
    assert " - cache.py:" in outputs[2] or " - test_cache.py:" in outputs[2]
    assert ended(outputs[1], "PASSED") == of(STAGE, tested[0]), outputs[1]
    # Tests that start a process are skipped, with the reason.
    assert "1 failed, 1 skipped" in outputs[3], outputs[3]
    assert "it starts a process, and that would run the reference" in outputs[3]
    assert "python -m shared.course.exercise start stage02" in outputs[4]
    assert " - engine.py:2: SyntaxError: invalid syntax" in outputs[5], outputs[5]

    for name, state in (("fresh", "to write"), ("solved", "passes"), ("spoilt", "fails")):
        student(name)
        assert states()[0] == state and f"1  {state}" in say("status", "2")
    student("solved")
    assert "  25 of 100" in say("status")


def test_start_status_and_diff(home, say):
    assert say("status").count("not started") == len(WITH_TASKS)
    pytest.raises(UserError, say, "diff", "2").match("no copy")
    out = say("start", "2")
    assert str(home / STAGE) in out and f"python -m pytest {STAGE} --mine -k task1" in out
    assert all(task.title in out for task in mine.tasks(STAGE))
    out = say("diff", "2", "4")
    assert "-        raise NotImplementedError(" in out and "cache.py" not in out
    assert "+        while output.finish_reason is None:" in out
    solve(4)
    (line,) = [line for line in say("status").splitlines() if line.startswith(STAGE)]
    assert line.split() == [STAGE, "4", "3", "1", "0", "0", "of", "100"]
    solve(1, 2, 3)
    assert "word for word" in say("diff", "2")
    mine.write(mine.folder(STAGE) / "engine.py", "x = 1\ndef (:\n")
    assert "not Python: line 2" in say("status", "2")
    (mine.folder(STAGE) / "cache.py").write_bytes(b"\xff")
    pytest.raises(UserError, say, "diff", "2").match("cache.py is not UTF-8")


def test_hints_come_in_steps_and_show_the_texts_of_errors(say):
    first, last = say("hint", "stage02", "3"), say("hint", "stage02", "3", "--step", "3")
    assert "Hint 1 of 3" in first and "Hint 2 of 3" not in first
    assert "hint stage02 3 --step 2" in first and "--step" not in last
    assert all(test in first for test in of(STAGE, mine.find_task(STAGE, 3)))
    assert "Hint 1 of 3" in last and "Hint 3 of 3" in last
    out, errors = say("hint", "2", "1"), mine.errors(STAGE, mine.find_task(STAGE, 1))
    assert len(errors) > 1 and all(error in out for error in errors)
    assert all(re.match(r"(Value|User)Error\(f'", error) for error in errors)
    assert "Errors" not in say("hint", "2", "2")  # it raises none


def test_reset_asks_first(home, say, monkeypatch):
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
    solve(1, 2)
    say("reset", "2", "1", "--yes")
    assert states()[:2] == ["to write", "written"]


def test_a_bug_of_the_museum_is_not_taken_for_work(home, say):
    planting.plant(find(2))
    before = mine.read(planting.place(find(2)))
    for arguments in (["start", "2"], ["reset", "2", "--yes"], ["grade"], ["grade", "2"]):
        pytest.raises(UserError, say, *arguments).match("Exhibit 02 .* shared.course.museum clear")
    assert mine.read(planting.place(find(2))) == before
    assert "Exhibit 02 of the museum is planted" in say("status")
    planting.clear()
    say("start", "2")
    assert "Exhibit" not in say("status")


def test_bad_arguments_are_one_sentence(home, say):
    for arguments, error in (
        *(("hint 2 x", "not a whole number"), ("hint 2 3 --step 4", "--step is from 1 to 3")),
        *(("grade --out x.txt", "ends in .json"), ("grade --seconds 0", "not a number")),
        *(("grade --unconfined --submission nowhere", "There is no folder"), ("", "COMMAND")),
    ):
        pytest.raises(UserError, say, *arguments.split()).match(error)


# ---- the open design ----------------------------------------------------------------------------


def test_a_file_is_emptied_to_its_signatures_and_what_was_there_is_kept(home, capsys):
    stage, file = "stage04_continuous", "scheduler.py"
    mine.start(stage)
    mine.write(mine.folder(stage) / file, "mine = 1\n")
    exercise.main(["design", "4", file])
    source = mine.read(mine.folder(stage) / file)
    assert "pytest stage04_continuous --mine -k contract" in capsys.readouterr().out
    assert "def schedule(self) -> Plan:" in source and "_chunk_size" not in source
    assert "self.waiting: list[Request] = []" in source  # __init__ stays
    (kept,) = (home / "backups").glob(f"*/{file}")
    assert mine.read(kept) == "mine = 1\n"
    with pytest.raises(UserError, match="engine.py, plan.py, scheduler.py"):
        exercise.main(["design", "4", "oracle.py"])


@pytest.mark.slow
def test_a_design_without_the_references_private_functions_gets_its_line(home, tmp_path, capsys):
    folder = tmp_path / "stage04_continuous"
    folder.mkdir()
    source = mine.read(paths.ROOT / "stage04_continuous" / "scheduler.py")
    for name in ("_chunk_size", "_work", "_next_waiting", "_waited"):
        source = source.replace(name, f"_my{name}")
    mine.write(folder / "scheduler.py", source)
    words = ["line", "4", "--submission", str(tmp_path), "--quick", "--seconds", "120"]
    exercise.main(words)
    said = capsys.readouterr().out
    assert re.search(r"scheduler.py \(\d+ lines\): .* tok/s, \d+% of the .* tokens proved", said)
    wrong = source.replace("request.computed += ", "request.computed += 1 + ")
    assert wrong != source
    mine.write(folder / "scheduler.py", wrong)
    with pytest.raises(UserError, match="engine"):
        exercise.main(words)


# ---- the capstone: a student's stages together, judged and measured -----------------------------


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    """The reference's files, as a submission."""
    for stage in capstone.STAGES:
        (tmp_path / stage).mkdir()
        for name in mine.files(stage):
            shutil.copy(paths.ROOT / stage / name, tmp_path / stage)
    return tmp_path


def test_collecting(submission):
    files, still_open = capstone.collect(submission)
    assert still_open == [] and len(files) == sum(len(mine.files(s)) for s in capstone.STAGES)
    stage = capstone.STAGES[1]
    task = mine.tasks(stage)[0]
    path = submission / stage / task.file
    source = mine.read(path)
    mine.write(path, mine.emptied(source, stage, task))
    assert capstone.collect(submission)[1] == [f"{mine.label(stage, task)}: {task.title}"]
    mine.write(path, "def (:")
    with pytest.raises(UserError, match=f"{stage}/{task.file} is not Python: line 1"):
        capstone.collect(submission)
    path.unlink()
    with pytest.raises(UserError, match=f"There is no {task.file} in the submission"):
        capstone.collect(submission)


def test_the_capstone_runs_both_sides_at_once_and_says_so_first(submission, capsys):
    """One at a time, `--quick` takes more than three minutes."""
    both = threading.Barrier(2)

    class Slow(Judge):
        def __init__(self) -> None:
            self.confined, self.seeds, self.said = True, [1], list[str]()
            self._base = functools.cache(Path)

        def _together(self, base: Path, stage: str, files: Any) -> list[Ended]:
            self.said.append(capsys.readouterr().out)
            both.wait(10)
            line = b'{"raised": "wrong"}' if files else b'{"data": 1}'
            return [Ended([line], "", "") for _ in mine.tasks(stage)]

    judge = Slow()
    result = capstone.capstone(judge, submission, None)
    count = sum(len(mine.tasks(stage)) for stage in capstone.STAGES)
    assert len(result.failed) == count and result.rates == {}
    assert max(judge.said[:2]).startswith(f"judging {count} tasks of stage02_kv_cache, ")


def test_a_quick_capstone_has_few_seeds_and_a_tiny_model(submission, monkeypatch):
    seen = list[tuple[int, str]]()

    def judged(made: Judge, _: Path, plan: Any, rounds: int) -> capstone.Result:
        seen.append((len(made.seeds), plan.model))
        return capstone.Result((0, 0), [], [], {})

    monkeypatch.setattr(capstone, "capstone", judged)
    monkeypatch.setattr(judge, "unconfined", lambda: "")
    for words in ([], ["--quick"]):
        exercise.main(["capstone", "--submission", str(submission), *words])
    assert seen == [(judge.SEEDS, staircase.FULL.model), (capstone.QUICK, "tiny")]


@pytest.mark.slow
def test_the_reference_as_a_submission(submission, capsys, tmp_path):
    out = tmp_path / "capstone.json"
    words = ["capstone", "--submission", str(submission), "--quick", "--out", str(out)]
    assert exercise.main(words) == 0
    said = capsys.readouterr().out
    assert "still to be written" not in said and "% " in said and out.exists()


@pytest.mark.slow
def test_a_function_that_works_alone_and_not_together(submission):
    """A wrong scheduler fails, and nothing is measured."""
    path = submission / "stage05_paged" / "scheduler.py"
    source = mine.read(path)
    right = "known = request.token_count - 1"
    assert right in source
    mine.write(path, source.replace(right, "known = request.token_count"))
    with Judge(Limits(300), seeds=[1, 2]) as made:
        result = capstone.capstone(made, submission, staircase.BENCHMARK.quick)
    assert result.failed and result.rates == {}
