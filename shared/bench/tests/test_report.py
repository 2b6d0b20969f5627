"""Reports: what is written comes from the results alone, and everything stale, missing or left over is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from shared import measure, paths
from shared.bench import report, staircase
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


def drawing(value: float) -> Figure:
    """The smallest chart that shows `value`: the house style is not what is tested here, and takes its time."""
    figure = Figure(figsize=(1, 1))
    figure.text(0, 0, str(value))
    return figure


def benchmark(*names: str) -> SimpleNamespace:
    """A benchmark module: for each name a table and a chart of the results."""

    def tables(found: Mapping[str, Any]) -> dict[str, str]:
        return {name: f"| {name} |\n|--:|\n| {found['results'][name]:.1f} |" for name in names}

    def drawings(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: lambda name=name: drawing(found["results"][name]) for name in names}

    return SimpleNamespace(tables=tables, charts=drawings)


MODULES = {FIRST: benchmark("speed"), SECOND: benchmark("memory")}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small repository with the results of two machines, whose reports have been written."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / SECOND).mkdir()
    (folder / "README.md").write_bytes(README.encode())
    (folder / SECOND / "REPORT.md").write_bytes(REPORT.encode())
    for machine, speed in (("amd", 1.0), ("zen", 2.0)):
        measure.save(folder / "reports" / machine / f"{FIRST}.json", "speed", {}, {"speed": speed})
        measure.save(
            folder / "reports" / machine / f"{SECOND}.json", "memory", {}, {"memory": 10 * speed}
        )
    assert report.report(folder, MODULES, check=False) == 0
    return folder


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of that repository to change."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def found(
    root: Path, capsys: pytest.CaptureFixture[str], modules: Mapping[str, Any] = MODULES
) -> tuple[int, str]:
    """Status and output of a check, which must write nothing."""
    capsys.readouterr()
    before = files(root)
    status = report.report(root, modules, check=True)
    assert files(root) == before
    return status, capsys.readouterr().out


def test_tables_are_filled_in_and_all_else_is_left_alone(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert "<!-- table: speed -->\n\n| speed |\n|--:|\n| 1.0 |\n\n<!-- /table -->\n" in text
    assert (
        "<!-- table: stage02_second.memory -->\n\n| memory |\n|--:|\n| 10.0 |\n\n<!-- /table -->\n"
        in text
    )
    text = (root / SECOND / "REPORT.md").read_text()
    assert text.startswith(
        "Before.\n\n<!-- table: memory -->\n\n| memory |\n|--:|\n| 10.0 |\n\n<!-- /table -->\nAfter,"
    )
    assert "| speed |\n|--:|\n| 2.0 |" in text and "old numbers" not in text
    assert text.endswith(REPORT.splitlines()[-1] + "\n")


def test_charts_are_drawn_for_every_machine(root: Path) -> None:
    drawn = {path for path in files(root) if path.endswith(".svg")}
    stems = (f"{FIRST}_speed", f"{SECOND}_memory")
    assert drawn == {
        f"reports/{machine}/{stem}.svg" for machine in ("amd", "zen") for stem in stems
    }
    assert json.loads((root / "reports" / "machines.json").read_text())["default"] == "amd"


def test_a_second_run_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    assert report.report(root, MODULES, check=False) == 0
    assert files(root) == before
    status, output = found(root, capsys)
    assert status == 0 and output.startswith("All 7 files")


def test_line_ends_of_windows_are_not_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in root.rglob("*"):
        if path.suffix in (".md", ".svg", ".json"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert found(root, capsys)[0] == 0


def test_new_results_make_chart_and_tables_stale_until_the_next_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure.save(root / "reports" / "amd" / f"{FIRST}.json", "speed", {}, {"speed": 7.0})
    status, output = found(root, capsys)
    assert status == 1
    assert "stale: README.md" in output and "stale: reports/amd/stage01_first_speed.svg" in output
    assert output.count("stale:") == 2
    assert report.report(root, MODULES, check=False) == 0
    assert found(root, capsys)[0] == 0
    assert "| 7.0 |" in (root / "README.md").read_text()


def test_a_number_changed_by_hand_is_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "README.md"
    path.write_text(path.read_text().replace("| 1.0 |", "| 9.9 |"))
    status, output = found(root, capsys)
    assert status == 1 and "stale: README.md" in output


def test_the_default_machine_is_the_one_that_was_chosen(root: Path) -> None:
    path = root / "reports" / "machines.json"
    path.write_text(path.read_text().replace('"amd"', '"zen"'))
    report.report(root, MODULES, check=False)
    assert "| 2.0 |" in (root / "README.md").read_text()
    assert json.loads(path.read_text())["default"] == "zen"


def change(root: Path, old: str, new: str) -> None:
    path = root / "README.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("table: speed ", "table: haste ", "README.md, line 3: there is no table 'haste': run"),
        ("table: speed ", "table: speed @ nowhere ", "no table 'speed' from nowhere"),
        (
            "<!-- table: speed -->",
            "<!-- /table -->",
            "line 3: '<!-- /table -->' where no table began",
        ),
        (
            "<!-- /table -->\n\n<!-- table: stage02",
            "<!-- table: stage02",
            "where the table before has not ended",
        ),
        (
            "| 10.0 |\n\n<!-- /table -->",
            "| 10.0 |",
            "README.md: the last table has no '<!-- /table -->'",
        ),
        (
            "first_speed.svg",
            "first_haste.svg",
            "line 19: reports/amd/stage01_first_haste.svg does not exist",
        ),
    ],
)
def test_markers_and_links_that_lead_nowhere(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    change(root, old, new)
    status, output = found(root, capsys)
    assert status == 1 and message in output
    text = (root / "README.md").read_text()
    assert report.report(root, MODULES, check=False) == 1
    assert (root / "README.md").read_text() == text  # what is not understood is left alone


def test_a_name_that_two_stages_use_must_be_made_plain(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {
        FIRST: benchmark("speed"),
        SECOND: SimpleNamespace(tables=MODULES[FIRST].tables, charts=MODULES[SECOND].charts),
    }
    for path in (root / "reports").glob(f"*/{SECOND}.json"):
        measure.save(path, "both", {}, {"memory": 3.0, "speed": 4.0})
    change(root, "stage02_second.memory", "stage02_second.speed")
    status, output = found(root, capsys, modules)
    assert (
        status == 1
        and "the table 'speed' is one of stage01_first and stage02_second: write stage01_first.speed"
        in output
    )
    report.report(root, modules, check=False)
    assert "| 4.0 |" in (root / "README.md").read_text()  # the full name is
    assert (
        "| 4.0 |" in (root / SECOND / "REPORT.md").read_text()
    )  # and so is a stage's own, in its own text


def add_stages(root: Path) -> dict[str, Any]:
    """Make stages of the two folders, ask for their table in the README, and return benchmarks with a headline."""
    for stage, question in ((FIRST, "What does it cost?"), (SECOND, "Why pay twice?")):
        (root / stage).mkdir(exist_ok=True)
        about = f'"""A stage."""\nQUESTION: str = "{question}"\nFIRST_FILE = "engine.py"\n'
        (root / stage / "__init__.py").write_text(about)
        (root / stage / "engine.py").write_text("")
    change(root, "# Stairs\n", "# Stairs\n\n<!-- table: stages -->\n<!-- /table -->\n")
    tell = {
        name: lambda found, name=name: f"{found['results'][name]:.0f} tok/s"
        for name in ("speed", "memory")
    }
    return {
        stage: SimpleNamespace(
            tables=MODULES[stage].tables, charts=MODULES[stage].charts, headline=tell[name]
        )
        for stage, name in ((FIRST, "speed"), (SECOND, "memory"))
    }


def test_the_table_of_stages(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = add_stages(root)
    assert report.report(root, modules, check=False) == 0
    assert (
        "| stage | question | result | open first |\n|---|---|---|---|\n"
        f"| [{FIRST}]({FIRST}/) | What does it cost? | 1 tok/s | [`engine.py`]({FIRST}/engine.py) |\n"
        f"| [{SECOND}]({SECOND}/) | Why pay twice? | 10 tok/s | [`engine.py`]({SECOND}/engine.py) |\n"
    ) in (root / "README.md").read_text()
    assert found(root, capsys, modules)[0] == 0
    (root / SECOND / "__init__.py").write_text('QUESTION = "Why?"\nFIRST_FILE = "gone.py"\n')
    status, output = found(root, capsys, modules)
    assert status == 1 and "stale: README.md" in output
    assert f"{SECOND}/__init__.py names the file gone.py, which does not exist" in output
    (root / SECOND / "__init__.py").write_text("")
    assert f"{SECOND}/__init__.py does not say its QUESTION" in found(root, capsys, modules)[1]


def test_the_table_of_stages_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Stairs\n")
    modules = add_stages(tmp_path)
    assert report.report(tmp_path, modules, check=False) == 0
    assert (tmp_path / "README.md").read_text().count("| not measured yet |") == 2


def test_what_no_benchmark_makes_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "reports" / "amd" / "old_chart.svg").write_text("<svg/>")
    (root / "reports" / "amd" / "stage99_gone.json").write_text("{}")
    status, output = found(root, capsys)
    assert status == 1
    assert "reports/amd/old_chart.svg is drawn by no benchmark" in output
    assert "reports/amd/stage99_gone.json belongs to no stage" in output


def test_results_of_another_schema_are_a_problem_not_a_crash(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "reports" / "zen" / f"{FIRST}.json").write_text('{"schema": 99}')
    status, output = found(root, capsys)
    assert status == 1 and "have schema 99" in output


def test_charts_of_another_matplotlib_are_looked_for_but_not_compared(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = root / "reports" / "machines.json"
    settings.write_text(settings.read_text().replace(report.drawn_with()["matplotlib"], "0.1"))
    chart = root / "reports" / "zen" / f"{FIRST}_speed.svg"
    chart.write_text("<svg>drawn a little differently</svg>\n")
    status, output = found(root, capsys)
    assert status == 0 and "note: charts were not compared: matplotlib 0.1 on" in output
    chart.unlink()
    status, output = found(root, capsys)
    assert status == 1 and f"reports/zen/{FIRST}_speed.svg does not exist" in output
    assert report.report(root, MODULES, check=False) == 0
    assert chart.exists() and json.loads(settings.read_text())["charts"] == report.drawn_with()


def test_damaged_settings_are_the_users_to_mend(root: Path) -> None:
    (root / "reports" / "machines.json").write_text("[]")
    with pytest.raises(UserError, match="machines.json is damaged"):
        report.build(root, MODULES)


def test_a_repository_without_results_is_not_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# Nothing yet\n")
    status, output = found(tmp_path, capsys)
    assert status == 0 and "no results" in output


def test_every_benchmark_of_this_repository_has_tables_and_charts() -> None:
    modules = report.benchmarks()
    assert set(modules) <= {*paths.discover(), staircase.KIND}
    assert all(callable(module.tables) and callable(module.charts) for module in modules.values())


def test_a_stage_that_has_not_run_on_the_default_machine_shows_another_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table and its headline; as soon as the default machine has its own, these are shown."""
    modules = add_stages(root)
    here = root / "reports" / "amd" / f"{SECOND}.json"
    here.unlink()
    (root / "reports" / "amd" / f"{SECOND}_memory.svg").unlink()
    (root / SECOND / "REPORT.md").write_bytes(REPORT.replace("/amd/", "/zen/").encode())
    assert report.report(root, modules, check=False) == 0
    text = (root / "README.md").read_text()
    assert "| 1.0 |" in text and "| 20.0 |" in text
    assert "| What does it cost? | 1 tok/s |" in text and "| Why pay twice? | 20 tok/s |" in text
    assert "| 20.0 |" in (root / SECOND / "REPORT.md").read_text()
    assert found(root, capsys, modules)[0] == 0

    measure.save(here, "memory", {}, {"memory": 30.0})
    assert report.report(root, modules, check=False) == 0
    text = (root / "README.md").read_text()
    assert "| 30.0 |" in text and "| 20.0 |" not in text
    assert "| Why pay twice? | 30 tok/s |" in text
    assert "| 30.0 |" in (root / SECOND / "REPORT.md").read_text()
    assert json.loads((root / "reports" / "machines.json").read_text())["default"] == "amd"
