"""The whole forward pass of the Llama family on one page, in NumPy: the oracle of this stage.

Compare it with stage01_forward/numpy_gpt2.py. Read it from the bottom: `llama` embeds the tokens,
runs the layers, and scores every token of the vocabulary. Names are those of the checkpoint.

T tokens, C channels, H query heads, K heads of keys and values (H / K queries share one), D
channels a head, F channels in the MLP, V tokens in the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Array]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: Array, theta: float) -> Array:
    """x (H, T, D): the pair of channels i and i + D / 2 of token t turns by t * theta^(-2i / D)."""
    pairs = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[-2]), theta ** (-np.arange(pairs) / pairs))  # (T, D / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :pairs], x[..., pairs:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    x: Array, w: Weights, prefix: str, heads: int, kv_heads: int, theta: float, epsilon: float
) -> Array:
    def project(name: str, count: int) -> Array:
        out = x @ w[f"{prefix}.{name}_proj.weight"].T + w.get(f"{prefix}.{name}_proj.bias", 0)
        out = out.reshape(len(x), count, -1).swapaxes(0, 1)  # (T, H * D) -> (H, T, D)
        norm = w.get(f"{prefix}.{name}_norm.weight")  # Qwen3 norms the queries and keys of a head
        return out if norm is None else rms_norm(out, norm, epsilon)

    q, k = rotate(project("q", heads), theta), rotate(project("k", kv_heads), theta)
    v = project("v", kv_heads)
    k, v = (part.repeat(heads // kv_heads, axis=0) for part in (k, v))  # (K, T, D) -> (H, T, D)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])  # (H, T, T)
    past = np.tril(np.ones(scores.shape[1:], dtype=bool))  # (T, T): token i sees tokens 0..i
    out = softmax(np.where(past, scores, -np.inf)) @ v  # (H, T, D)
    out = out.swapaxes(0, 1).reshape(len(x), -1)  # (H, T, D) -> (T, H * D)
    return out @ w[f"{prefix}.o_proj.weight"].T


def mlp(x: Array, w: Weights, prefix: str) -> Array:
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return silu(x @ gate) * (x @ up) @ down  # (T, C) -> (T, F) -> (T, C)


def llama(
    ids: list[int],
    w: Weights,
    n_layer: int,
    heads: int,
    kv_heads: int,
    theta: float = 10_000.0,
    epsilon: float = 1e-6,
) -> Array:
    """Logits (T, V) for `ids` (T,): row i scores the token that may follow ids[: i + 1]."""
    x = w["embed_tokens.weight"][ids]  # (T,) -> (T, C)
    for layer in range(n_layer):
        p = f"layers.{layer}"
        h = rms_norm(x, w[f"{p}.input_layernorm.weight"], epsilon)
        x = x + attention(h, w, f"{p}.self_attn", heads, kv_heads, theta, epsilon)
        h = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], epsilon)
        x = x + mlp(h, w, f"{p}.mlp")
    x = rms_norm(x, w["norm.weight"], epsilon)
    head = w.get("lm_head.weight", w["embed_tokens.weight"])  # absent where it is tied
    return x @ head.T  # (T, C) -> (T, V)
