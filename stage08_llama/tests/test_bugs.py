"""Twenty bugs that projects shipped for models of this family, in bugs.txt: number and name, file,
edit, and the test that the edit turns red."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from shared.course import mine
from shared.course.museum.planting import edit
from shared.paths import ROOT

BUGS = [
    entry.split("\n") for entry in mine.read(ROOT / "stage08_llama/tests/bugs.txt").split("\n\n")
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project without its results and its history."""
    left_out = shutil.ignore_patterns(".*", "reports", "mine", "__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "project", ignore=left_out)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug[0].split()[0])
def test_a_bug_fits_once_and_its_test_is_there(bug):
    _, file, old, new, test = filter(None, bug)
    assert edit(mine.read(ROOT / file), old[2:], new[2:]) is not None
    place, _, name = test.partition("::")
    assert f"def {name}(" in mine.read(ROOT / place)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug[0].split()[0])
def test_a_bug_turns_its_test_red(bug, copy):
    _, file, old, new, test = filter(None, bug)
    source = mine.read(copy / file)
    mine.write(copy / file, edit(source, old[2:], new[2:]) or "")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, test], cwd=copy, capture_output=True, text=True)
    mine.write(copy / file, source)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
