"""Grading: what is taken from a submission, its points, and the files with results."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shared import paths
from shared.course import exercise, grading, judge, mine
from shared.course.judge import Judge
from shared.errors import UserError

STAGE, FILE = "stage04_continuous", "plan.py"
TASK = mine.find_task(STAGE, 1)  # Plan.tokens
REFERENCE = mine.read(paths.ROOT / STAGE / FILE)
WHY = "seed 1: wrong:\n<&> and why"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """A judge that finds the first task of each stage right, and runs nothing."""
    monkeypatch.setattr(Judge, "why", lambda _, stage, task, *rest: WHY if task.number > 1 else "")
    monkeypatch.setattr(judge, "unconfined", lambda: "")
    with Judge() as made:
        yield made


@pytest.mark.parametrize("place", [STAGE, f"mine/{STAGE}", "."])
def test_a_submission_is_found(place, tmp_path, fake):
    with pytest.raises(UserError, match="no folder"):
        list(grading.grade(fake, [STAGE], tmp_path / "none"))
    assert sum(verdict.points for verdict in grading.grade(fake, [STAGE], tmp_path)) == 0
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    mine.write(folder / FILE, REFERENCE)
    first, second, *_ = grading.grade(fake, [STAGE], tmp_path)
    assert (first.passed, first.points, second.passed, second.points) == (True, 5, False, 0)
    assert second.why == "There is no cache.py in the submission." and first.note == ""
    mine.write(folder / FILE, f"import os\n{REFERENCE}")
    noted, *_ = grading.grade(fake, [STAGE], tmp_path)
    assert noted.points == 5 and "line 1: the import of os" in noted.note


def test_a_file_that_is_missing_too_large_or_a_link_is_no_solution(tmp_path, monkeypatch):
    def why() -> str:
        return grading.file_of(tmp_path, TASK.file)[1]

    assert f"no {FILE}" in why() and f"no {FILE}" in grading.file_of(None, TASK.file)[1]
    mine.write(tmp_path / FILE, "#" * (grading.MOST_BYTES + 1))
    assert "larger than" in why()
    (tmp_path / FILE).unlink()
    try:
        (tmp_path / FILE).symlink_to(paths.ROOT / STAGE / FILE)
        (tmp_path / STAGE).symlink_to(paths.ROOT / STAGE, target_is_directory=True)
    except OSError:
        pytest.skip("this system makes no links")
    assert "is a link" in why()
    assert grading.submitted(tmp_path / STAGE, STAGE, alone=False) is None
    (tmp_path / FILE).unlink()
    assert grading.submitted(tmp_path, STAGE, alone=False) is None
    mine.write(tmp_path / FILE, REFERENCE)
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "denied")))
    assert "cannot be read: denied" in why()


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
def test_a_folder_of_odd_files_is_graded(tmp_path, fake, capsys):
    """What an archive may hold, one oddity a submission: they get 0, and none ends the run."""
    for name in ("a\n 100  b", "circle", "closed", "folder", "pipe", "x\udce9"):
        (tmp_path / "all" / name / STAGE).mkdir(parents=True)
    folder = tmp_path / "all"
    (folder / "outside").symlink_to(paths.ROOT, target_is_directory=True)
    (folder / "circle" / STAGE).rmdir()
    (folder / "circle" / STAGE).symlink_to(folder / "circle" / STAGE)
    (folder / "folder" / STAGE / FILE).mkdir()
    os.mkfifo(folder / "pipe" / STAGE / FILE)
    mine.write(folder / "closed" / STAGE / FILE, REFERENCE)
    (folder / "closed" / STAGE).chmod(0o600)
    try:
        exercise.main(["grade-class", str(folder), "stage04", "--out", str(tmp_path / "out")])
    finally:
        (folder / "closed" / STAGE).chmod(0o700)
    lines = capsys.readouterr().out.splitlines()
    names = [r"'a\n 100  b'", "circle", "closed", "folder", "pipe", r"'x\udce9'"]
    assert [line[6:] for line in lines] == names
    # Root may read what is closed.
    assert {line[:4] for line in lines if "closed" not in line} == {"   0"}


def test_an_empty_folder_gets_nothing_and_results(tmp_path, fake, capsys):
    out = tmp_path / "results.json"
    (tmp_path / "empty").mkdir()
    for words, tasks in ((["stage04"], len(mine.tasks(STAGE))), ([], 40)):
        exercise.main(["grade", *words, "--submission", str(tmp_path / "empty"), "--out", str(out)])
        results = json.loads(out.read_text(encoding="utf-8"))
        assert results["score"] == 0 and len(results["tests"]) >= tasks
        assert "There is no plan.py in the submission." in str(results)


def test_a_class_is_graded_in_one_go_and_goes_on_where_it_was(tmp_path, fake, capsys):
    for name in ("ada", "bob", "eve"):
        mine.write(tmp_path / "all" / name / STAGE / FILE, REFERENCE)
    (tmp_path / "all" / "empty").mkdir()
    out = tmp_path / "all" / "results"  # it is not a submission
    words = ["grade-class", str(tmp_path / "all"), "stage04", "--out", str(out)]
    exercise.main(words)
    assert sorted(path.name for path in out.iterdir()) == [
        *("ada.json", "bob.json", "empty.json", "eve.json", "grades.csv")
    ]
    (out / "eve.json").unlink()
    kept = json.loads((out / "bob.json").read_text(encoding="utf-8")) | {"score": 99}
    (out / "bob.json").write_text(json.dumps(kept), encoding="utf-8")
    exercise.main(words)  # only eve's is missing
    with open(out / "grades.csv", encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head[:3] == ["submission", "score", "4.1"] and len(head) == 2 + len(mine.tasks(STAGE))
    assert [row[:3] for row in rows] == [
        *(["ada", "5", "5"], ["bob", "99", "5"], ["empty", "0", "0"], ["eve", "5", "5"])
    ]
    assert "   5  eve" in capsys.readouterr().out
    words[2] = "stage02"  # what was graded is not taken for the results of another stage
    with pytest.raises(UserError, match="results of other stages"):
        exercise.main(words)
    with pytest.raises(UserError, match="no folder"):
        exercise.main(["grade-class", str(tmp_path / "none"), "4", "--out", str(out)])


def test_ctrl_c_ends_what_is_being_judged(tmp_path, monkeypatch, fake):
    """Another task's process may sleep, for four minutes."""
    mine.write(tmp_path / STAGE / FILE, REFERENCE)
    sleeps = tmp_path / STAGE / "cache.py"
    mine.write(sleeps, REFERENCE)

    def why(made: Judge, stage: str, task: Any, *_: object) -> str:
        if task.file == FILE:
            return ""
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            ended = judge._watch(process, None, judge.Limits(), made.stopped)
            process.kill()
        return ended

    monkeypatch.setattr(Judge, "why", why)
    verdicts = grading.grade(fake, [STAGE], tmp_path)
    assert next(verdicts).passed
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        verdicts.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert time.monotonic() - started < 30


