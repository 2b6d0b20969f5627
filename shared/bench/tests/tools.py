"""What the tests of all benchmarks share: a real run of a tiny plan, and a look at all it draws."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared import charts, measure, paths
from shared.bench.kit import Benchmark

LIMITS = measure.Limits("cpu", 1, 30.0, {"float32": 100.0, "bfloat16": 200.0})


def measured(benchmark: Benchmark, plan: Any) -> dict[str, Any]:
    """The results of a run, as they will be read back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "limits", lambda *_, **__: LIMITS)
        content: dict[str, Any] = json.loads(json.dumps(benchmark.run(plan), allow_nan=False))
    return content


def lines(text: str) -> list[list[str]]:
    """The cells of a table, line by line, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def check_sums(stage: str, *sentences: str) -> None:
    """That a lesson predicts what `sentences` say, wherever their lines break."""
    text = (paths.ROOT / stage / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Predict a number")[2].partition("\n## ")[0]
    for sentence in sentences:
        assert sentence in " ".join(section.split())


def check_drawn(benchmark: Benchmark, content: dict[str, Any]) -> dict[str, int]:
    """That every table is whole and every chart is drawn; returns the number of lines by table."""
    counts = {}
    for name, text in benchmark.tables(content).items():
        blocks = [block for block in text.split("\n\n") if block.startswith("|")]
        assert blocks and "nan" not in text, name
        for block in blocks:
            assert len({line.count("|") for line in block.splitlines()}) == 1, name
            assert len(block.splitlines()) > 2, name
        counts[name] = len(blocks[0].splitlines()) - 2
    for draw in benchmark.charts(content).values():
        assert charts.render(draw()).endswith(b"</svg>\n")
    assert benchmark.headline(content)
    return counts
