"""The capstone: a student's stages together, judged and measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared import paths
from shared.bench import staircase
from shared.course import capstone, exercise, mine
from shared.errors import UserError


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    """The reference's files, as a submission."""
    for stage in capstone.STAGES:
        (tmp_path / stage).mkdir()
        for name in mine.files(stage):
            shutil.copy(paths.ROOT / stage / name, tmp_path / stage)
    return tmp_path


def test_collecting(submission, tmp_path):
    assert capstone.collect(submission, tmp_path / "a") == []
    stage = capstone.STAGES[1]
    task = mine.tasks(stage)[0]
    path = submission / stage / task.file
    source = mine.read(path)
    mine.write(path, mine.emptied(source, stage, task))
    (still_open,) = capstone.collect(submission, tmp_path / "b")
    assert still_open == f"{mine.label(stage, task)}: {task.title}"
    mine.write(path, "import os\n" + source)
    with pytest.raises(UserError, match=f"{stage}: {task.file}, line 1"):
        capstone.collect(submission, tmp_path / "c")
    assert capstone.collect(submission, tmp_path / "d", trust=True) == []
    path.unlink()
    with pytest.raises(UserError, match=f"no {stage}/{task.file}"):
        capstone.collect(submission, tmp_path / "e")


@pytest.mark.slow
def test_the_reference_as_a_submission(submission, capsys, tmp_path):
    out = tmp_path / "capstone.json"
    words = ["capstone", "--submission", str(submission), "--quick", "--out", str(out)]
    assert exercise.main(words) == 0
    said = capsys.readouterr().out
    assert "still to be written" not in said and "% " in said and out.exists()


@pytest.mark.slow
def test_a_function_that_works_alone_and_not_together(submission, monkeypatch):
    """A wrong scheduler fails the contract, and nothing is measured."""
    stage = "stage05_paged"
    path = submission / stage / "scheduler.py"
    source = mine.read(path)
    right = "known = request.token_count - 1"
    assert right in source
    mine.write(path, source.replace(right, "known = request.token_count"))
    monkeypatch.setattr(capstone, "CONTRACT", (f"{stage}/tests/test_contract.py",))
    result = capstone.judge(submission, staircase.QUICK)
    assert result.failed and result.rates == {}
