"""The model against `transformers`, layer by layer, and against the NumPy page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.parity import random_prompt
from shared.peers import transformers_batch, transformers_model
from shared.testing import SHAPES, random_checkpoint
from stage01_forward import numpy_gpt2
from stage01_forward.attention import Recompute, explicit_attention, fused_attention
from stage01_forward.model import load_model


@torch.inference_mode()
def hidden_states(model, ids):
    """The residual stream before each block, and the output of the last norm."""
    states: list[torch.Tensor] = []
    for block in model.h:
        block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].clone()))
    last = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return [*states, last]


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_hidden_states_of_every_layer_match_transformers(shape):
    config = replace(SHAPES[shape], layer_norm_epsilon=1e-3)
    # With a spread of 4 the 124M shape has activations of 10^4, where float32 cannot resolve 1e-4.
    large = shape == "124M"
    dtype, bound, spread = (torch.float32, 1e-4, 1.0) if large else (torch.float64, 1e-10, 4.0)
    checkpoint = random_checkpoint(config, spread=spread)
    ids = random_prompt(min(config.n_positions, 40), config, "model")
    # Converted once for both: GPT-2 is large.
    checkpoint.tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    ours = load_model(checkpoint, dtype=dtype)
    twin = transformers_model(checkpoint, dtype)
    theirs = twin(torch.tensor([ids]), output_hidden_states=True)
    states = hidden_states(ours, ids)
    assert len(states) == len(theirs.hidden_states) == config.n_layer + 1
    for layer, (mine, reference) in enumerate(zip(states, theirs.hidden_states, strict=True)):
        assert mine.dtype == reference.dtype == dtype
        assert (mine - reference[0]).abs().max() <= bound, f"layer {layer}"
    assert (ours.logits(states[-1]) - theirs.logits[0]).abs().max() <= bound


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "124M"])
@torch.inference_mode()
def test_numpy_page_matches_the_model(shape):
    config = SHAPES[shape]
    checkpoint = random_checkpoint(config)
    weights = {name: tensor.double().numpy() for name, tensor in checkpoint.tensors.items()}
    ids = random_prompt(config.n_positions, config, "numpy")
    model = load_model(checkpoint, dtype=torch.float64)
    ours = model.logits(hidden_states(model, ids)[-1]).numpy()
    page = numpy_gpt2.gpt2(ids, weights, config.n_layer, config.n_head, config.layer_norm_epsilon)
    assert np.abs(ours - page).max() <= 1e-10
    large = np.array([1000.0, 1000.0, -1000.0])
    assert numpy_gpt2.softmax(large).tolist() == [0.5, 0.5, 0.0]


def test_numpy_page_generates_what_transformers_generates(tiny):
    config, prompt = tiny.config, [50, 2]  # 8 different tokens follow
    weights = {name: tensor.double().numpy() for name, tensor in tiny.tensors.items()}
    sizes = (config.n_layer, config.n_head, 20, config.layer_norm_epsilon)
    page = numpy_gpt2.greedy(prompt, weights, *sizes)
    assert [page] == transformers_batch(transformers_model(tiny, torch.float64), [prompt], 20)


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_explicit_attention_is_fused_attention(tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, 4, tokens, 8, dtype=torch.float64, generator=generator)
    assert torch.allclose(explicit_attention(q, k, v), fused_attention(q, k, v), rtol=0, atol=1e-13)


@torch.inference_mode()
def test_leading_shape_is_the_callers_business(tiny_model):
    """(T,), (B, T) and packed (N,): without attention each token is computed alone."""
    layers = []

    def attend(layer, q, k, v):
        layers.append(layer)
        return v

    ids, positions = torch.arange(12) * 5 % 101, torch.arange(12)
    flat = tiny_model(ids, positions, attend)
    batch = tiny_model(ids.view(3, 4), positions.view(3, 4), attend)
    assert torch.allclose(flat.view(3, 4, -1), batch, rtol=0, atol=1e-13)
    assert layers == [*range(tiny_model.config.n_layer)] * 2


def test_weights_are_views_of_the_checkpoint(tiny):
    model = load_model(tiny)
    weight = model.get_parameter("h.0.attn.c_attn.weight")
    assert weight.data_ptr() == tiny.tensors["h.0.attn.c_attn.weight"].data_ptr()
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()
