"""The texts come from the results alone; what is stale, missing or left over is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from reports import draw as report
from shared import measure, paths
from shared.bench.kit import Benchmark
from shared.bench.tests.tools import LIMITS

FIRST, SECOND = "stage01_first", "stage02_second"
README = """# Stairs

<!-- table: stages -->
<!-- /table -->

<!-- table: stage02_second.memory -->
<!-- /table -->
"""
REPORT = """Before.

<!-- table: memory -->
old numbers
<!-- /table -->
After.
"""


class Fake:
    """A benchmark with a table, a chart and a headline of one result."""

    def __init__(self, name: str) -> None:
        self.name, self.draw = name, {name: None}

    def tables(self, found: Mapping[str, Any]) -> dict[str, str]:
        return {self.name: f"| {self.name} |\n|--:|\n| {found['results'][self.name]:.1f} |"}

    def charts(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {self.name: partial(self.chart, found["results"][self.name])}

    def chart(self, value: float) -> Figure:
        figure = Figure(figsize=(1, 1))  # the smallest: the house style takes its time
        figure.text(0, 0, str(value))
        return figure

    def headline(self, found: Mapping[str, Any]) -> str:
        return f"{found['results'][self.name]:.0f} a second"


MODULES = {FIRST: Fake("speed"), SECOND: Fake("memory")}


def save(root: Path, machine: str, stage: str, value: float) -> None:
    results = {MODULES[stage].name: value}
    path = root / "reports" / machine / f"{stage}.json"
    measure.save(path, measure.content("kind", {}, results, LIMITS))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with the results of two machines, whose reports were written."""
    root = tmp_path_factory.mktemp("repository")
    for stage, question in ((FIRST, "What does it cost?"), (SECOND, "Why pay twice?")):
        (root / stage).mkdir()
        about = f'"""A stage."""\nQUESTION: str = "{question}"\nFIRST_FILE = "engine.py"\n'
        (root / stage / "__init__.py").write_text(about)
        (root / stage / "engine.py").write_text("")
    (root / "README.md").write_bytes(README.encode())
    (root / SECOND / "REPORT.md").write_bytes(REPORT.encode())
    for machine, value in (("amd", 1.0), ("zen", 2.0)):
        save(root, machine, FIRST, value)
        save(root, machine, SECOND, 10 * value)
    assert report.report(root, MODULES, check=False) == 0
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of that repository to change."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def files(root: Path) -> dict[str, bytes]:
    every = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in every}


