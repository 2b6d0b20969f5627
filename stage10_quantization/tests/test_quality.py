"""The figures of quality: by their definitions, and nothing for a model that is the same."""

from __future__ import annotations

import copy

import pytest
import torch

from shared.conversion import convert
from shared.models import load, load_model
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage10_quantization import quality
from stage10_quantization.convert import Quantize
from stage10_quantization.gptq import text_ids


@pytest.fixture(scope="module")
def models():
    checkpoint = load("stories")
    model = load_model(checkpoint)
    quantized = copy.deepcopy(model)
    convert(quantized, Quantize("int4", "float"), {})  # kernels round less than a code
    return model, quantized, load_tokenizer(checkpoint.folder)


@pytest.fixture(scope="module")
def engines(models):
    return tuple(map(quality.engine_of, models[:2]))


@torch.inference_mode()
def logprobs(model, ids):
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden).double().log_softmax(-1)


def test_the_divergence_is_that_of_the_second_half_of_whole_windows(models, engines):
    (model, quantized, tokenizer), (reference, engine) = models, engines
    ids = text_ids(tokenizer, 2047, 2 * 512 + 300, None, "judged")
    got = quality.divergence(reference, engine, ids)
    kl, lost, same = 0.0, [], 0
    for start in (0, 512):
        window = ids[start : start + 512]
        p, q = (logprobs(m, window)[256:511] for m in (model, quantized))
        kl += torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
        lost.append((p - q).gather(1, torch.tensor(window)[257:, None]).mean().item())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert (got["tokens"], got["top_1"]) == (510, same / 510)
    assert got["kl"] == pytest.approx(kl / 510, rel=1e-3)
    assert got["difference"] == pytest.approx(sum(lost) / 2, rel=1e-3)
    assert min(lost) <= got["low"] + 1e-6 < got["high"] <= max(lost) + 1e-6


def test_a_model_differs_in_nothing_from_itself(engines):
    model = engines[0]
    got = quality.divergence(model, model, list(range(1200)))
    assert got == {"tokens": 510, "kl": 0, "top_1": 1, "difference": 0, "low": 0, "high": 0}
