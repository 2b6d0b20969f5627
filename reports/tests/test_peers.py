"""An engine of another process answers, and one that ends says why in its own words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from reports import peers
from reports.peers import install
from reports.peers.install import ENGINES, OURS
from reports.peers.process import Driver
from shared import kit
from shared.errors import UserError

ENDS = "import sys; print('sched_reserve: 1 MiB', file=sys.stderr); sys.exit('it could not load')"


def test_an_engine_that_ends_gives_its_reason_not_its_log() -> None:
    with Driver([sys.executable, "-c", ENDS], {}) as driver, pytest.raises(UserError) as failed:
        driver.ready()
    assert str(failed.value) == "it could not load"


@pytest.mark.slow
def test_ours_answers_beside_engines_that_are_absent(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "HOME", tmp_path)
    monkeypatch.setattr(install, "HOME", tmp_path)
    few = {name: engine for name, engine in ENGINES.items() if name in (OURS, "llama.cpp")}
    monkeypatch.setattr(peers, "ENGINES", few)
    bench = kit.Bench(quick=True)
    peers.measure(bench)
    ours, *others = [*peers.tables(kit.Results({"results": bench.results}))["engines"]]
    assert ours["engine"] == OURS and ours["answers as ours"] == "34 of 34"
    assert any("not installed" in str(line.get("answers as ours")) for line in others)
