"""`transformers` with our weights: the oracle in tests, and a peer in benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint import Checkpoint


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """`transformers`' GPT2LMHeadModel with the weights of `checkpoint`, not copied if they have the
    dtype."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = checkpoint.config
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
    fields = {name: getattr(config, name) for name in names}
    fields |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": config.tied}
    options = {"config": GPT2Config(**fields), "state_dict": checkpoint.tensors, "dtype": dtype}
    return GPT2LMHeadModel.from_pretrained(None, **options).eval()


def transformers_batch(
    model: Any, prompts: list[list[int]], count: int, use_cache: bool = True
) -> list[list[int]]:
    """`count` greedy tokens after each of `prompts`, in one `generate`, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, T)
    lengths = torch.tensor([*map(len, prompts)])[:, None]
    real = (torch.arange(width) >= width - lengths).long()  # (B, T)
    options = {"do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=real, max_new_tokens=count, **options)
    return out[:, width:].tolist()
