"""Perplexity against `transformers`, token by token."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import cli
from shared.config import Config
from shared.course.testing import random_checkpoint
from shared.errors import UserError
from shared.parity import random_prompt
from shared.peers import transformers_model
from stage01_forward import perplexity as module
from stage01_forward.model import GPT2, load_model
from stage01_forward.perplexity import main, perplexity

CONFIG = Config(vocab_size=61, n_positions=24, n_embd=16, n_layer=2, n_head=2, name="small")
WINDOW = CONFIG.n_positions


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, Any]:
    """Ours and `transformers`', both float64, with the same weights."""
    checkpoint = random_checkpoint(CONFIG)
    return load_model(checkpoint, dtype=torch.float64), transformers_model(
        checkpoint, torch.float64
    )


@torch.inference_mode()
def expected(twin: Any, ids: list[int], stride: int) -> float:
    """Mean cross-entropy by the definition: each token from the first window, 0, stride, 2 stride, ..., that predicts it."""
    losses = []
    for place in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), stride) if s + WINDOW >= place)
        logits = twin(torch.tensor([ids[start:place]])).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[ids[place]].item())
    return sum(losses) / len(losses)


def test_one_window_is_the_loss_of_transformers(models: tuple[GPT2, Any]) -> None:
    ours, twin = models
    ids = random_prompt(WINDOW, CONFIG, 1)
    tokens = torch.tensor([ids])
    loss = twin(tokens, labels=tokens).loss.item()
    result = perplexity(ours, ids)
    assert result["cross_entropy"] == pytest.approx(
        loss, abs=1e-6
    )  # `transformers` takes its loss in float32
    assert result["perplexity"] == pytest.approx(math.exp(result["cross_entropy"]), rel=1e-12)
    assert result["tokens"] == WINDOW - 1


@pytest.mark.parametrize("length", [2, WINDOW + 1, WINDOW + 2, 3 * WINDOW - 5])
@pytest.mark.parametrize("stride", [1, 7, WINDOW // 2, WINDOW - 1, WINDOW])
def test_sliding_windows(
    models: tuple[GPT2, Any], monkeypatch: pytest.MonkeyPatch, length: int, stride: int
) -> None:
    monkeypatch.setattr(
        module, "ROWS", 5
    )  # so that a window's logits come in several pieces, the last one short
    ours, twin = models
    ids = random_prompt(length, CONFIG, 2)
    seen: list[int] = []
    result = perplexity(ours, ids, stride, seen.append)
    assert result["cross_entropy"] == pytest.approx(expected(twin, ids, stride), abs=1e-10)
    assert result["tokens"] == sum(seen) == length - 1


def test_default_stride_is_half_a_window(models: tuple[GPT2, Any]) -> None:
    ids = random_prompt(60, CONFIG, 3)
    assert (
        perplexity(models[0], ids)
        == perplexity(models[0], ids, WINDOW // 2)
        != perplexity(models[0], ids, WINDOW)
    )


@pytest.mark.parametrize(
    ("ids", "stride", "words"),
    [
        ([], 1, "0 tokens"),
        ([5], 1, "1 tokens"),
        ([1, 2], 0, "stride of 0"),
        ([1, 2], 25, "1 to 24"),
    ],
)
def test_refused(models: tuple[GPT2, Any], ids: list[int], stride: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        perplexity(models[0], ids, stride)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_positions": 24,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    text, latin, short = tmp_path / "text.txt", tmp_path / "latin.txt", tmp_path / "short.txt"
    text.write_text(
        "Once upon a time there was a café. " * 3, encoding="utf-8-sig"
    )  # the mark is none of the text
    latin.write_bytes("café au lait".encode("latin-1"))
    short.write_text("a", encoding="utf-8")
    model = ["--model", str(tmp_path), "--random-weights", "--dtype", "float64"]

    main([str(text), "--stride", "8", *model])
    found = re.fullmatch(
        r"perplexity +(\d+\.\d{4})\ncross-entropy +(\d+\.\d{4}) nats per token\ntokens +(\d+)\n",
        capsys.readouterr().out,
    )
    assert found is not None and int(found[3]) == 3 * 36 - 1  # é is two bytes
    assert float(found[1]) == pytest.approx(math.exp(float(found[2])), rel=1e-3)
    assert float(found[2]) == pytest.approx(math.log(256), abs=0.2)  # random weights know nothing

    for file, words in [
        (latin, "not UTF-8"),
        (short, "1 tokens"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "cannot be read"),
    ]:
        with pytest.raises(SystemExit) as exit:
            cli.run(main, [str(file), *model])
        err = capsys.readouterr().err
        assert (
            exit.value.code == 2
            and words in err
            and err.startswith("error: ")
            and err.count("\n") == 1
        )
