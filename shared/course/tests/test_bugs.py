"""Bugs that other projects shipped, which no stage's tests may let through: a stage's
tests/bugs.txt has for each a number and name, a file, an edit, and the test that it turns red."""

from __future__ import annotations

import os
import shutil

import pytest

from shared.course import mine
from shared.course.museum.planting import edit
from shared.course.testing import python
from shared.paths import ROOT, discover

LISTS = {stage: ROOT / stage / "tests" / "bugs.txt" for stage in discover()}
BUGS = [
    pytest.param(*filter(None, entry.split("\n")), id=f"{stage[5:7]}-{entry.split()[0]}")
    for stage, path in LISTS.items()
    if path.is_file()
    for entry in mine.read(path).split("\n\n")
]
every_bug = pytest.mark.parametrize(("name", "file", "old", "new", "test"), BUGS)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project without its results and its history."""
    left_out = shutil.ignore_patterns(".*", "reports", "mine", "__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "project", ignore=left_out)


@every_bug
def test_a_bug_fits_once_and_its_test_is_there(name, file, old, new, test):
    assert edit(mine.read(ROOT / file), old[2:], new[2:]) is not None
    place, _, function = test.partition("::")
    assert f"def {function.partition('[')[0]}(" in mine.read(ROOT / place)


@pytest.mark.slow
@every_bug
def test_a_bug_turns_its_test_red(name, file, old, new, test, copy):
    source = mine.read(copy / file)
    mine.write(copy / file, edit(source, old[2:], new[2:]) or "")
    caches = {key: str(copy.parent / "cache") for key in ("XDG_CACHE_HOME", "LOCALAPPDATA")}
    words = ("-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", test)
    done = python(*words, cwd=copy, env=os.environ | caches)
    mine.write(copy / file, source)
    crashed = done.returncode < 0  # as code in C may
    assert crashed or (done.returncode == 1 and "1 failed" in done.stdout), done.stdout
    assert "cannot be compiled" not in done.stdout, done.stdout  # a typo is not the bug
