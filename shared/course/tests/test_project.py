"""The project as a whole: two floors of `shared`, pictures as they are drawn, and bugs that other
projects shipped, which no stage's tests may let through. A stage's tests/bugs.txt has for each of
these a number and name, a file, an edit, and the test that it turns red."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from reports import figures
from reports.draw import drawn_with
from shared import charts
from shared.course import lessons, mine
from shared.course.museum.planting import edit
from shared.paths import ROOT, discover
from shared.testing import python
from shared.tests.test_charts import check_readable

ABOVE = ("shared.course", "shared.bench", "reports")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever the statement stands."""
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


NOT_THE_HOUSE = ("benchmark.py", "crosscheck.py", "drivers.py", "losses.py")


def test_the_ground_reaches_no_stage_and_no_floor_above():
    files = {path.relative_to(ROOT): path for path in (ROOT / "shared").rglob("*.py")}
    above = {"tests", "course", "bench"}
    ground = {name.as_posix(): files[name] for name in files if not above & set(name.parts)}
    assert len(ground) > 10
    for name, path in ground.items():
        names = list(imported(path))
        assert not [each for each in names if re.match(r"stage\d", each)], name
        assert not [each for each in names if each.startswith(ABOVE)], name
        # Names are no way around it.
        source = path.read_text(encoding="utf-8")
        assert "import_module" not in source and "__import__" not in source, name
    # So do stages, except in what they measure, test and grade.
    for path in ROOT.glob("stage*/*.py"):
        names = [] if path.name in NOT_THE_HOUSE else list(imported(path))
        assert not [each for each in names if each.startswith(ABOVE)], path


def test_no_stage_is_compared_by_its_name():
    """A later one would need an edit there: what a stage brings is its `OFFER`."""
    compared = re.compile(r"""([<>]|==)=? *["']stage\d|["']stage\d\w* *["'] *([<>]|==)""")
    for path in ROOT.rglob("*.py"):
        if "tests" not in path.parts:
            assert not compared.search(path.read_text(encoding="utf-8")), path


PICTURES = figures.pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_readable_up_to_date_and_in_a_lesson(name):
    figure, path = PICTURES[name](), figures.place(name)
    settings = json.loads((ROOT / "reports/machines.json").read_text(encoding="utf-8"))
    drawn = charts.render(figure)
    assert path.exists() and len(drawn) < 150_000
    if settings["charts"] == drawn_with():  # another version of matplotlib draws other bytes
        stale = "stale: run python -m reports.figures"
        assert path.read_bytes().replace(b"\r\n", b"\n") == drawn, stale
    shown = [text.read_text(encoding="utf-8") for text in lessons.lessons()]
    assert any(f"reports/figures/{name}.svg)" in text for text in shown)
    check_readable(figure, [text for text in figure.axes[0].texts if text.get_text().strip()])


def test_no_picture_is_left_over():
    found = {path.stem for path in (ROOT / figures.FOLDER).glob("*.svg")}
    assert found == set(PICTURES)


BUGS = [
    pytest.param(*filter(None, entry.split("\n")), id=f"{stage[5:7]}-{entry.split()[0]}")
    for stage in discover()
    if (path := ROOT / stage / "tests" / "bugs.txt").is_file()
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
