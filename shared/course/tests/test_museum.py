"""The museum: every bug fits, shows, is caught by its tests, and costs no work of the student's."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from itertools import groupby, zip_longest
from typing import Any

import pytest

from shared import paths
from shared.course import mine
from shared.course.museum import planting, trials
from shared.course.museum.__main__ import for_student, main
from shared.course.museum.exhibits import EXHIBITS, Exhibit, find
from shared.course.museum.show import show
from shared.errors import UserError
from stage09_kernels.library import compilers

NAMES = [exhibit.name for exhibit in EXHIBITS]
NEEDS: dict[str, Any] = {"stage09_kernels": compilers(), "stage13_gpu": find_spec("triton")}
EXHIBIT = find(2)


def reference(exhibit: Exhibit) -> str:
    return mine.read(paths.ROOT / exhibit.stage / exhibit.file)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_an_exhibit_has_its_texts_and_its_edit_fits_once_and_can_be_undone(exhibit):
    """After a change of a stage, this names the exhibits that must follow."""
    assert len(EXHIBITS) >= 20 and NAMES.count(exhibit.name) == 1
    assert exhibit.tests and len(exhibit.story) > 250 and exhibit.hint and exhibit.seen
    assert exhibit.symptom.__doc__
    assert not exhibit.title.endswith(".") and not exhibit.bug.endswith(".")
    source = reference(exhibit)
    bug = planting.edit(source, exhibit.old, exhibit.new)
    assert bug is not None, f"the old text occurs {source.count(exhibit.old)} times"
    compile(bug, exhibit.file, "exec")
    assert planting.edit(bug, exhibit.new, exhibit.old) == source


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_is_caught_by_its_tests(alone):
    """By all of them; or by the first, beside one exhibit of each other stage: a process imports
    the stages anew for each job. Without the bug they pass: they are tests of the stage."""
    jobs: list[dict[str, Any]] = []
    for exhibit in EXHIBITS:
        if NEEDS.get(exhibit.stage, True):
            files, tests = {exhibit.file: planting.with_bug(exhibit)}, exhibit.tests
            jobs.append(trials.job(exhibit.stage, files, tests if alone else tests[:1]))
    if not alone:
        jobs = together(jobs)
    survived = []
    for job, outcomes in zip(jobs, trials.outcomes(jobs), strict=True):
        for test in job["tests"]:
            errors = [error for name, error in outcomes.items() if name.partition("[")[0] == test]
            if not any(errors) or trials.SKIPPED in errors:  # it passes, or was not run
                survived.append(test)
    assert survived == []


def together(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As few jobs as can be with at most one of each stage."""

    def stage(job: dict[str, Any]) -> str:
        return str(job["tests"][0].partition("/")[0])

    stages = groupby(sorted(jobs, key=stage), stage)
    return [
        {
            "files": {
                name: text for job in filter(None, row) for name, text in job["files"].items()
            },
            "tests": [test for job in filter(None, row) for test in job["tests"]],
            "brief": True,  # each case of a test may take long to fail
        }
        for row in zip_longest(*(list(group) for _, group in stages))
    ]


