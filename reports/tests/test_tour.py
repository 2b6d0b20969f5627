"""The tour: every stage, found by its folder, on one workload, and any wrong token named."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reports import stages, staircase
from reports import tour as door
from reports import tour_run as tour
from shared import cli, paths, registry
from shared.checkpoint import Checkpoint, Config
from shared.testing import random_checkpoint
from shared.tokenizer import ByteTokenizer

FIELDS = {"vocab_size": 300, "n_positions": 160, "n_embd": 16, "n_layer": 2, "n_head": 2}
CONFIG = Config.from_dict({"model_type": "gpt2", **FIELDS}, "tour")

# The first stage's engine, with the tokens at some places changed by an xor.
MAKE = """
from dataclasses import replace
from stage01_forward.engine import Engine

CHANGE = {change}

class Changed(Engine):
    def stream(self, prompt, sampling):
        for place, token in enumerate(super().stream(prompt, sampling)):
            yield replace(token, id=token.id ^ CHANGE.get(place, 0))

def make(model, contexts):
    return Changed(model)
"""


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """toys(name=change, ...): a tree with stage 01 and a stage for each name."""
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(tour, "STORIES", (3,))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stage01_forward").mkdir()
    (tmp_path / "stage01_forward/__init__.py").touch()  # the real one is loaded already

    engines = {"forward": registry.ENGINES["forward"]}
    monkeypatch.setattr(registry, "ENGINES", engines)

    def plant(**changes: dict[int, int]) -> list[str]:
        for name, change in changes.items():
            folder = tmp_path / name
            folder.mkdir()
            engines[name] = f"{name}.engine:make"
            (folder / "__init__.py").touch()
            (folder / "engine.py").write_text(MAKE.format(change=change), encoding="utf-8")
        return paths.discover()

    return plant


def visit(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, tokens: int = 24) -> int:
    model, device = stages.load_model(checkpoint, dtype=dtype), torch.device("cpu")
    loaded = cli.Loaded(model, ByteTokenizer(), checkpoint.config, "plain", device, dtype)
    options = argparse.Namespace(max_tokens=tokens, serve=False)
    return tour.visit(loaded, stages.engines(), options)


def test_all_stages_the_server_and_the_load_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tour, "STORIES", (8,))
    monkeypatch.setattr(tour, "FIRST_SECONDS", 1e9)  # whatever else this machine does
    text = json.dumps({"model_type": "gpt2", **FIELDS})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    model = ["--model", str(tmp_path), "--random-weights", "--dtype", "float64"]
    assert door.main([*model, "--max-tokens", "16"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(stage\d\d_\w+) +[\d,]+ +[\d.]+x +[\d.]+ s +[█#]+ *$", out, re.MULTILINE)
    assert rows == [*stages.engines(), tour.SERVER, tour.LOAD]
    agreed = len(stages.engines())  # the server's line in place of the first stage's
    assert out.count("8 sequences, ") == out.count(", identical") == agreed
    assert "16 of 16 requests served" in out
    assert "All stages gave the same tokens." in out


def test_a_new_stage_is_driven_and_named_if_a_token_is_wrong(toys, capsys):
    found = toys(stage95_honest={})
    assert found == list(stages.engines()) == ["stage01_forward", "stage95_honest"]
    assert "stage95_honest" in staircase.variants(staircase.FULL)
    assert visit(random_checkpoint(CONFIG)) == 0
    assert re.search(r"^stage95_honest .*[█#]", capsys.readouterr().out, re.MULTILINE)
    toys(stage96_liar={4: 1})
    assert visit(random_checkpoint(CONFIG)) == 1
    out = capsys.readouterr().out
    assert "3 sequences" in out and "DIFFERENT" in out and "token 4" in out
    assert out.endswith("Not the same tokens as the first stage: stage96_liar.\n")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_near_tie_is_shown_and_forgiven_below_float64(toys, capsys, dtype):
    checkpoint, forgiven = random_checkpoint(CONFIG), dtype == torch.float32
    words = checkpoint.tensors["wte.weight"]
    words[1::2] = words[::2]  # token n and token n ^ 1 are twins: always tied for the first place
    toys(**{"stage93_twin" if forgiven else "stage94_twin": {3: 1}})
    assert visit(checkpoint, dtype, tokens=40) == (0 if forgiven else 1)
    assert ("3 parted at a near tie" in capsys.readouterr().out) == forgiven


LOADED = cli.Loaded(None, ByteTokenizer(), CONFIG, "plain", torch.device("cpu"), torch.float32)


def test_prompts_and_answers_are_of_unlike_lengths_and_fit_the_model():
    work = tour.workload(LOADED, 16, 80)
    assert len(work.prompts) == len(work.sampling) == 16
    assert len({len(prompt) for prompt in work.prompts}) > 4
    assert len({params.max_tokens for params in work.sampling}) > 4
    assert max(map(len, work.prompts)) <= CONFIG.n_positions // 2


def test_a_slower_machine_gets_fewer_and_shorter_stories():
    for cost, stories, most in (
        *((1e-3, 32, 128), (0.01, 16, 128), (0.02, 8, 128), (0.04, 8, 64), (0.08, 8, 32)),
        (9, 4, 16),  # the shortest, in any case
    ):
        work = tour.fitting(LOADED, 128, cost)
        assert (len(work.prompts), work.sampling[0].max_tokens) == (stories, most)
        assert cost * work.most <= tour.FIRST_SECONDS or cost == 9


def test_the_speed_is_measured_in_seconds_a_token(monkeypatch):
    """On a slow machine for as long as allowed, and without the first tokens."""
    clock = iter([5.0, 9.0, *(10 + n / 4 for n in range(99))])
    monkeypatch.setattr(tour.time, "perf_counter", lambda: next(clock))
    engine = SimpleNamespace(stream=lambda prompt, params: iter(range(params.max_tokens)))
    assert tour.speed(engine, LOADED) == 0.25
    assert next(clock) == 10 + (tour.WARM_UP - 3 + 5 + 1) / 4  # the fifth is later than a second


def test_a_bar_that_falls_has_a_reason():
    rows = [
        tour.Row(name, tokens, 1.0, []) for name, tokens in (("a", 5), ("b", 9), (tour.SERVER, 8))
    ]
    (line,) = tour.falls(rows)
    assert line.startswith(f"{tour.SERVER} is slower than b: event loop and clients share")
