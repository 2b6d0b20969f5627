"""What is measured on a new machine, and in which order."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from reports import __main__ as benchmark_all
from shared import paths


def test_every_stage_is_measured_then_the_staircase_and_a_failure_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [["-m", f"{name}.benchmark"] for name in paths.discover()]
    place = stages.index(["-m", "stage10_quantization.benchmark"])
    stages.insert(place + 1, ["-m", "stage10_quantization.losses"])
    staircase, reports = ["-m", "reports.staircase", "--device"], ["-m", "reports.draw"]
    assert benchmark_all.commands(False, "cpu") == [*stages, [*staircase, "cpu"], reports]
    # the stages' benchmarks measure the processor
    assert benchmark_all.commands(False, "cuda") == [[*staircase, "cuda"], reports]
    ran = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command[1:])
        return SimpleNamespace(returncode=int(command[2] == "stage02_kv_cache.benchmark"))

    monkeypatch.setattr(subprocess, "run", run)
    assert benchmark_all.main(["--quick"]) == 1
    assert ran == [[*each, "--quick"] for each in [*stages, [*staircase, "cpu"]]]
    error = capsys.readouterr().err
    assert "failed: python -m stage02_kv_cache.benchmark --quick\n" in error
    assert "stage03" not in error
