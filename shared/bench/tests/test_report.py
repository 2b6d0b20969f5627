"""The texts come from the results alone; what is stale, missing or left over is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from shared import measure, paths
from shared.bench import report
from shared.bench.kit import Benchmark
from shared.bench.tests.tools import LIMITS
from shared.errors import UserError

FIRST, SECOND = "stage01_first", "stage02_second"
README = """# Stairs

<!-- table: speed -->
<!-- /table -->

<!-- table: stage02_second.memory -->
<!-- /table -->

![how fast](reports/amd/stage01_first_speed.svg)
"""
REPORT = """Before.

<!-- table: memory -->
old numbers
<!-- /table -->
After, from the other machine:
<!-- table: speed @ zen -->
<!-- /table -->
<img alt="memory" src="../reports/amd/stage02_second_memory.svg">
"""


class Fake:
    """A benchmark with a table and a chart for each name of a result, and the first as headline."""

    def __init__(self, *names: str, drawn: int | None = None) -> None:
        self.names, self.drawn = names, names[:drawn]

    def tables(self, found: Mapping[str, Any]) -> dict[str, str]:
        values = found["results"]
        return {name: f"| {name} |\n|--:|\n| {values[name]:.1f} |" for name in self.names}

    def charts(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: partial(self.chart, found["results"][name]) for name in self.drawn}

    def chart(self, value: float) -> Figure:
        figure = Figure(figsize=(1, 1))  # the smallest: the house style takes its time
        figure.text(0, 0, str(value))
        return figure

    def headline(self, found: Mapping[str, Any]) -> str:
        return f"{found['results'][self.names[0]]:.0f} a second"


MODULES = {FIRST: Fake("speed"), SECOND: Fake("memory")}


def save(path: Path, **results: float) -> None:
    measure.save(path, measure.content("kind", {}, results, LIMITS))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with the results of two machines, whose reports were written."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / SECOND).mkdir()
    (folder / "README.md").write_bytes(README.encode())
    (folder / SECOND / "REPORT.md").write_bytes(REPORT.encode())
    for machine, speed in (("amd", 1.0), ("zen", 2.0)):
        save(folder / "reports" / machine / f"{FIRST}.json", speed=speed)
        save(folder / "reports" / machine / f"{SECOND}.json", memory=10 * speed)
    assert report.report(folder, MODULES, check=False) == 0
    return folder


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of that repository to change."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def files(root: Path) -> dict[str, bytes]:
    every = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in every}


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Status and output of a check, which must write nothing."""

    def status_and_output(root: Path, modules: Mapping[str, Any] = MODULES) -> tuple[int, str]:
        capsys.readouterr()
        before = files(root)
        status = report.report(root, modules, check=True)
        assert files(root) == before
        return status, capsys.readouterr().out

    return status_and_output


def change(root: Path, old: str, new: str) -> None:
    path = root / "README.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_tables_are_filled_in_and_all_else_is_left_alone(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert "<!-- table: speed -->\n\n| speed |\n|--:|\n| 1.0 |\n\n<!-- /table -->\n" in text
    assert ".memory -->\n\n| memory |\n|--:|\n| 10.0 |\n\n<!-- /table -->\n" in text
    text = (root / SECOND / "REPORT.md").read_text()
    table = "| memory |\n|--:|\n| 10.0 |"
    begins = f"Before.\n\n<!-- table: memory -->\n\n{table}\n\n<!-- /table -->\nAfter,"
    assert text.startswith(begins) and text.endswith(REPORT.splitlines()[-1] + "\n")
    assert "| speed |\n|--:|\n| 2.0 |" in text and "old numbers" not in text


