"""Perplexity against `transformers`, token by token."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from shared.config import Config
from shared.errors import UserError
from shared.parity import random_prompt
from shared.peers import transformers_model
from shared.testing import random_checkpoint
from stage01_forward import scoring as module
from stage01_forward.model import GPT2, load_model
from stage01_forward.perplexity import main
from stage01_forward.scoring import perplexity, prompt_logprobs

CONFIG = Config(vocab_size=61, n_positions=24, n_embd=16, n_layer=2, n_head=2, name="small")
WINDOW = CONFIG.n_positions


@pytest.fixture(scope="module")
def models() -> tuple[GPT2, Any]:
    """Ours and `transformers`', both float64, with the same weights."""
    checkpoint, dtype = random_checkpoint(CONFIG), torch.float64
    return load_model(checkpoint, dtype=dtype), transformers_model(checkpoint, dtype)


@torch.inference_mode()
def expected(twin: Any, ids: list[int], stride: int) -> float:
    """Mean cross-entropy of each token in the first window, 0, stride, 2 stride, ..., that has
    it."""
    losses = []
    for place in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), stride) if s + WINDOW >= place)
        logits = twin(torch.tensor([ids[start:place]])).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[ids[place]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW - 5])
@pytest.mark.parametrize("stride", [1, 7, WINDOW - 1, WINDOW, None])
def test_overlapping_windows(models, monkeypatch, length, stride):
    monkeypatch.setattr(module, "ROWS", 5)  # logits in several pieces, the last one short
    ours, twin = models
    ids = random_prompt(length, CONFIG, 2)
    counts: list[int] = []
    result = perplexity(ours, ids, stride, counts.append)
    loss = expected(twin, ids, stride or WINDOW // 2)
    assert result["cross_entropy"] == pytest.approx(loss, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["cross_entropy"]), rel=1e-6)
    assert result["tokens"] == sum(counts) == length - 1


def test_prompt_logprobs_are_those_of_every_position(models):
    ids = random_prompt(9, CONFIG, 4)
    first, *rest = prompt_logprobs(models[0], ids, top=2)
    logprobs = models[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert first is None
    for scores, row, id in zip(rest, logprobs[:-1], ids[1:], strict=True):
        assert scores is not None and [id for id, _ in scores.top] == row.topk(2)[1].tolist()
        assert scores.token == pytest.approx(row[id].item(), abs=1e-5)


def test_command(tmp_path, capsys):
    fields = {"vocab_size": 256, "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    texts = {"text": "\ufeff" + "Once upon a time there was a café. " * 3, "short": "a"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin").write_bytes("café au lait".encode("latin-1"))
    model = ["--model", str(tmp_path), "--random-weights", "--dtype", "float64"]
    main([str(tmp_path / "text"), "--stride", "8", *model])
    value = r"(\d+\.\d{4})"
    pattern = rf"perplexity +{value}\ncross-entropy +{value} nats per token\ntokens +(\d+)\n"
    match = re.fullmatch(pattern, capsys.readouterr().out)
    assert match is not None and int(match[3]) == 3 * 36 - 1  # é is two bytes, the mark is none
    assert float(match[1]) == pytest.approx(math.exp(float(match[2])), rel=1e-3)
    assert float(match[2]) == pytest.approx(math.log(256), abs=0.2)  # random weights know nothing
    unread = {"latin": "not UTF-8", "short": "1 tokens", "none": "cannot be read", ".": "cannot"}
    for name, words in unread.items():
        with pytest.raises(UserError, match=words):
            main([str(tmp_path / name), *model])
    for stride in (0, 25):
        with pytest.raises(UserError):
            perplexity(load_model(random_checkpoint(CONFIG)), [1, 2], stride)
