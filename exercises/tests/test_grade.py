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


def hand_in(project, folder, name, body, **others):
    """A patch. others: texts of other files."""
    (project / "stage01_toy/toy.py").write_text(solved(body))
    for file, other in others.items():
        (project / file).write_text(other)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.patch").write_text(git(project, "diff", "main"))
    git(project, "restore", ".")


HOSTILE = {
    "loops": ("while True: pass\n", "endless loop"),
    "exits": ("import os; os._exit(0)\n", "before its tests did\nto read: it uses os"),
    "ends": ("raise SystemExit(0)\n", "SystemExit"),
    "skips": ("import pytest; pytest.skip()\n", "Skipped"),
    "forks": ("import os\n        while True: os.fork()\n", "more than"),
    "takes": ("x = bytes([1]) * 2**32\n", "more than"),
    "passes": (
        "import _pytest.reports as r\n        old = r.TestReport.from_item_and_call\n"
        "        def new(item, call):\n            report = old(item, call)\n"
        "            report.outcome = 'passed'\n            return report\n"
        "        r.TestReport.from_item_and_call = staticmethod(new)\n        return []\n",
        "test_skipped: passed",
    ),
}


def test_a_class(project, tmp_path):
    folder = tmp_path / "class"
    for name, (body, _) in HOSTILE.items():
        hand_in(project, folder, name, body)
    hand_in(project, folder, "right", "sums = list()\n")
    tests = {"conftest.py": "raise SystemExit(0)\n", "stage01_toy/tests/test_toy.py": ""}
    hand_in(project, folder, "wrong", "sums = [0]\n", **tests)
    (folder / "nothing.patch").write_text("")
    (folder / "empty").mkdir()
    (folder / "j.doe/work/stage01_toy").mkdir(parents=True)
    (folder / "j.doe/work/stage01_toy/toy.py").write_text(text := solved("sums = list()\n"))
    (folder / "linked").mkdir()
    (folder / "linked/stage01_toy").symlink_to(folder / "j.doe/work/stage01_toy")
    for name, content in (("zipped", text), ("bomb", " " * 2**21)):
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("work/stage01_toy/toy.py", content)
    hand_in(project, folder, "typo", "sums = [\n")
    hand_in(project, folder, "undone", LOOP)
    results = graded(folder, tmp_path)
    for name, (_, why) in HOSTILE.items():
        points, output = results[name]
        assert (points, why in output) == ([0, 40], True), (name, points, output)
    assert results["wrong"][0] == [0, 40] and "[0] is 0, not 2" in results["wrong"][1]
    assert results["right"][0] == results["j.doe"][0] == results["zipped"][0] == [60, 40]
    for name in ("empty", "linked", "bomb"):
        assert results[name][0] == [0, 0] and "is in the hand-in" in results[name][1]
    assert results["nothing"][0] == [0, 0] and "does not fit" in results["nothing"][1]
    assert results["typo"][0] == [0, 0] and "not Python" in results["typo"][1]
    assert results["undone"][0] == [0, 40] and "not done" in results["undone"][1]
    lines = (tmp_path / "out/grades.csv").read_text().splitlines()
    assert lines[0] == "name,points,stage01 task 1,stage01 task 2" and "right,100,60,40" in lines


def test_what_was_graded_is_not_judged_again(project, tmp_path, monkeypatch):
    folder = tmp_path / "class"
    hand_in(project, folder, "right", "sums = list()\n")
    assert graded(folder / "right.patch", tmp_path)["right"][0] == [60, 40]
    monkeypatch.setattr(grade.Judge, "judge", lambda *_: pytest.fail("judged again"))
    assert graded(folder, tmp_path)["right"][0] == [60, 40]


def test_without_a_container_or_a_hand_in_nothing_runs(project, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="No hand-in is in"):
        main(["grade", str(tmp_path / "gone"), "--unconfined"])
    monkeypatch.setattr(running, "CONTAINERS", {"no-such-program": ""})
    with pytest.raises(UserError, match="install bubblewrap"):
        main(["grade", str(project)])