def test_what_is_stale_is_named_until_the_next_run_and_line_ends_are_not(
    root: Path, check: Check
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
    status, output = check(root)
    assert status == 0 and output.startswith("All 7 files")
    change(root, "| 1.0 |", "| 9.9 |")
    status, output = check(root)
    assert status == 1 and "stale: README.md" in output
    save(root / "reports" / "amd" / f"{FIRST}.json", speed=7.0)
    status, output = check(root)
    assert status == 1 and output.count("stale:") == 2
    assert "stale: README.md" in output and "stale: reports/amd/stage01_first_speed.svg" in output
    assert report.report(root, MODULES, check=False) == 0
    assert check(root)[0] == 0 and "| 7.0 |" in (root / "README.md").read_text()
    machines = root / "reports" / "machines.json"
    assert json.loads(machines.read_text())["default"] == "amd"
    machines.write_text(machines.read_text().replace('"amd"', '"zen"'))
    assert report.report(root, MODULES, check=False) == 0
    assert "| 2.0 |" in (root / "README.md").read_text()
    assert json.loads(machines.read_text())["default"] == "zen"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("table: speed ", "table: haste ", "README.md, line 3: there is no table 'haste': run"),
        ("table: speed ", "table: speed @ nowhere ", "no table 'speed' from nowhere"),
        ("<!-- table: speed -->", "<!-- /table -->", "line 3: '<!-- /table -->' is no part of"),
        ("<!-- /table -->\n\n<!-- table: s", "<!-- table: s", "line 3: '<!-- table: speed -->' is"),
        ("| 10.0 |\n\n<!-- /table -->", "| 10.0 |", "'<!-- table: stage02_second.memory -->' is"),
    ],
)
def test_markers_that_lead_nowhere(
    root: Path, check: Check, old: str, new: str, message: str
) -> None:
    change(root, old, new)
    status, output = check(root)
    assert status == 1 and message in output
    text = (root / "README.md").read_text()
    assert report.report(root, MODULES, check=False) == 1
    assert (root / "README.md").read_text() == text  # a text with a problem is left alone


def test_a_name_of_two_stages_needs_the_stage(root: Path, check: Check) -> None:
    modules = {FIRST: Fake("speed"), SECOND: Fake("memory", "speed", drawn=1)}
    for path in (root / "reports").glob(f"*/{SECOND}.json"):
        save(path, memory=3.0, speed=4.0)
    change(root, "stage02_second.memory", "stage02_second.speed")
    status, output = check(root, modules)
    assert status == 1
    assert "'speed' is one of stage01_first and stage02_second: write stage01_first.speed" in output
    report.report(root, modules, check=False)
    assert "| 4.0 |" in (root / "README.md").read_text()  # by its full name
    assert "| 4.0 |" in (root / SECOND / "REPORT.md").read_text()  # its own, in its own text


def add_stages(root: Path) -> None:
    """Make stages of the two folders, and request their table in the README."""
    for stage, question in ((FIRST, "What does it cost?"), (SECOND, "Why pay twice?")):
        (root / stage).mkdir(exist_ok=True)
        about = f'"""A stage."""\nQUESTION: str = "{question}"\nFIRST_FILE = "engine.py"\n'
        (root / stage / "__init__.py").write_text(about)
        (root / stage / "engine.py").write_text("")
    change(root, "# Stairs\n", "# Stairs\n\n<!-- table: stages -->\n<!-- /table -->\n")


def test_the_table_of_stages(root: Path, check: Check) -> None:
    add_stages(root)
    assert report.report(root, MODULES, check=False) == 0
    first, second = (f"[{stage}]({stage}/)" for stage in (FIRST, SECOND))
    assert (
        "| stage | question | result | open first |\n|---|---|---|---|\n"
        f"| {first} | What does it cost? | 1 a second | [`engine.py`]({FIRST}/engine.py) |\n"
        f"| {second} | Why pay twice? | 10 a second | [`engine.py`]({SECOND}/engine.py) |\n"
    ) in (root / "README.md").read_text()
    (root / SECOND / "__init__.py").write_text('QUESTION = "Why?"\nFIRST_FILE = "gone.py"\n')
    status, output = check(root)
    assert status == 1 and "stale: README.md" in output
    assert f"{SECOND}/__init__.py names gone.py, which does not exist" in output
    (root / SECOND / "__init__.py").write_text("")
    assert f"{SECOND}/__init__.py has no QUESTION" in check(root)[1]


