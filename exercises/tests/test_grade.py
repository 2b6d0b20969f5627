"""Hand-ins of every kind: right ones, wrong ones, empty ones, and those that forge or exhaust."""

from __future__ import annotations

import json
import zipfile

import pytest

from exercises import grade, running
from exercises.__main__ import main
from shared.errors import UserError

from .conftest import TOY, git

LOOP = "sums = []\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(grade, "PATIENCE", 0.01)  # times the reference's seconds
    monkeypatch.setattr(grade, "LEAST", 20.0)
    monkeypatch.setattr(running, "MEMORY", 2**28)


def graded(folder, tmp_path):
    """For each hand-in the points of both tasks, and what is said of the first."""
    words = ["grade", str(folder), "--stage", "1", "--out", str(tmp_path / "out"), "--jobs", "2"]
    try:
        main(words)
    except UserError:  # no container
        main([*words, "--unconfined"])
    read = {
        path.stem: json.loads(path.read_text())["tests"] for path in tmp_path.glob("out/*.json")
    }
    return {name: ([t["score"] for t in tests], tests[0]["output"]) for name, tests in read.items()}


def solved(body):
    """A file whose first task begins with `body`, and whose second is solved in another way."""
    return TOY.replace(LOOP, body).replace("[0] * count for", "[0 for _ in range(count)] for")


def hand_in(project, folder, name, body):
    """A patch, which changes tests, too."""
    for file in ("conftest.py", "stage01_toy/tests/test_toy.py"):
        (project / file).write_text("raise SystemExit(0)\n")
    (project / "stage01_toy/toy.py").write_text(solved(body))
    (folder / f"{name}.patch").write_text(git(project, "diff", "main"))
    git(project, "restore", ".")


BODIES = {  # of the first task, and what is said of it
    "right": ("sums = list()\n", ""),
    "wrong": ("sums = [0]\n", "[0] is 0, not 2"),
    "undone": (LOOP, "not done"),
    "loops": ("while True: pass\n", "endless loop"),
    "exits": ("import os; os._exit(0)\n", "before its tests did\nto read: it uses os"),
    "ends": ("raise SystemExit(0)\n", "SystemExit"),
    "skips": ("import pytest; pytest.skip()\n", "Skipped"),
    "forks": ("import os\n        while True: os.fork()\n", "more than"),
    "takes": ("x = bytes([1]) * 2**32\n", "more than"),
    "fills": ("import tempfile; tempfile.TemporaryFile().truncate(2**30)\n", "File too large"),
    "passes": (
        "import _pytest.reports as r\n        old = r.TestReport.from_item_and_call\n"
        "        def new(item, call):\n            report = old(item, call)\n"
        "            report.outcome = 'passed'\n            return report\n"
        "        r.TestReport.from_item_and_call = staticmethod(new)\n        return []\n",
        "test_skipped: passed",
    ),
}


def test_a_class(project, tmp_path, monkeypatch):
    folder = tmp_path / "class"
    (folder / "empty").mkdir(parents=True)
    for name, (body, _) in BODIES.items():
        hand_in(project, folder, name, body)
    hand_in(project, folder, "typo", "sums = [\n")
    hand_in(project, folder, "nested", f"sums = [{'1 + ' * 2000}1]\n")
    (folder / "nothing.patch").write_text("")
    (folder / "j.doe/work/stage01_toy").mkdir(parents=True)
    (folder / "j.doe/work/stage01_toy/toy.py").write_text(text := solved("sums = list()\n"))
    (folder / "linked").mkdir()
    (folder / "linked/stage01_toy").symlink_to(folder / "j.doe/work/stage01_toy")
    for name, content in (("zipped", text), ("bomb", " " * 2**21)):
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("work/stage01_toy/toy.py", content)
    results = graded(folder, tmp_path)
    for name, (_, why) in BODIES.items():
        points, output = results[name]
        assert (points, why in output) == ([0 if why else 60, 40], True), (name, points, output)
    assert results["j.doe"][0] == results["zipped"][0] == [60, 40]
    nothing = dict.fromkeys(("empty", "linked", "bomb"), "is in the hand-in")
    nothing |= {"nothing": "does not fit", "typo": "not Python", "nested": "recursion depth"}
    for name, why in nothing.items():
        assert results[name][0] == [0, 0] and why in results[name][1]
    lines = (tmp_path / "out/grades.csv").read_text().splitlines()
    assert lines[0] == "name,points,stage01 task 1,stage01 task 2" and "right,100,60,40" in lines
    monkeypatch.setattr(grade.Judge, "judge", lambda *_: pytest.fail("judged again"))
    assert graded(folder, tmp_path) == results


def test_without_a_container_or_a_hand_in_nothing_runs(project, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="No hand-in is in"):
        main(["grade", str(tmp_path / "gone"), "--unconfined"])
    monkeypatch.setattr(running, "CONTAINERS", {"no-such-program": ""})
    with pytest.raises(UserError, match="install bubblewrap"):
        main(["grade", str(project)])
