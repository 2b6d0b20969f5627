"""True folders of transformers, with seeded random weights, of every kind that this stage reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stage08_llama import config as reading
from stage08_llama.config import LlamaConfig

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
    spec: dict[str, Any] = {"rope_type": kind, "rope_theta": 5000.0}
    if kind != "default":
        spec["factor"] = 4.0
    if kind == "llama3":
        spec["original_max_position_embeddings"] = 24
    return {"rope_parameters": spec | options}


TIED = {"tie_word_embeddings": True}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9}
OF_CONFIG: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaConfig": {
        "llama": {},
        "llama, tied": TIED,
        "llama, one kv head": {"num_key_value_heads": 1},
        "llama, three kv heads": {"num_key_value_heads": 3},
        "llama, wide heads": {"head_dim": 20},
        "llama, three heads": THREE_HEADS,
        "llama, epsilon": {"rms_norm_eps": 0.1},
        "theta": rope("default", rope_theta=50.0),
        "linear": rope("linear"),
        "dynamic": rope("dynamic"),
        "llama3": rope("llama3", **LLAMA3) | {"head_dim": 32},
    },
    "MistralConfig": {
        "mistral": {"sliding_window": None},
        "mistral, window": {"sliding_window": 7} | TIED,
    },
    "Qwen2Config": {"qwen2": {}, "qwen2, window": QWEN_WINDOW | {"max_window_layers": 1}},
    "Qwen3Config": {"qwen3": {"head_dim": 16} | TIED},
}
KINDS = {
    kind: (config, fields) for config, kinds in OF_CONFIG.items() for kind, fields in kinds.items()
}


def save(folder: Path, kind: str, **options: Any) -> Any:
    """Write a folder, and return transformers' model of it in float64."""
    import transformers  # here: it takes seconds

    config, fields = KINDS[kind]
    torch.manual_seed(0)
    shape = getattr(transformers, config)(**(SIZES | fields | options))
    model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.normal_(float("norm" in name), spread)  # no weight is 0 or 1
    model.save_pretrained(folder)
    return model.eval()


def to_fields(config: LlamaConfig) -> dict[str, Any]:
    """The config.json from which a reader makes `config`, whose positions are not stretched."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    return {theirs: getattr(config, ours) for theirs, ours in reading.SIZES.items()} | {
        "model_type": kind,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_ids),
        "rope_theta": config.rope.theta,
    }
