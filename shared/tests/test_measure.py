"""Measuring: what did the work, rates, and a clean checkout."""

from __future__ import annotations

import pytest
import torch

from shared import measure

MIB = 2**20


def test_slug_names_what_did_the_work():
    for processor, device, folder in (
        ("AMD EPYC 9654 96-Core Processor", "cpu", "amd-epyc-9654-8cpu"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "cpu", "intel-core-i7-8700-8cpu"),
        *(("AMD EPYC", "NVIDIA H200", "nvidia-h200"), ("?", "cpu", "unknown-8cpu")),
    ):
        machine = {"processor": processor, "cpus": 8, "device": device}
        assert measure.slug(machine | {"instructions": "AVX512"}) == folder
    assert measure.slug(machine | {"instructions": "AVX2"}) == "unknown-8cpu-avx2"
    assert measure.slug(measure.machine()).endswith(("cpu", "cpu-avx2"))


def test_rates_count_the_work_and_take_the_fastest_way(monkeypatch):
    """Without instructions for bfloat16, products of widened numbers are faster."""

    def timed(run):
        return (1.0 if getattr(run, "func", None) is torch.matmul else 1e-3), run()

    monkeypatch.setattr(measure, "timed", timed)
    monkeypatch.setattr(measure.linear, "can_pack", lambda *_: False)
    assert measure.read_bandwidth("cpu", 4 * MIB) == pytest.approx(4 * MIB / 1e-3 / 1e9)
    for dtype, took in ((torch.bfloat16, 1e-3), (torch.float32, 1.0)):
        rate = measure.matmul_rate("cpu", dtype, 64)
        assert rate == pytest.approx(2 * 64**3 / took / 1e9)


def test_results_and_texts_do_not_make_a_checkout_dirty(tmp_path, monkeypatch):
    def git(*words: str) -> str | None:
        return measure._output("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)

    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert measure.git_state() == (None, None)  # no checkout
    if git("init", "-q") is None:
        pytest.skip("git is not installed")
    git("commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "reports").mkdir()
    for name, dirty in (("reports/x.json", False), ("README.md", False), ("reports/x.py", True)):
        (tmp_path / name).write_text("new\n")
        commit, state = measure.git_state()
        assert commit is not None and len(commit) == 40 and state is dirty
