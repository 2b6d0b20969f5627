"""What is measured on a new machine, and in which order."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from shared import paths
from shared.bench import benchmark_all

STAIRCASE = ["-m", "shared.bench.staircase", "--device"]


@pytest.mark.parametrize("quick", [True, False])
def test_every_stage_is_measured_and_then_the_staircase(quick: bool) -> None:
    behind = ["--quick"] if quick else []
    expected = [["-m", f"{name}.benchmark", *behind] for name in paths.discover()]
    expected.append([*STAIRCASE, "cpu", *behind])
    expected += [] if quick else [["-m", "shared.bench.report"]]
    assert benchmark_all.commands(quick, "cpu") == expected
    cuda = benchmark_all.commands(False, "cuda")  # the stages' benchmarks measure the processor
    assert cuda == [[*STAIRCASE, "cuda"], ["-m", "shared.bench.report"]]


def test_a_failure_is_named_at_the_end_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        ran.append(command[2])
        return SimpleNamespace(returncode=int(command[2] == "stage02_kv_cache.benchmark"))

    monkeypatch.setattr(subprocess, "run", run)
    assert benchmark_all.main(["--quick"]) == 1
    assert ran == [f"{name}.benchmark" for name in paths.discover()] + ["shared.bench.staircase"]
    error = capsys.readouterr().err
    assert "failed: python -m stage02_kv_cache.benchmark --quick\n" in error
    assert "stage03" not in error
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert benchmark_all.main(["--quick"]) == 0
