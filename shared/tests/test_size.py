"""The size of the house. A folder over its budget: let something of equal size go, or say in the
commit that raises a number which lesson or which measured win it is for (CONTRIBUTING.md)."""

from __future__ import annotations

import re

import pytest

from shared.paths import ROOT
from shared.tests.test_texts import tracked

BUDGET = {  # lines of source, of tests
    "book": (400, 0),
    "exercises": (1_075, 518),
    "reports": (1_905, 250),
    "shared": (4_080, 1_524),
    "stage01": (938, 517),
    "stage02": (326, 181),
    "stage03": (430, 454),
    "stage04": (1_331, 1_269),
    "stage05": (1_607, 1_428),
    "stage06": (2_704, 2_005),
    "stage07": (1_585, 898),
    "stage08": (896, 604),
    "stage09": (3_313, 1_103),
    "stage10": (2_404, 1_302),
    "stage11": (1_624, 1_389),
    "stage12": (1_986, 1_305),
    "stage13": (1_492, 777),
}
CODE = (".py", ".c", ".h", ".js", ".css", ".html", ".sh")
FILES = {"README.md", "EXERCISES.md", "REPORT.md", "lab.ipynb", "__main__.py", "benchmark.py"}
STAGES = sorted(path.name for path in ROOT.glob("stage[0-9][0-9]_*"))


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_keeps_its_budget(folder):
    sizes = {False: 0, True: 0}
    for path in (path for ending in CODE for path in tracked(ending)):
        parts = path.relative_to(ROOT).parts
        if parts[0].startswith(folder):
            sizes["tests" in parts] += path.read_text(encoding="utf-8").count("\n")
    assert sizes[False] <= BUDGET[folder][0] and sizes[True] <= BUDGET[folder][1]


def test_the_first_page_is_short_and_a_stage_has_its_files():
    assert (ROOT / "README.md").stat().st_size <= 9_000
    for stage in STAGES:
        assert {path.name for path in (ROOT / stage).iterdir()} >= FILES, stage


def test_the_ground_imports_no_stage():
    """But through the tables of registry.py."""
    for path in (ROOT / "shared").rglob("*.py"):
        if "tests" in path.parts or path.name == "registry.py":
            continue
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"^ *(from|import) (stage\d\d|reports|exercises)", source, re.M), path
        assert "import_module(" not in source, path
