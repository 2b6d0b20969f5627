"""A checkpoint folder of any shape with random weights, as transformers writes it. It serves to
measure, without a network, what loading a real model takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shared.checkpoint import WEIGHTS, random_tensors

from .config import SIZES, LlamaConfig


def to_fields(config: LlamaConfig) -> dict[str, Any]:
    """The config.json from which a reader makes `config`; for shapes without a window."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias > config.o_bias else "llama"
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_factor,
            "high_freq_factor": config.rope.high_factor,
            "original_max_position_embeddings": config.rope.trained,
        }
    return {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} | {
        "model_type": kind,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_ids),
        "rope_parameters": rope,
    }


def write(folder: Path, config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and the weights, without a tokenizer."""
    (folder / "config.json").write_text(json.dumps(to_fields(config)), encoding="utf-8")
    tensors = random_tensors(config, dtype=dtype).items()
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name, _ in tensors}
    save_file({names[name]: tensor for name, tensor in tensors}, folder / WEIGHTS)
