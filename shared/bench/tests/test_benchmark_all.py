"""What is measured on a new machine, and in which order."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from shared import paths
from shared.bench import benchmark_all


@pytest.mark.parametrize("quick", [True, False])
def test_every_stage_is_measured_and_then_the_staircase(quick: bool) -> None:
    found = benchmark_all.commands(quick, "cpu")
    behind = ["--quick"] if quick else []
    expected = [["-m", f"{name}.benchmark", *behind] for name in paths.discover()]
    expected.append(["-m", "shared.bench.staircase", "--device", "cpu", *behind])
    assert found == expected + ([] if quick else [["-m", "shared.bench.report"]])


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_on_another_device_only_the_staircase_runs(device: str) -> None:
    assert benchmark_all.commands(False, device) == [
        ["-m", "shared.bench.staircase", "--device", device],
        ["-m", "shared.bench.report"],
    ]


def test_what_fails_is_said_at_the_end_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command[2])
        return SimpleNamespace(returncode=int(command[2] == "stage02_kv_cache.benchmark"))

    monkeypatch.setattr(subprocess, "run", run)
    assert benchmark_all.main(["--quick"]) == 1
    assert ran == [f"{name}.benchmark" for name in paths.discover()] + ["shared.bench.staircase"]
    said = capsys.readouterr()
    assert (
        "failed: python -m stage02_kv_cache.benchmark --quick\n" in said.err
        and "stage03" not in said.err
    )
    assert "=== python -m stage03_batching.benchmark --quick\n" in said.out
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert benchmark_all.main(["--quick"]) == 0