def test_what_no_benchmark_makes_or_reads_is_named(root: Path, check: Check) -> None:
    (root / "reports" / "amd" / "old_chart.svg").write_text("<svg/>")
    (root / "reports" / "amd" / "stage99_gone.json").write_text("{}")
    (root / "reports" / "zen" / f"{FIRST}.json").write_text('{"schema": 99}')
    status, output = check(root)
    assert status == 1
    assert "reports/amd/old_chart.svg is drawn by no benchmark" in output
    assert "reports/amd/stage99_gone.json belongs to no stage" in output
    assert "have schema 99" in output  # a problem, not a crash
    (root / "reports" / "machines.json").write_text("[]")
    with pytest.raises(UserError, match="machines.json is damaged"):
        report.Report(root, MODULES)
    shutil.rmtree(root / "reports")
    (root / "README.md").write_text("# Stairs\n")
    (root / SECOND / "REPORT.md").unlink()
    status, output = check(root)
    assert status == 0 and "no results" in output
    add_stages(root)
    assert report.report(root, MODULES, check=False) == 0
    assert (root / "README.md").read_text().count("| not measured yet |") == 2


def test_charts_of_another_matplotlib_must_exist_and_are_not_compared(
    root: Path, check: Check
) -> None:
    settings = root / "reports" / "machines.json"
    settings.write_text(settings.read_text().replace(report.drawn_with()["matplotlib"], "0.1"))
    chart = root / "reports" / "zen" / f"{FIRST}_speed.svg"
    chart.write_text("<svg>drawn a little differently</svg>\n")
    status, output = check(root)
    assert status == 0 and "note: charts were not compared: drawn by matplotlib 0.1 on" in output
    chart.unlink()
    status, output = check(root)
    assert status == 1 and f"reports/zen/{FIRST}_speed.svg does not exist" in output
    assert report.report(root, MODULES, check=False) == 0
    assert chart.exists() and json.loads(settings.read_text())["charts"] == report.drawn_with()


def test_a_stage_that_has_not_run_on_the_default_machine_shows_another_one(root: Path) -> None:
    """Its table and its headline; its own replace them as soon as there are some."""
    add_stages(root)
    here = root / "reports" / "amd" / f"{SECOND}.json"
    here.unlink()
    (root / "reports" / "amd" / f"{SECOND}_memory.svg").unlink()
    (root / SECOND / "REPORT.md").write_bytes(REPORT.replace("/amd/", "/zen/").encode())
    for value in (20.0, 30.0):
        assert report.report(root, MODULES, check=False) == 0
        text = (root / "README.md").read_text()
        assert "| 1.0 |" in text and f"| {value} |" in text and text.count("0.0 |") == 1
        assert "| 1 a second |" in text and f"| Why pay twice? | {value:.0f} a second |" in text
        assert f"| {value} |" in (root / SECOND / "REPORT.md").read_text()
        save(here, memory=30.0)


def test_every_stage_has_a_benchmark_and_every_lesson_small_tables() -> None:
    """At most 6 columns and 8 lines: more is for the stage's REPORT.md."""
    found = report.benchmarks()
    others = ["staircase", "peers", "peers_shapes", "stage07_crosscheck"]
    assert list(found) == [*paths.discover(), *others]
    assert all(isinstance(module, Benchmark) for module in found.values())
    for path in paths.ROOT.glob("stage*/README.md"):
        for table in re.findall(r"<!-- table: .*?<!-- /table -->", path.read_text(), re.DOTALL):
            lines = [line for line in table.splitlines() if line.startswith("|")]
            assert len(lines) <= 2 + 8 and lines[0].count("|") <= 1 + 6, (path, table)
