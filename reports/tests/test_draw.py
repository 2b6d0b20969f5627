"""Tables come from the results alone, the same bytes each time; what has no result stays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reports import draw
from shared import kit, paths

TEXT = "{0}\n\n{1}\n\n<!-- /table -->\n"
SPEEDS = {"memory": 30.0, "float32": 100.0, "bfloat16": 200.0}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one stage, measured on one machine."""
    stage = tmp_path / "stage01_first"
    stage.mkdir()
    (stage / "__init__.py").write_text('QUESTION = "Why?"\n')
    (stage / "REPORT.md").write_text(TEXT.format("<!-- table: speed -->", "old"))
    (tmp_path / "README.md").write_text(TEXT.format("<!-- table: stages -->", ""))
    bench = kit.Bench()
    monkeypatch.setattr(kit.measure, "speeds", lambda device: dict(SPEEDS))
    bench.row("speed", {"a": lambda: {"seconds": 2.0}}, 3)
    content = kit.content_of("stage01_first", bench)
    folder = tmp_path / "reports" / "here"
    folder.mkdir(parents=True)
    (folder / "stage01_first.json").write_text(json.dumps(content))

    def tables(results: Any) -> Any:
        return {"speed": [{"seconds": row.median("a")} for row in results.rows("speed")]}

    module = SimpleNamespace(tables=tables, headline=lambda results: iter(["2 s"]))
    monkeypatch.setattr(draw, "modules", lambda: {"stage01_first": module})
    monkeypatch.setattr(draw, "pictures", dict)
    return tmp_path


def test_tables_and_headlines_are_filled_in_once(house: Path) -> None:
    assert draw.report(house, "here", check=True) == 1
    assert draw.report(house, "here") == 0 == draw.report(house, check=True)
    assert "| 2.0 |" in (house / "stage01_first/REPORT.md").read_text()
    assert "| Why? | 2 s |" in (house / "README.md").read_text()


def test_without_results_a_text_stays(house: Path) -> None:
    assert draw.report(house, "elsewhere") == 0
    assert "\nold\n" in (house / "stage01_first/REPORT.md").read_text()


def test_a_marker_that_leads_nowhere_is_named(house: Path, capsys: Any) -> None:
    (house / "stage01_first/README.md").write_text(TEXT.format("<!-- table: none -->", ""))
    assert draw.report(house, "here") == 1
    assert "there is no table 'none'" in capsys.readouterr().out


def test_the_texts_of_the_project_are_up_to_date() -> None:
    assert draw.report(paths.ROOT, check=True) == 0
