"""What config.json may not say, published shapes, and what rotary positions do."""

from __future__ import annotations

import json
import re

import pytest
import torch

from shared import models, registry
from shared.errors import UserError
from stage08_llama.rope import Rope, frequencies, rotate, rotation
from stage08_llama.shapes import PRESETS
from stage08_llama.tests.folders import LLAMA3, SIZES, rope, save

BASE = SIZES | {"model_type": "llama"}
READERS = {kind: registry.load(entry) for kind, entry in registry.CONFIGS.items()}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
SCALED = rope("llama3", **LLAMA3)["rope_parameters"]
REFUSED = [
    ({"quantization_config": {"bits": 4}}, "the option quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act to 'gelu'; only 'silu'"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type to 'longrope'"),
    ({"rope_parameters": SCALED | {"low_freq_factor": 4.0}}, "low_freq_factor to 4.0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of rotary positions"),
    ({"num_key_value_heads": 4}, "num_key_value_heads to 4; only a divisor of num_attention"),
    ({"head_dim": 7}, "head_dim to 7; only an even number"),
    ({"attention_bias": True}, "attention_bias to True; only false works"),
]


@pytest.mark.parametrize("fields, words", REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_not_implemented_is_refused_by_name(fields, words):
    fields = BASE | fields
    with pytest.raises(UserError, match=rf"^[^\n]*{re.escape(words)}[^\n]*\.$"):
        READERS[fields["model_type"]](fields, "m", "config.json")


QWEN = [  # fields of config.json, and what the reader makes of them
    ({}, {"qkv_bias": True, "qk_norm": False, "head_dim": 8, "n_positions": 96}),
    (WINDOW | {"use_sliding_window": False, "max_window_layers": 0}, {"n_positions": 96}),
    (WINDOW, {"n_positions": 9}),
    (WINDOW | {"sliding_window": 100}, {"n_positions": 96}),
    ({"model_type": "qwen3", "head_dim": 20}, {"qkv_bias": False, "qk_norm": True, "head_dim": 20}),
]


@pytest.mark.parametrize("fields, wanted", QWEN)
def test_a_qwen_is_read_from_its_options(fields, wanted):
    fields = SIZES | {"model_type": "qwen2"} | fields
    config = READERS[fields["model_type"]](fields, "m", "config.json")
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_a_window_is_the_context_and_is_announced(caplog):
    fields = BASE | {"model_type": "mistral", "sliding_window": 31}
    assert READERS["mistral"](fields, "windy", "config.json").n_positions == 31
    assert [record.getMessage() for record in caplog.records] == [
        "windy has a sliding window of 31 tokens, which the engines do not implement: its context "
        "is 31 tokens here, not 96."
    ]


def test_folders_that_are_refused(tmp_path):
    save(tmp_path, "llama, tied")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for change, words in (
        ({"model_type": "gemma2"}, "model_type to 'gemma2'; only gpt2, llama, mistral, qwen2, "),
        ({"tie_word_embeddings": False}, "missing lm_head.weight"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(UserError, match=re.escape(words)):
            models.load(str(tmp_path))


def test_presets_are_the_published_models():
    """Parameters, and bytes of keys and values a token in bfloat16, by their cards and configs."""
    published = {
        "HuggingFaceTB/SmolLM2-135M": (134_515_008, 23_040),
        "Qwen/Qwen2.5-0.5B": (494_032_768, 12_288),
        "Qwen/Qwen3-0.6B": (596_049_920, 114_688),
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (1_100_048_384, 22_528),
        "meta-llama/Llama-3.2-1B": (1_235_814_400, 32_768),
    }
    assert PRESETS.keys() == published.keys()
    for name, config in PRESETS.items():
        sizes = config.parameter_count, config.kv_bytes_per_token(torch.bfloat16)
        assert (config.name, sizes) == (name, published[name])


def test_llama_3_2_keeps_blends_and_stretches_pairs():
    published = PRESETS["meta-llama/Llama-3.2-1B"]
    ratio = frequencies(Rope(5e5), 64) / frequencies(published.rope, 64)
    assert (ratio[:15] == 1).all() and (ratio[18:] == 32).all()
    assert ((ratio[15:18] > 1) & (ratio[15:18] < 32)).all()


def test_rotation_keeps_lengths_and_sees_distances_alone():
    """Far positions too, in bfloat16 weights: angles are float32 whatever the model's dtype."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, generator=generator)
    turns = frequencies(Rope(), 16)

    def score(here: int, there: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        cos, sin = rotation(torch.tensor([here, there]), turns)
        turned = rotate(q.to(dtype), cos[0], sin[0]), rotate(k.to(dtype), cos[1], sin[1])
        assert turned[0].dtype == dtype
        return (turned[0] * turned[1]).float().sum()

    torch.testing.assert_close(score(7, 2), score(1005, 1000), rtol=0, atol=1e-3)
    torch.testing.assert_close(score(5, 5), (q * k).sum(), rtol=0, atol=1e-5)
    assert abs(score(7, 2) - score(7, 3)) > 1e-2
    low = score(30_001, 30_000, torch.bfloat16)
    torch.testing.assert_close(low, score(30_001, 30_000), rtol=0, atol=0.1)