def test_results_for_gradescope_and_as_junit_xml(home, tmp_path, fake, capsys):
    """Of two stages: the first task of each is right."""
    for stage in ("stage02_kv_cache", STAGE):
        mine.start(stage)
    files = tmp_path / "results.json", tmp_path / "results.xml"
    exercise.main(["grade", "--out", str(files[0]), "--junit", str(files[1])])
    one, two, *rest = mine.tasks("stage02_kv_cache")
    name, score = f"stage02 task 2: {two.title}", one.points + TASK.points
    shown = capsys.readouterr().out
    assert f"{one.points:3} of {one.points:3}  stage02 task 1" in shown
    assert f"  0 of {two.points:3}  {name}" in shown and f"{score:3} of 200  all" in shown

    results = json.loads(files[0].read_text(encoding="utf-8"))
    assert (results["score"], results["stdout_visibility"]) == (score, "hidden")
    assert type(results["execution_time"]) is int
    tests = {test["number"]: test for test in results["tests"]}
    failed = {"name": name, "score": 0, "max_score": two.points, "status": "failed"}
    assert tests["2.2"] == failed | {"output": WHY, "visibility": "visible", "number": "2.2"}
    right: dict[str, Any] = {"score": TASK.points, "status": "passed"}
    assert tests["4.1"] == tests["4.1"] | right | {"output": "As the reference, for every seed."}

    suites = ET.parse(files[1]).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["stage02_kv_cache", STAGE]
    counts = suites[0].get("tests"), suites[0].get("failures")
    assert counts == (str(2 + len(rest)), str(1 + len(rest)))
    case = suites[0].findall("testcase")[1]
    (failure,) = case.iter("failure")
    assert (case.get("name"), failure.get("message"), failure.text) == (name, WHY[:14], WHY)
    points = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert points == {"points": "0", "max_points": str(two.points)}
