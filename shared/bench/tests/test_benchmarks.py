from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared import measure
from shared.bench import benchmarks
from shared.errors import UserError

CONFIGURATION, RESULTS = {"repeats": 2}, {"speed": [{"seconds": [1.0, 2.0]}]}
LIMITS = measure.Limits("cpu", 1, 10.0, {"float32": 100.0})


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    return {**CONFIGURATION, "quick": quick}, RESULTS, LIMITS


def tables(results: dict[str, Any]) -> dict[str, str]:
    where = f"{results['machine']['cpus']} CPUs, torch {results['versions']['torch']}, {results['threads']} threads"
    return {
        "speed": f"| quick | {results['configuration']['quick']} | {results['results']} | {results['limits']} | {where} |"
    }


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "REPORTS", tmp_path / "reports")
    return tmp_path / "reports"


def test_a_quick_run_shows_its_tables_and_keeps_nothing(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks.main("stage09_test", "Measures nothing.", run, tables, ["--quick"])
    assert capsys.readouterr().out.startswith("\nspeed\n\n| quick | True | {'speed'")
    assert not reports.exists()


def test_a_full_run_is_kept_as_the_quick_one_showed_it(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks.main("stage09_test", "Measures nothing.", run, tables, [])
    (file,) = reports.glob("*/*.json")
    assert (
        capsys.readouterr().out
        == f"Written: reports/{file.parent.name}/stage09_test.json. Next: python -m shared.bench.report\n"
    )
    kept, shown = (
        measure.load(file),
        benchmarks.unsaved({**CONFIGURATION, "quick": False}, RESULTS, LIMITS),
    )
    assert kept["kind"] == "stage09_test"
    assert {name: kept[name] for name in shown} == shown
    assert tables(kept) == tables(shown)


def test_a_wrong_option_is_the_users_error_before_anything_is_measured(reports: Path) -> None:
    with pytest.raises(UserError, match="Unrecognized arguments: --quik; --help"):
        benchmarks.main(
            "stage09_test",
            "Measures nothing.",
            lambda quick: pytest.fail("it ran"),
            tables,
            ["--quik"],
        )