def test_a_copy_may_be_broken_in_any_way(tmp_path):
    exhibit = find(20)
    sources = {
        "endless": planting.with_bug(exhibit),
        "not Python": "def (:",
        "ends": "import os; print('x' * 100_000, flush=True); os._exit(3)",
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        mine.write(tmp_path / name / exhibit.file, source)
    wrong = show(exhibit, [tmp_path / name for name in sources], seconds=3)
    assert all(text and len(text) < 5000 and "Traceback" not in text for text in wrong)
    assert "0 run, 4 wait" in wrong[0] and wrong[0].rstrip().endswith("stopped after 3 s.")


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_every_symptom_shows(exhibit, tmp_path):
    if not NEEDS.get(exhibit.stage, True):
        pytest.skip("what the stage needs is not installed")
    mine.write(tmp_path / exhibit.file, planting.with_bug(exhibit))
    right, wrong = show(exhibit, [None, tmp_path], seconds=10)
    assert right != wrong
    if exhibit.number == 6:  # its text: the longest is right, of the shorter ones the first word
        rights, wrongs = (text.split("finish reason length]") for text in (right, wrong))
        assert [a == b for a, b in zip(rights, wrongs, strict=True)] == [True, False, False, True]
        begun = [[text.split(" / ")[1].split()[0] for text in own[:3]] for own in (rights, wrongs)]
        assert begun[0] == begun[1]
    assert "stopped" not in right and "Error" not in right.replace("SanitizerError", "")


def test_planting_makes_a_copy_and_clearing_leaves_nothing(home):
    path = planting.place(EXHIBIT)
    for end in (planting.with_bug(EXHIBIT), reference(EXHIBIT)):  # repaired, it needs no backup
        assert planting.plant(EXHIBIT) == []
        assert mine.read(path) == planting.with_bug(EXHIBIT) and path.is_relative_to(home)
        now = planting.planted()
        assert now is not None and (now.number, now.own, now.backup) == (2, False, None)
        pytest.raises(RuntimeError, planting.plant, find(3)).match("another exhibit")
        mine.write(path, end)
        planting.clear()
        assert planting.planted() is None and not any(home.iterdir())
    assert planting.clear() == []
    note = '{"number": 99, "own": true, "digest": "", "backup": null}'
    for junk in ("", "[]", '{"number": "x"}', note):
        mine.write(home / "museum.json", junk)
        assert planting.planted() is None
    planting.plant(EXHIBIT)
    mine.write(path, mine.read(path) + "# a note of mine\n")
    assert "had been changed" in planting.clear()[0]
    (kept,) = (home / "backups").rglob(EXHIBIT.file)
    assert mine.read(kept).endswith("# a note of mine\n")


@pytest.mark.parametrize("repaired", [False, True])
def test_a_bug_in_the_students_own_file_goes_and_the_work_stays(repaired, home):
    path = planting.place(EXHIBIT)
    path.parent.mkdir(parents=True)
    own = reference(EXHIBIT) + "\n# my own work\n"
    mine.write(path, own)
    done = planting.plant(EXHIBIT)
    assert mine.read(path) == planting.edit(own, EXHIBIT.old, EXHIBIT.new)
    assert "backups" in done[0] and len(list((home / "backups").iterdir())) == 1
    fix = mine.read(path).replace(EXHIBIT.new, "self.positions = my_own_way(start, end)")
    mine.write(path, fix if repaired else mine.read(path) + "# more of it\n")
    planting.clear()
    assert mine.read(path) == (fix if repaired else own + "# more of it\n")
    assert planting.planted() is None


def test_a_fresh_exercise_has_no_room_for_the_bug_and_can_be_put_away(home):
    folder = mine.start(EXHIBIT.stage)

    def files() -> dict[str, str]:
        return {path.name: mine.read(path) for path in folder.iterdir()}

    # The code that the bug changes differs, or is still to be written.
    for source in (planting.with_bug(EXHIBIT), mine.fresh(EXHIBIT.stage, EXHIBIT.file)):
        mine.write(folder / EXHIBIT.file, source)
        before = files()
        pytest.raises(UserError, planting.plant, EXHIBIT).match("plant 02 --reference")
        assert files() == before and planting.planted() is None
    planting.plant(EXHIBIT, reference=True)
    assert mine.read(folder / EXHIBIT.file) == planting.with_bug(EXHIBIT)
    planting.clear()
    assert files() == before
    planting.plant(EXHIBIT, reference=True)
    shutil.rmtree(folder)  # the file comes back even if the folder is gone
    planting.clear()
    assert files() == {EXHIBIT.file: before[EXHIBIT.file]}


def test_line_ends_of_windows_and_a_text_that_occurs_twice():
    assert planting.edit("a a", "a", "b") is None
    for exhibit in (find(6), find(14)):
        source = reference(exhibit).replace("\r\n", "\n").replace("\n", "\r\n")
        bug = planting.edit(source, exhibit.old, exhibit.new)
        assert bug is not None and bug.count("\n") == bug.count("\r\n")
        assert bug.replace("\r\n", "\n") == planting.with_bug(exhibit).replace("\r\n", "\n")


def test_a_visit(home, capsys, monkeypatch):
    """List, plant, hint, check, fix, check, reveal, clear."""
    exhibit = find(9)

    def visit(*arguments: str) -> tuple[int, str]:
        status = main(list(arguments)) or 0
        return status, " ".join(capsys.readouterr().out.split())

    shown = visit("list")[1]
    assert all(each.title in shown for each in EXHIBITS)
    pytest.raises(UserError, main, ["check", "09"]).match("plant 09")
    status, out = visit("plant", "09")
    right, wrong = out.split("With the reference: ")[1].split("With your copy: ")
    assert status == 0 and "47 tokens in 13 steps" in right and "47 tokens in 47 steps" in wrong
    assert not any(text in out for text in (exhibit.bug, exhibit.new, exhibit.hint))
    assert f"09 {exhibit.title} (planted)" in visit("list")[1]
    assert visit("hint", "9") == (0, exhibit.hint)
    status, out = visit("check", "09")
    assert status == 1 and out.startswith("The bug is still there: ")
    assert "test_the_whole_record" in out
    mine.write(planting.place(exhibit), "x = 1\ndef (:\n")
    pytest.raises(UserError, main, ["check", "09"]).match("syntax error in line 2")
    mine.write(planting.place(exhibit), reference(exhibit))
    monkeypatch.setattr(
        trials, "outcomes", lambda jobs, seconds: [dict.fromkeys(exhibit.tests, "")]
    )
    status, out = visit("check", "09")
    assert status == 0 and out.startswith("It is gone")
    out = visit("reveal", "09")[1]
    assert exhibit.bug in out and exhibit.new in out and exhibit.seen in out
    assert visit("clear") == (0, "Exhibit 09 is removed, with its scheduler.py.")
    assert visit("clear") == (0, "Nothing is planted.")


def test_each_student_has_one_exhibit(home, capsys):
    """The same on every machine and in every term of that name; ids are spread over all."""
    assert for_student("Ada") == for_student(" ada ") == for_student("ADA", "")
    ids = [f"s{number:05}" for number in range(40 * len(EXHIBITS))]
    spread = [for_student(each).number for each in ids]
    assert set(spread) == {exhibit.number for exhibit in EXHIBITS}
    assert max(map(spread.count, set(spread))) < 80
    again = [for_student(each, "spring").number for each in ids]
    assert 0 < sum(map(int.__eq__, spread, again)) < len(ids) / 10
    assert main(["hint", "--student", "ada"]) is None
    assert capsys.readouterr().out.split() == for_student("ada").hint.split()
    for words, error in (
        *(("hint", "not by both"), ("hint 1 --student ada", "not by both")),
        *(("plant 99", "no exhibit 99"), ("plant 0", "whole number from 1 to 99")),
    ):
        pytest.raises(UserError, main, words.split()).match(error)