def check(root: Path) -> report.Report:
    return report.Report(root, MODULES, check=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_tables_are_filled_in_and_all_else_is_left_alone(root: Path) -> None:
    table = "| memory |\n|--:|\n| 10.0 |\n\n<!-- /table -->\n"
    first, second = (f"[{stage}]({stage}/)" for stage in (FIRST, SECOND))
    assert (root / "README.md").read_text() == (
        "# Stairs\n\n<!-- table: stages -->\n\n"
        "| stage | question | result | open first |\n|---|---|---|---|\n"
        f"| {first} | What does it cost? | 1 a second | [`engine.py`]({FIRST}/engine.py) |\n"
        f"| {second} | Why pay twice? | 10 a second | [`engine.py`]({SECOND}/engine.py) |\n\n"
        f"<!-- /table -->\n\n<!-- table: stage02_second.memory -->\n\n{table}"
    )
    text = (root / SECOND / "REPORT.md").read_text()
    assert text == f"Before.\n\n<!-- table: memory -->\n\n{table}After.\n"


def test_a_text_may_show_the_table_of_another_machine(root: Path) -> None:
    path = root / SECOND / "REPORT.md"
    change(path, "<!-- table: memory -->", "<!-- table: zen/memory -->")
    assert report.report(root, MODULES, check=False) == 0
    assert "| 20.0 |" in path.read_text()
    for name, words in (("zen/speed", "no table"), ("amd/stage01_first.fast", "no table")):
        path.write_text(REPORT.replace("table: memory", f"table: {name}"))
        assert words in " ".join(check(root).problems)


def test_what_is_stale_is_named_until_the_next_run_and_line_ends_are_not(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    assert {path for path in before if path.endswith(".svg")} == {
        f"reports/{machine}/{stem}.svg"
        for machine in ("amd", "zen")
        for stem in (f"{FIRST}_speed", f"{SECOND}_memory")
    }
    assert report.report(root, MODULES, check=False) == 0 and files(root) == before
    for path in root.rglob("*.*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert report.report(root, MODULES, check=True) == 0
    assert capsys.readouterr().out.endswith("All 7 files of the reports match the results.\n")
    save(root, "amd", FIRST, 7.0)
    change(root / "README.md", "| 10.0 |", "| 9.9 |")
    before = files(root)
    assert report.report(root, MODULES, check=True) == 1 and files(root) == before
    assert capsys.readouterr().out.splitlines()[:2] == [
        "stale: reports/amd/stage01_first_speed.svg",
        "stale: README.md",
    ]
    assert report.report(root, MODULES, check=False) == 0
    text = (root / "README.md").read_text()
    assert not check(root).stale and "| 7 a second |" in text and "| 10.0 |" in text


def test_the_default_machine_is_shown_and_another_one_where_it_has_not_run(root: Path) -> None:
    change(root / "reports" / "machines.json", '"amd"', '"zen"')
    assert report.report(root, MODULES, check=False) == 0
    assert "| 20.0 |" in (root / "README.md").read_text()
    assert json.loads((root / "reports" / "machines.json").read_text())["default"] == "zen"
    for file in (f"{SECOND}.json", f"{SECOND}_memory.svg"):
        (root / "reports" / "zen" / file).unlink()
    assert report.report(root, MODULES, check=False) == 0
    text = (root / "README.md").read_text()
    assert "| 2 a second |" in text and "| 10 a second |" in text and "| 10.0 |" in text
    shutil.rmtree(root / "reports")
    assert report.report(root, MODULES, check=False) == 0
    assert (root / "README.md").read_text().count("not measured yet") == 3
    assert "no results" in check(root).notes[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("second.memory ", "second.haste ", "README.md: there is no table 'stage02_second.haste'"),
        ("stage02_second.memory", "memory", "there is no table 'memory'"),
        ("<!-- table: stages -->", "<!-- /table -->", "'<!-- /table -->' is not part of a pair"),
        ("| 10.0 |\n\n<!-- /table -->", "| 10.0 |", "'<!-- table: stage02_second.memory -->' is"),
    ],
)
def test_markers_that_lead_nowhere(root: Path, old: str, new: str, message: str) -> None:
    change(root / "README.md", old, new)
    text = (root / "README.md").read_text()
    assert any(message in problem for problem in check(root).problems)
    assert report.report(root, MODULES, check=False) == 1
    assert (root / "README.md").read_text() == text  # a text with a problem is left alone


def test_what_no_benchmark_makes_or_reads_is_named(root: Path) -> None:
    (root / "reports" / "amd" / "old_chart.svg").write_text("<svg/>")
    (root / "reports" / "amd" / "stage99_gone.json").write_text("{}")
    (root / "reports" / "zen" / f"{FIRST}.json").write_text('{"schema": 99}')
    change(root / SECOND / "__init__.py", "engine.py", "gone.py")
    problems = "\n".join(check(root).problems)
    assert "reports/amd/old_chart.svg is drawn by no benchmark" in problems
    assert "reports/amd/stage99_gone.json belongs to no stage" in problems
    assert "have schema 99" in problems  # a problem, not a crash
    assert f"{SECOND}/__init__.py has no FIRST_FILE that exists" in problems


def test_charts_of_another_matplotlib_must_exist_and_are_not_compared(root: Path) -> None:
    settings = root / "reports" / "machines.json"
    change(settings, report.drawn_with()["matplotlib"], "0.1")
    chart = root / "reports" / "zen" / f"{FIRST}_speed.svg"
    chart.write_text("<svg>drawn a little differently</svg>\n")
    found = check(root)
    assert "charts were not compared: drawn by matplotlib 0.1 on" in found.notes[0]
    assert not found.stale and not found.problems
    chart.unlink()
    assert check(root).problems[0].startswith(f"reports/zen/{FIRST}_speed.svg does not exist")
    assert report.report(root, MODULES, check=False) == 0
    assert chart.exists() and json.loads(settings.read_text())["charts"] == report.drawn_with()


def test_every_stage_has_a_benchmark_and_every_lesson_small_tables() -> None:
    """At most 6 columns and 8 lines: more is for the stage's REPORT.md."""
    found = report.benchmarks()
    others = ["staircase", "peers", "peers_shapes", "peers_quantized"]
    others += ["stage07_crosscheck", "stage10_losses"]
    assert list(found) == [*paths.discover(), *others]
    assert all(isinstance(module, Benchmark) for module in found.values())
    for path in paths.ROOT.glob("stage*/README.md"):
        for table in re.findall(r"<!-- table: .*?<!-- /table -->", path.read_text(), re.DOTALL):
            lines = [line for line in table.splitlines() if line.startswith("|")]
            assert len(lines) <= 2 + 8 and lines[0].count("|") <= 1 + 6, (path, table)
