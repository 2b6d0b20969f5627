"""The pages for instructors: every sum is right, and the hours are those of the files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared import paths
from shared.course import hours, mine, variant
from shared.task import Task


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


COURSE = paths.ROOT / "shared" / "course"
PAGES = {page.name: read(page) for page in (COURSE / "instructors").glob("*.md")}
SUM = re.compile(r"`([-\d\s.+*/%()]+) = ([\d,]+(?:\.\d+)?)`")


@pytest.mark.parametrize("name", ["quiz.md", "answers.md"])
def test_sums_are_right(name):
    """`20 * (10 + 29) / 2 = 390`: to the last digit shown."""
    sums = SUM.findall(PAGES[name])
    assert len(sums) > 20
    for left, right in sums:
        digits = len(right.partition(".")[2])
        exact, shown = eval(left), float(right.replace(",", ""))
        assert abs(exact - shown) <= 0.5001 * 10**-digits, f"{left} = {exact}, not {right}"


def test_every_stage_is_covered_and_every_page_linked():
    index = read(COURSE / "INSTRUCTORS.md")
    assert all(f"(instructors/{name})" in index for name in PAGES)
    for name in ("outcomes.md", "quiz.md", "answers.md"):
        assert all(f"Stage {stage[5:7]}" in PAGES[name] for stage in paths.discover()), name
    for text in PAGES["quiz.md"].split("\n## ")[1:]:
        assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == list("1234567"), text
        assert text.count(" Why ") >= 2, text
        assert "**Key.**" in text


def test_every_question_of_a_lesson_is_answered():
    answered = PAGES["answers.md"].split("\n## [")[1:]
    for stage, text in zip(paths.discover(), answered, strict=True):
        lesson = read(paths.ROOT / stage / "README.md")
        asked = lesson.partition("### To think about")[2].partition("\n## ")[0]
        titles = re.findall(r"^\d+\. \*\*(.+?)\.?\*\*", asked, re.MULTILINE)
        found = re.findall(r"^\*\*(.+?)\.?\*\*", text, re.MULTILINE)
        assert titles and not set(titles) - set(found), stage


def test_hours_are_those_of_the_files():
    """The tasks' exactly. The minutes of reading move with every edit of a lesson: they may lag."""
    stale, pages = "run python -m shared.course.lessons --write", hours.written()
    front, table = pages
    assert read(table) == pages[table], stale
    minutes = [
        [int(row[-2]) for row in map(re.Match.groups, hours.ROW.finditer(text))]
        for text in (read(front), pages[front])
    ]
    assert len(minutes[0]) > len(paths.discover())
    for shown, right in zip(*minutes, strict=True):
        assert abs(shown - right) <= max(10, right / 10), stale


def test_the_reading_path_leads_through_every_stage():
    rows = hours.ROW.findall(mine.read(paths.ROOT / hours.FRONT))
    stages = re.findall(r"\((\w+)/\)", " ".join(row[0] for row in rows))
    assert stages == paths.discover()


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


STAGE, WHOLE = paths.discover()[1], ("wrong", "variant", "right")


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    "kind", ["empty", "half", *(pytest.param(k, marks=pytest.mark.slow) for k in WHOLE)]
)
def test_the_autograder_always_has_results(tmp_path, kind):
    """`run_autograder`, in Gradescope's layout. Takes seconds: a grader is started. half: the first
    file is right, and the others are wrong."""
    for name in ("source", "submission"):
        (tmp_path / name).mkdir()
    stage = variant.STAGE if kind == "variant" else STAGE
    mine.write(tmp_path / "source" / "stages", stage[:7])
    if kind == "variant":
        mine.write(tmp_path / "source" / "variant", "spring\n")
        users = {"users": [{"email": "ada17@example.edu"}]}
        mine.write(tmp_path / "submission_metadata.json", json.dumps(users))
    files = mine.files(stage)
    right = {"right": files, "half": files[:1]}.get(kind, [])
    for name in files if kind != "empty" else ():
        source = read(paths.ROOT / stage / name) if name in right else "import os\n"
        mine.write(tmp_path / "submission" / name, source)
    places = {"AUTOGRADER_ROOT": tmp_path, "STAIRCASE": paths.ROOT}
    environment = {name: str(place) for name, place in places.items()}
    environment |= os.environ | {"AUTOGRADER_PYTHON": sys.executable}
    script = ["bash", str(COURSE / "autograder" / "run_autograder")]
    subprocess.run(script, env=environment, check=True, capture_output=True)
    found = json.loads(read(tmp_path / "results" / "results.json"))
    tasks, judged = mine.tasks(stage), found["tests"]
    assert len(judged) == len(tasks) + (kind == "variant")
    assert kind != "variant" or "spring-ada17" in judged[-1]["name"]
    assert found["score"] == sum(task.points for task in tasks if task.file in right), found
    for task, result in zip(tasks, judged, strict=False):
        words = "There is no" if kind == "empty" else "reference" if task.file in right else "seed"
        assert words in result["output"]
