"""A student's way: start, check, status, hand in; and the museum. On a project of one stage."""

from __future__ import annotations

import pytest

from exercises.__main__ import main
from shared import cli

from .conftest import git


def said(capsys, *words, status=0):
    with pytest.raises(SystemExit) as ended:
        cli.run(main, [*words])
    output = capsys.readouterr()
    assert ended.value.code == status, output
    return output.out + output.err


def test_from_start_to_hand_in(project, capsys):
    toy = project / "stage01_toy/toy.py"
    assert "Rows of zeros." in said(capsys, "start", "1", "2")
    assert "not committed" in said(capsys, "start", "1", "1", status=2)
    out = said(capsys, "check", status=1)
    assert "test_rows: NotImplementedError: stage01 task 2 is not written yet (toy.py" in out
    line = 'raise NotImplementedError("stage01 task 2 is not written yet")'
    text = toy.read_text().replace(line, "return [[0] * count, [0] * count + [6]]")
    toy.write_text(text)
    assert "[1][2] is 6, not nothing" in said(capsys, "check", status=1)
    toy.write_text(text.replace(" + [6]", ""))
    assert "1 of 1 pass" in said(capsys, "check")
    assert "passed  " in said(capsys, "status")
    toy.write_text(toy.read_text().replace("self.total = start", "self.total = start + 0"))
    assert "passed before your last edit" in said(capsys, "status")
    assert "your change of Sums.__init__ is not taken" in said(capsys, "check")
    assert "git diff main" in said(capsys, "status") and git(project, "diff", "main")
    assert "Hint 1 of 1: What is kept?" in said(capsys, "hint", "1", "1")
    assert "Name stage and task" in said(capsys, "check", "stage01", status=2)
    assert "There is no task 7" in said(capsys, "start", "1", "7", status=2)
    assert "There is no stage '77'" in said(capsys, "list", "77", status=2)


def test_nothing_is_changed_on_main_or_without_git(project, capsys):
    git(project, "switch", "-q", "main")
    assert "git switch -c mine" in said(capsys, "start", "1", "2", status=2)
    (project / ".git").rename(project / "gone")
    assert "need a clone of the project" in said(capsys, "start", "1", "2", status=2)
    assert "NotImplementedError" not in (project / "stage01_toy/toy.py").read_text()


def test_an_exhibit_is_planted_found_and_cleared(project, capsys):
    toy = project / "stage01_toy/toy.py"
    before = toy.read_text()
    assert "a row is too long" in said(capsys, "museum", "list")
    assert "No bug is planted" in said(capsys, "museum", "check", status=2)
    shown = said(capsys, "museum", "plant", "1")
    assert "[[0]]" in shown and "[[0, 0]]" in shown and toy.read_text() != before
    assert "museum clear" in said(capsys, "museum", "plant", "1", status=2)
    assert "test_rows" in said(capsys, "museum", "check", status=1)
    assert "Count." in said(capsys, "museum", "hint")
    assert "long ago" in said(capsys, "museum", "reveal")
    toy.write_text(before.replace("count for", "(count) for"))
    assert "Mended" in said(capsys, "museum", "check")
    git(project, "commit", "-qam", "a bug that was committed")
    assert "as it was" in said(capsys, "museum", "clear") and toy.read_text() == before


def test_a_museum_beside_unfinished_work_says_what_to_do(project, capsys):
    toy = project / "stage01_toy/toy.py"
    toy.write_text(toy.read_text() + "\n")
    assert "not committed" in said(capsys, "museum", "plant", "1", status=2)
    toy.write_text(toy.read_text().replace("[0] * count", "[0] * n"))
    git(project, "commit", "-qam", "mine")
    assert "git switch -c museum main" in said(capsys, "museum", "plant", "1", status=2)
    assert "Which exhibit, 1 to 1" in said(capsys, "museum", "plant", status=2)
