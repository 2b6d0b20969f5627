"""True folders of transformers, with seeded random weights, of every kind that this stage reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """As transformers 5 writes it."""
    options = {
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    } | options
    if kind in ("default", "linear", "dynamic"):
        del options["original_max_position_embeddings"]
    if kind == "default":
        del options["factor"]
    return {"rope_parameters": {"rope_type": kind, **options}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9}
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, one kv head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, all kv heads": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama, three kv heads": (LlamaConfig, {"num_key_value_heads": 3}),
    "llama, wide heads": (LlamaConfig, {"head_dim": 20}),
    "llama, narrow heads": (LlamaConfig, {"head_dim": 2}),
    "llama, three heads": (
        LlamaConfig,
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6},
    ),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, attention bias": (LlamaConfig, {"attention_bias": True, "tie_word_embeddings": True}),
    "llama, epsilon": (LlamaConfig, {"rms_norm_eps": 0.1}),
    "theta": (LlamaConfig, rope("default", rope_theta=50.0)),
    "linear": (LlamaConfig, rope("linear")),
    "dynamic": (LlamaConfig, rope("dynamic")),
    "llama3": (LlamaConfig, rope("llama3", **LLAMA3) | {"head_dim": 32}),
    "llama3, factor 32": (LlamaConfig, rope("llama3", **LLAMA3, rope_theta=5e5) | {"head_dim": 64}),
    "yarn": (LlamaConfig, rope("yarn") | {"head_dim": 32}),
    "yarn, its factor": (LlamaConfig, rope("yarn", attention_factor=1.3, truncate=False)),
    "yarn, mscale": (
        LlamaConfig,
        rope("yarn", mscale=0.7, mscale_all_dim=1.2, beta_fast=8.0, beta_slow=2.0),
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral, window": (MistralConfig, {"sliding_window": 7, "tie_word_embeddings": True}),
    "mistral, narrow window": (MistralConfig, {"sliding_window": 2}),
    "mistral, head_dim": (MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, window off": (Qwen2Config, {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2, window": (Qwen2Config, QWEN_WINDOW | {"max_window_layers": 1}),
    "qwen2, one layer": (
        Qwen2Config,
        QWEN_WINDOW | {"layer_types": [*["full_attention"] * 2, "sliding_attention"]},
    ),
    "qwen3, window": (Qwen3Config, QWEN_WINDOW | {"max_window_layers": 0, "head_dim": 10}),
    "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, bias": (Qwen3Config, {"head_dim": 10, "attention_bias": True}),
    "qwen3, yarn": (Qwen3Config, rope("yarn") | {"head_dim": 16}),
}


def save(folder: Path, kind: str, **options: Any) -> Any:
    """Write a folder, and return transformers' model of it in float64."""
    config, own = KINDS[kind]
    torch.manual_seed(0)
    shape = config(**(SIZES | own | options))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.normal_(float("norm" in name), spread)  # no weight is 0 or 1
    model.save_pretrained(folder)
    return model.eval()
