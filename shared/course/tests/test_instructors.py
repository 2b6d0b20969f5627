"""The pages for instructors: every sum is right, and the hours are those of the files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import hours, mine
from shared.task import Task

PAGES = sorted((paths.ROOT / "shared" / "course" / "instructors").glob("*.md"))
SUM = re.compile(r"`([-\d\s.+*/%()]+) = ([\d,]+(?:\.\d+)?)`")


@pytest.mark.parametrize("name", ["quiz.md", "answers.md"])
def test_sums_are_right(name):
    """`20 * (10 + 29) / 2 = 390`: to the last digit shown."""
    (page,) = (page for page in PAGES if page.name == name)
    sums = SUM.findall(page.read_text(encoding="utf-8"))
    assert len(sums) > 20
    for left, right in sums:
        digits = len(right.partition(".")[2])
        exact, shown = eval(left), float(right.replace(",", ""))
        assert abs(exact - shown) <= 0.5001 * 10**-digits, f"{left} = {exact}, not {right}"


def test_every_stage_is_covered():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name in ("outcomes.md", "quiz.md", "answers.md"):
            assert all(f"Stage {stage[5:7]}" in text for stage in paths.discover()), page.name
    quiz = next(page for page in PAGES if page.name == "quiz.md").read_text(encoding="utf-8")
    _, *sets = quiz.split("\n## ")
    for text in sets:
        assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == list("12345"), text
        assert "**Key.**" in text


def test_every_question_of_a_lesson_is_answered():
    answers = next(page for page in PAGES if page.name == "answers.md")
    answered = answers.read_text(encoding="utf-8").split("\n## [")[1:]
    for stage, text in zip(paths.discover(), answered, strict=True):
        lesson = (paths.ROOT / stage / "README.md").read_text(encoding="utf-8")
        asked = lesson.partition("### To think about")[2].partition("\n## ")[0]
        titles = re.findall(r"^\d+\. \*\*(.+?)\*\*", asked, re.MULTILINE)
        found = re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)
        assert titles and not {t.rstrip(".") for t in titles} - {t.rstrip(".") for t in found}, (
            stage
        )


def test_hours_are_those_of_the_files():
    """The tasks' exactly. The minutes of reading move with every edit of a lesson: they may lag."""
    pages = hours.written()
    front, table = pages
    current = table.read_text(encoding="utf-8") == pages[table]
    assert current, "run python -m shared.course.lessons --write"
    minutes = [
        [int(row[-2]) for row in map(re.Match.groups, hours.ROW.finditer(text))]
        for text in (front.read_text(encoding="utf-8"), pages[front])
    ]
    assert len(minutes[0]) > len(paths.discover())
    for shown, right in zip(*minutes, strict=True):
        assert abs(shown - right) <= max(10, right / 10), (
            "run python -m shared.course.lessons --write"
        )


def test_how_hours_are_computed(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (tmp_path / "stage01_x").mkdir()
    body = "\n".join(f"    x = {i}" for i in range(10))
    code = f'def f():\n    """Not counted."""\n{body}\n\n\ndef g():\n    pass\n'
    (tmp_path / "stage01_x" / "a.py").write_text(code, encoding="utf-8")
    task = Task(1, "a.py", ("f",), "title", "text", 10, ("hint",), ("tests",))
    assert hours.of_task("stage01_x", task) == 1.0  # 30 minutes, and 10 lines of 3
    monkeypatch.setattr(mine, "tasks", lambda stage: (task,))
    monkeypatch.setattr(paths, "discover", lambda: ["stage01_x"])
    (tmp_path / "stage01_x" / "README.md").write_text("word " * 6000, encoding="utf-8")
    row = "| [01](stage01_x/) | [README](stage01_x/README.md), [lab](a.ipynb) | {} |\n"
    place = "\n<!-- hours -->\n{}<!-- /hours -->\n"
    (tmp_path / "README.md").write_text(row.format(7) + place.format("old\n"), encoding="utf-8")
    (found,) = hours.written().values()
    words = "\nIn all: 1 hours of reading and 1 hours of tasks, or 2 hours a stage.\n\n"
    assert found == row.format(50) + place.format(words)  # 6,000 / 150, and a lab


def test_pages_are_linked_from_the_index():
    index = (paths.ROOT / "shared" / "course" / "INSTRUCTORS.md").read_text(encoding="utf-8")
    assert PAGES and all(f"(instructors/{page.name})" in index for page in PAGES)


@pytest.mark.skipif(sys.platform == "win32", reason="Gradescope's scripts are bash")
class TestAutograder:
    """`run_autograder`, in Gradescope's layout, with this repository."""

    STAGE = paths.discover()[1]

    def run(self, root: Path) -> dict[str, Any]:
        script = paths.ROOT / "shared" / "course" / "autograder" / "run_autograder"
        about = {
            "AUTOGRADER_ROOT": root,
            "STAIRCASE": paths.ROOT,
            "AUTOGRADER_PYTHON": sys.executable,
        }
        environment = os.environ | {name: str(value) for name, value in about.items()}
        subprocess.run(["bash", str(script)], env=environment, check=True, capture_output=True)
        found: dict[str, Any] = json.loads((root / "results" / "results.json").read_text("utf-8"))
        return found

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for name in ("source", "submission"):
            (tmp_path / name).mkdir()
        (tmp_path / "source" / "stages").write_text(self.STAGE[:7], encoding="utf-8")
        return tmp_path

    def test_a_file_that_is_refused_gets_no_points_and_a_sentence(self, root):
        """It takes a second or two: a grader is started, and no task's process."""
        for task in mine.tasks(self.STAGE):
            (root / "submission" / task.file).write_text("import os\n", encoding="utf-8")
        found = self.run(root)
        assert found["score"] == 0 and len(found["tests"]) == len(mine.tasks(self.STAGE))
        assert all("line 1" in each["output"] for each in found["tests"])

    def test_an_empty_submission_has_results_too(self, root):
        found = self.run(root)
        assert found["score"] == 0 and "holds nothing of" in found["output"]

    @pytest.mark.slow
    def test_the_reference_gets_all_points(self, root):
        for name in mine.files(self.STAGE):
            shutil.copy(paths.ROOT / self.STAGE / name, root / "submission")
        found = self.run(root)
        assert found["score"] == sum(task.points for task in mine.tasks(self.STAGE)) == 100
