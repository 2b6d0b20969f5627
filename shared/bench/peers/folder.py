"""A checkpoint folder with seeded random weights, in the format that all engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from shared.checkpoint import Checkpoint
from stage08_llama.config import LlamaConfig
from stage08_llama.folder import to_fields

POSITIONS = 2048  # of a Llama's context: an engine may reserve memory for all of them


def write(shape: Checkpoint, folder: Path) -> Path:
    """Write `shape` to `folder`, unless it is there; returns it. Its tokenizer knows no text: each
    token has a name."""
    done = folder / "tokenizer.json"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config
    prefix = "model." if isinstance(config, LlamaConfig) else "transformer."
    tensors = {
        name if name.startswith("lm_head") else prefix + name: tensor.contiguous()
        for name, tensor in shape.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    names = {f"t{id}": id for id in range(config.vocab_size)}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "t0")
    special["tokenizer_class"] = "PreTrainedTokenizerFast"
    words = {"type": "WordLevel", "vocab": names, "unk_token": "t0"}
    nothing = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    split = {"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [], "model": words}
    for name, content in (
        ("config.json", fields(config)),
        ("tokenizer_config.json", special),
        ("tokenizer.json", {"version": "1.0", **dict.fromkeys(nothing), **split}),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def fields(config: Any) -> dict[str, Any]:
    """Its config.json. No token ends an answer."""
    common = {
        "vocab_size": config.vocab_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
    }
    if isinstance(config, LlamaConfig):
        theirs = to_fields(config)
        own = {
            "architectures": [f"{theirs['model_type'].title()}ForCausalLM"],
            "rope_theta": config.rope.theta,  # where transformers 4 looks for it
            "max_position_embeddings": min(config.n_positions, POSITIONS),
        }
        return theirs | common | own
    sizes = ("n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
    return common | {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        **{name: getattr(config, name) for name in sizes},
    }
