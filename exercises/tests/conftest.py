"""A small project of one stage, so that no test here waits for PyTorch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shared import paths

TOY = '''
class Sums:
    """Sums of numbers."""
    def __init__(self, start=0):
        self.total = start
    def add(self, numbers):
        """Add each of them; the sums so far."""
        sums = []
        for number in numbers:
            self.total += number
            sums.append(self.total)
        return sums
    def _half(self):
        return self.total / 2
def rows(count):
    return [[0] * count for _ in range(count)]
'''
EXERCISES = """# Exercises
## Task 1: sums
```toml
points = 60
file = "toy.py"
functions = ["Sums.add", "Sums._half"]
tests = ["test_toy.py::test_sums"]
```
Add numbers.
<details><summary>Hint 1</summary>What is kept?</details>

## Task 2: rows
```toml
points = 40
file = "toy.py"
functions = ["rows"]
tests = ["test_toy.py::test_rows"]
```
Rows of zeros.
"""
TESTS = """
import pytest
from stage01_toy.toy import Sums, rows
def test_sums():
    assert Sums(1).add([1, 2]) == [2, 4]
def test_the_whole_suite_judges():
    sums = Sums()
    sums.add([3])
    assert sums._half() == 1.5
def test_rows():
    assert rows(2) == [[0, 0], [0, 0]]
@pytest.mark.skipif(True, reason="the reference skips it, too")
def test_skipped():
    pass
"""
EDITS = """# toy.py
## task 2 museum: a row has one number too many
caught by: test_toy.py::test_rows
- [0] * count
+ [0] * (count + 1)
title: a row is
  too long
shows: from stage01_toy.toy import rows
shows: print(rows(1))
hint: Count.
seen: nowhere
> It was
> long ago.
## task 2 right: a loop
+ made = []
+ while len(made) < count:
+     made.append([0 for _ in range(count)])
+ return made
"""


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The root of a project on a branch `mine`, with everything committed."""
    root = tmp_path / "project"
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ''\n",
        "conftest.py": "",
        "shared/__init__.py": "",
        "stage01_toy/__init__.py": "",
        "stage01_toy/toy.py": TOY,
        "stage01_toy/EXERCISES.md": EXERCISES,
        "stage01_toy/tests/__init__.py": "",
        "stage01_toy/tests/test_toy.py": TESTS,
        "exercises/edits/stage01.txt": EDITS,
        ".gitignore": "__pycache__/\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(paths, "ROOT", root)
    for words in ("init -qb main", "config user.name ada", "config user.email ada@example.org"):
        git(root, *words.split())
    for words in ("add .", "commit -qm start", "switch -qc mine"):
        git(root, *words.split())
    return root
