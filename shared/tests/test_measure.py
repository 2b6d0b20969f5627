"""Measuring: the machine, taking turns, and results that survive their file."""

from __future__ import annotations

import json

import pytest
import torch

from shared import measure
from shared.errors import UserError

MIB = 2**20


def test_the_machine_is_described():
    found = measure.machine()
    assert found["processor"] and found["system"] and found["device"] == "cpu"
    assert 1 <= found["cores"] <= found["cpus"] and found["memory_gib"] > 0.1
    assert measure.versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_slug_names_what_did_the_work():
    for processor, device, folder in (
        ("AMD EPYC 9654 96-Core Processor", "cpu", "amd-epyc-9654-8cpu"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "cpu", "intel-core-i7-8700-8cpu"),
        ("AMD EPYC", "cpu", "amd-epyc-8cpu"),
        ("Apple M2 Pro", "mps", "apple-m2-pro-8cpu-mps"),
        *(("AMD EPYC", "NVIDIA H200", "nvidia-h200"), ("?", "cpu", "unknown-8cpu")),
    ):
        machine = {"processor": processor, "cpus": 8, "device": device}
        assert measure.slug(machine) == measure.slug(machine | {"instructions": "AVX512"}) == folder
    assert measure.slug(machine | {"instructions": "AVX2"}) == "unknown-8cpu-avx2"


def test_variants_take_turns_and_warm_up_does_not_count():
    ran: list[str] = []
    variants = {name: lambda name=name: ran.append(name) for name in "ABC"}
    measure.turns(variants, repeats=3, warmup=1)
    assert "".join(ran) == "ABC" + "BCA" + "CAB" + "ABC"
    count = iter(range(99))  # fewer repeats sit out the last rounds
    kept = measure.turns({name: lambda: next(count) for name in "AB"}, {"A": 2, "B": 1}, warmup=1)
    assert kept == {"A": [3, 4], "B": [2]}


def test_rates_count_the_work_that_was_done(monkeypatch):
    monkeypatch.setattr(measure, "seconds", lambda run: (run(), 1e-3)[1])  # every run takes 1 ms
    bandwidth = measure.read_bandwidth(nbytes=4 * MIB, budget=0.002)
    assert bandwidth == pytest.approx(4 * MIB / 1e-3 / 1e9)
    for dtype in (torch.float32, torch.bfloat16):
        rate = measure.matmul_rate(dtype=dtype, sizes=(64,), budget=0.002)
        assert rate == pytest.approx(2 * 64**3 / 1e-3 / 1e9)


def test_numbers_without_instructions_of_their_own_are_widened(monkeypatch):
    def seconds(run):
        run()
        return 1.0 if run.func is torch.matmul else 1e-3

    monkeypatch.setattr(measure, "seconds", seconds)
    monkeypatch.setattr(measure.linear, "can_pack", lambda *_: False)
    rate = measure.matmul_rate(dtype=torch.bfloat16, sizes=(64,), budget=0.002)
    assert rate == pytest.approx(2 * 64**3 / 1e-3 / 1e9)
    rate = measure.matmul_rate(dtype=torch.float32, sizes=(64,), budget=0.002)
    assert rate == pytest.approx(2 * 64**3 / 1.0 / 1e9)


def test_results_survive_writing_and_reading(tmp_path):
    path = tmp_path / "machine" / "stage.json"
    written = {"schema": measure.SCHEMA, "seconds": [0.1, 1 / 3]}
    measure.save(path, written)
    assert measure.load(path) == written  # to the last bit
    assert list(path.parent.iterdir()) == [path]  # nothing half-written is left
    before = path.read_bytes()
    pytest.raises(ValueError, measure.save, path, {"seconds": float("nan")}).match("JSON")
    assert path.read_bytes() == before


def test_results_that_cannot_be_trusted_are_refused(tmp_path):
    path = tmp_path / "stage.json"
    pytest.raises(UserError, measure.load, path).match("cannot be read")
    for text in ("{", "[]"):
        path.write_text(text)
        pytest.raises(UserError, measure.load, path).match("cannot be read")
    path.write_text(json.dumps({"schema": measure.SCHEMA + 1}))
    pytest.raises(UserError, measure.load, path).match(f"schema {measure.SCHEMA + 1}")


def test_results_and_texts_do_not_make_a_checkout_dirty(tmp_path, monkeypatch):
    def git(*words: str) -> str | None:
        return measure._output("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)

    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert measure.git_state() == (None, None)  # no checkout
    if git("init", "-q") is None:
        pytest.skip("git is not installed")
    (tmp_path / "reports").mkdir()
    for name in ("code.py", "README.md"):
        (tmp_path / name).write_text("old\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit, dirty = measure.git_state()
    assert commit is not None and len(commit) == 40 and dirty is False
    for name, dirty, tracked in (
        *(("reports/x.json", False, False), ("README.md", False, False)),
        *(("notes.py", True, False), ("code.py", True, True)),
    ):
        (tmp_path / name).write_text("new\n")
        assert measure.git_state() == (commit, dirty)
        assert measure.git_state(untracked=False) == (commit, tracked)
