"""The engine that everybody has: `transformers`, with our weights, as oracle in tests and as peer in benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint import Checkpoint


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """`transformers`' GPT2LMHeadModel with the weights of `checkpoint`; `attention` is "sdpa" or "eager"."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = checkpoint.config
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.n_positions, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, layer_norm_epsilon=config.layer_norm_epsilon, bos_token_id=None, eos_token_id=None,
            attn_implementation=attention,
        )
    )  # fmt: skip
    model.transformer.load_state_dict(checkpoint.tensors)
    return model.to(dtype).eval()


def transformers_greedy(model: Any, prompt: list[int], count: int, use_cache: bool = True) -> list[int]:
    """`count` greedy tokens after `prompt`, by `generate` as a user would call it; end-of-text does not end it."""
    return transformers_batch(model, [prompt], count, use_cache)[0]


def transformers_batch(model: Any, prompts: list[list[int]], count: int, use_cache: bool = True) -> list[list[int]]:
    """`count` greedy tokens after each of `prompts`, all in one call of `generate`: padded on the left, padding masked."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # (B, T)
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])  # (B, T)
    out = model.generate(ids, attention_mask=real, max_new_tokens=count, do_sample=False, use_cache=use_cache, pad_token_id=0)
    return out[:, width:].tolist()
