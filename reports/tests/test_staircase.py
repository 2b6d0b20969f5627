"""Every variant of the staircase answers the same workload with proven tokens."""

from __future__ import annotations

import pytest

from reports import staircase
from shared import kit


@pytest.mark.slow
def test_all_variants_answer_the_same_workload() -> None:
    bench = kit.Bench(quick=True)
    staircase.measure(bench)
    (line, *_) = [*staircase.tables(kit.Results({"results": bench.results}))["steps"]]
    assert line["engine"] == "stage01_forward" and line["over stage 01"] == "1.0x"
