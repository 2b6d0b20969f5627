"""A checkpoint folder with seeded random weights, in the format that all engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from shared.checkpoint import Checkpoint
from stage08_llama.config import LlamaConfig, to_fields

POSITIONS = 2048  # of a Llama's context: an engine may reserve memory for all of them
SIZES = ("n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")


def write(shape: Checkpoint, folder: Path) -> Path:
    """Write `shape` to `folder`, unless it is there; returns it. Its tokenizer knows no text: each
    token has a name."""
    if (folder / "tokenizer.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config
    prefix = "model." if isinstance(config, LlamaConfig) else "transformer."
    tensors = {
        name if name.startswith("lm_head") else prefix + name: tensor.contiguous()
        for name, tensor in shape.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields(config)), encoding="utf-8")
    names = {f"t{id}": id for id in range(config.vocab_size)}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "t0")
    words = Tokenizer(WordLevel(names, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def fields(config: Any) -> dict[str, Any]:
    """The fields of its config.json. No token ends an answer."""
    ours: dict[str, Any] = {"vocab_size": config.vocab_size, "dtype": "float32"}
    ours |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": config.tied}
    if isinstance(config, LlamaConfig):
        theirs = to_fields(config)
        ours["architectures"] = [f"{theirs['model_type'].title()}ForCausalLM"]
        ours["rope_theta"] = config.rope.theta  # where transformers 4 looks for it
        ours["max_position_embeddings"] = min(config.n_positions, POSITIONS)
        return theirs | ours
    ours |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    ours |= {name: getattr(config, name) for name in SIZES}
    return ours | {"n_inner": 4 * config.n_embd, "activation_function": "gelu_new"}
