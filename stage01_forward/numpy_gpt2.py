"""All of GPT-2 on one page, in NumPy, with nothing hidden and nothing fast: it is the oracle.

Weights have their checkpoint names. Read the page from the bottom: `gpt2` embeds the tokens, runs
the blocks, and scores every token of the vocabulary; `block` is attention and a two-layer network,
each added to its input.

T tokens, C channels, H heads of D channels each (C = H * D), V tokens in the vocabulary.
Paper: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); attention from
Vaswani et al. (2017).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


def gelu(x: Array) -> Array:
    """GPT-2's GELU: the tanh approximation (Hendrycks and Gimpel, 2016), not the one with erf."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(
        x - x.max(axis=-1, keepdims=True)
    )  # minus the maximum: the same result, and no overflow
    return e / e.sum(axis=-1, keepdims=True)


def attention(x: Array, w: Weights, prefix: str, n_head: int) -> Array:
    qkv = x @ w[f"{prefix}.c_attn.weight"] + w[f"{prefix}.c_attn.bias"]  # (T, C) -> (T, 3C)
    q, k, v = (
        part.reshape(len(x), n_head, -1).swapaxes(0, 1)  # (T, C) -> (T, H, D) -> (H, T, D)
        for part in np.split(qkv, 3, axis=-1)
    )
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])  # (H, T, T): how well q and k match
    past = np.tril(np.ones(scores.shape[1:], dtype=bool))  # (T, T): token i may look at tokens 0..i
    weights = softmax(np.where(past, scores, -np.inf))  # rows sum to 1, the future has weight 0
    out = (weights @ v).swapaxes(0, 1).reshape(x.shape)  # (H, T, D) -> (T, H, D) -> (T, C)
    return out @ w[f"{prefix}.c_proj.weight"] + w[f"{prefix}.c_proj.bias"]


def mlp(x: Array, w: Weights, prefix: str) -> Array:
    hidden = gelu(x @ w[f"{prefix}.c_fc.weight"] + w[f"{prefix}.c_fc.bias"])  # (T, C) -> (T, 4C)
    return hidden @ w[f"{prefix}.c_proj.weight"] + w[f"{prefix}.c_proj.bias"]  # (T, 4C) -> (T, C)


def block(x: Array, w: Weights, layer: int, n_head: int, epsilon: float) -> Array:
    p = f"h.{layer}"
    x = x + attention(
        layer_norm(x, w[f"{p}.ln_1.weight"], w[f"{p}.ln_1.bias"], epsilon), w, f"{p}.attn", n_head
    )
    return x + mlp(
        layer_norm(x, w[f"{p}.ln_2.weight"], w[f"{p}.ln_2.bias"], epsilon), w, f"{p}.mlp"
    )


def gpt2(ids: list[int], w: Weights, n_layer: int, n_head: int, epsilon: float = 1e-5) -> Array:
    """Logits (T, V) for `ids` (T,): row i scores the token that may follow ids[: i + 1]."""
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]  # (T,) -> (T, C)
    for layer in range(n_layer):
        x = block(x, w, layer, n_head, epsilon)
    x = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"], epsilon)
    head = w.get("lm_head.weight", w["wte.weight"])  # tied: the embedding, read the other way
    return x @ head.T  # (T, C) -> (T, V)


def greedy(
    ids: list[int], w: Weights, n_layer: int, n_head: int, count: int, epsilon: float = 1e-5
) -> list[int]:
    """Generate `count` tokens, each the most probable next one, recomputing everything for each."""
    out: list[int] = []
    for _ in range(count):
        out.append(int(gpt2(ids + out, w, n_layer, n_head, epsilon)[-1].argmax()))
    return out
