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
from stage08_llama.numpy_llama import llama
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
