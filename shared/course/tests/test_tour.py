"""The tour must notice a stage that lies, and must not take a near tie for a lie."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import cli
from shared.checkpoint import Checkpoint, Config
from shared.course import stages, tour
from shared.course.testing import random_checkpoint
from shared.tokenizer import ByteTokenizer

CONFIG = Config(vocab_size=300, n_positions=160, n_embd=16, n_layer=2, n_head=2, name="small")
TOKENS = 6


def loaded(checkpoint: Checkpoint, dtype: torch.dtype) -> cli.Loaded:
    model = stages.load_model(checkpoint, dtype=dtype)
    return cli.Loaded(
        model, ByteTokenizer(), checkpoint.config, "plain", torch.device("cpu"), dtype
    )


def changing(change: dict[int, int]) -> type:
    """An engine class that says what the first stage says, but with the tokens at some places changed by an xor."""

    class Changed:
        def __init__(self, model: Any) -> None:
            self.engine = stages.oracle(model)

        def stream(self, prompt: Any, sampling: Any) -> Iterator[Any]:
            for place, token in enumerate(self.engine.stream(prompt, sampling)):
                yield replace(token, id=token.id ^ change.get(place, 0))

    return Changed


def visit(model: cli.Loaded, engines: dict[str, Any]) -> int:
    return tour.visit(model, engines, argparse.Namespace(max_tokens=TOKENS))


def test_all_stages_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_positions": 160,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    options = [
        "--model",
        str(tmp_path),
        "--random-weights",
        "--dtype",
        "float64",
        "--max-tokens",
        str(TOKENS),
    ]
    assert tour.main(options) == 0
    out = capsys.readouterr().out
    for name in stages.engines():
        assert f"--- {name} ---\n{tour.PROMPTS[0]}" in out
        assert re.search(
            rf"^{name} +{TOKENS * len(tour.PROMPTS)} +\d+\.\d\d +\d+\.\d +\d+\.\dx$",
            out,
            re.MULTILINE,
        )
    assert out.count(f"3 sequences, {3 * TOKENS} tokens, identical") == len(stages.engines()) - 1
    assert out.endswith("All stages agree.\n")


def test_a_stage_that_lies_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    engines = {"naive": changing({}), "honest": changing({}), "liar": changing({4: 1})}
    assert visit(loaded(random_checkpoint(CONFIG), torch.float32), engines) == 1
    out = capsys.readouterr().out
    assert "honest against naive: 3 sequences" in out
    assert "liar against naive: DIFFERENT" in out and "token 4" in out
    assert out.endswith("Not the same tokens as the first stage: liar.\n")


@pytest.mark.parametrize(("dtype", "status"), [(torch.float32, 0), (torch.float64, 1)])
def test_a_near_tie_is_shown_and_forgiven_below_float64(
    capsys: pytest.CaptureFixture[str], dtype: torch.dtype, status: int
) -> None:
    checkpoint = random_checkpoint(CONFIG)
    words = checkpoint.tensors["wte.weight"]
    words[1::2] = words[::2]  # token n and token n ^ 1 are twins: always tied for the first place
    engines = {"naive": changing({}), "twin": changing({3: 1})}
    assert visit(loaded(checkpoint, dtype), engines) == status
    assert ("3 parted at a near tie" in capsys.readouterr().out) == (status == 0)


def test_the_table_counts_all_prompts() -> None:
    told = {
        "slow": [tour.Told([1] * 10, "length", 2.0), tour.Told([1] * 20, "stop", 4.0)],
        "fast": [tour.Told([1] * 30, "stop", 1.5)],
    }
    assert [line.split() for line in tour.table(told).splitlines()[1:]] == [
        ["slow", "30", "6.00", "5.0", "1.0x"],
        ["fast", "30", "1.50", "20.0", "4.0x"],
    ]
