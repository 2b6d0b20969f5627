"""The page in NumPy, and the layers that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared import models
from shared.testing import random_checkpoint
from stage01_forward.attention import Recompute
from stage08_llama.config import LlamaConfig
from stage08_llama.model import MLP, Layer
from stage08_llama.numpy_llama import attention, llama
from stage08_llama.rope import Rope

GROUPED = LlamaConfig(101, 64, 24, 2, 6, 2, 4, n_inner=20, name="grouped", qk_norm=True)
BIASES = {"qkv_bias": True, "rope": Rope(500.0)}


def small(**options: Any) -> LlamaConfig:
    return LlamaConfig(11, 32, 24, 1, 6, 2, 8, n_inner=4, **options)


def filled(module: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


@pytest.mark.parametrize("options", [{}, {"qk_norm": False, "tied": False}, BIASES], ids=str)
def test_the_page_is_the_model(options):
    """Logits of a model with six heads of queries on two of keys and values."""
    config = replace(GROUPED, **options)
    checkpoint = random_checkpoint(config, spread=16.0)
    model = models.load_model(checkpoint, dtype=torch.float64)
    ids = [5, 17, 3, 99, 41]
    weights = {name: tensor.double().numpy() for name, tensor in checkpoint.tensors.items()}
    shape = config.n_layer, config.n_head, config.n_kv_head
    got = llama(ids, weights, *shape, config.rope.theta, config.layer_norm_epsilon)
    hidden = model(torch.tensor(ids), torch.arange(5), Recompute().attend)
    np.testing.assert_allclose(got, model.logits(hidden).numpy(), rtol=1e-4, atol=1e-4)


def page_weights(heads: int, kv_heads: int, width: int = 4) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights = {f"a.{n}_proj.weight": draw.normal(size=(h * width, 10)) for n, h in sizes.items()}
    return weights | {"a.o_proj.weight": draw.normal(size=(10, heads * width))}


def test_neighbouring_queries_share_a_head_of_keys():
    """With each head of keys and values written out for its queries, nothing changes."""
    x, grouped = np.random.default_rng(1).normal(size=(5, 10)), page_weights(6, 2)
    repeated = dict(grouped)
    for name in ("k", "v"):
        heads = grouped[f"a.{name}_proj.weight"].reshape(2, 4, 10)
        repeated[f"a.{name}_proj.weight"] = heads.repeat(3, axis=0).reshape(24, 10)
    want = attention(x, repeated, "a", 6, 6, 100.0, 1e-5)
    np.testing.assert_allclose(attention(x, grouped, "a", 6, 2, 100.0, 1e-5), want)


def test_only_distances_count():
    """Two tokens of zeros before three others take a share of the weights and add nothing: what the
    three add to each other keeps its proportions."""
    x, weights = 0.3 * np.random.default_rng(1).normal(size=(3, 10)), page_weights(1, 1)
    both = x, np.vstack([np.zeros((2, 10)), x])
    outs = (attention(tokens, weights, "a", 1, 1, 100.0, 1e-5)[-3:] for tokens in both)
    here, moved = (out / np.linalg.norm(out, axis=1, keepdims=True) for out in outs)
    np.testing.assert_allclose(moved, here)


def test_a_gate_multiplies():
    mlp = filled(MLP(small()))
    x = torch.randn(5, 24, dtype=torch.float64)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    want = mlp.down_proj(gate * gate.sigmoid() * up)
    torch.testing.assert_close(mlp(x), want)


def test_a_layer_adds_twice():
    """Attention that returns the queries, and an MLP of no effect; and the other way round."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer = filled(Layer(small(), 3))
        layer.get_submodule(name).weight.data.zero_()
        x = torch.randn(5, 24, dtype=torch.float64)
        turn = torch.ones(5, 1, 4), torch.zeros(5, 1, 4)
        calls: list[Any] = []

        def attend(number: int, q: Any, k: Any, v: Any, calls: Any = calls) -> Any:
            calls.append((number, q.shape, k.shape, v.shape))
            return q

        got = layer(x.clone(), turn, attend)
        assert calls == [(3, (5, 6, 8), (5, 2, 8), (5, 2, 8))]
        if name == "mlp.down_proj":
            q = layer.self_attn.q_proj(layer.input_layernorm(x))
            want = x + layer.self_attn.o_proj(q)
        else:
            want = x + layer.mlp(layer.post_attention_layernorm(x))
        torch.testing.assert_close(got, want, msg=f"{name} is zero, and the layer is wrong")
    layer = filled(Layer(small(), 3))  # the MLP sees what attention has added
    added = x + layer.self_attn.o_proj(layer.self_attn.q_proj(layer.input_layernorm(x)))
    want = added + layer.mlp(layer.post_attention_layernorm(added))
    torch.testing.assert_close(layer(x.clone(), turn, attend), want)
