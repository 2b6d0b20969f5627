"""Whole models: every layer is converted or refused by name, one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.config import Config
from shared.errors import UserError
from shared.models import load, load_model
from shared.testing import random_checkpoint
from stage04_continuous.tests.oracle import CONFIG
from stage10_quantization import rounding
from stage10_quantization.convert import FORMATS, INT4, INT8, INT8_GROUPS, Quantize
from stage10_quantization.layers import QuantizedEmbedding, QuantizedLinear

GPT2 = Config(101, 64, 64, 2, 2)  # groups of 32 do not divide CONFIG's width


def quantized(checkpoint, *options):
    checkpoint.conversion = Quantize(*options)
    model = load_model(checkpoint)
    checkpoint.conversion = None
    return model


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["stories", "stories-chat"])
def test_every_matrix_of_a_model_is_converted(name, weights):
    checkpoint = load(name)
    plain, model = load_model(checkpoint), quantized(checkpoint, weights)
    assert not [m for m in model.modules() if type(m) is nn.Linear]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    assert tables == ([model.wpe] if name == "stories" else [])
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    per_block = 4 if name == "stories" else 7
    assert len(layers) == per_block * model.config.n_layer + 1
    for layer_name, layer in layers.items():
        want = INT8_GROUPS if layer_name == "lm_head" else FORMATS[weights]
        weight = plain.get_submodule(layer_name).weight.detach()
        expected = rounding.quantize(weight, want.bits, want.group, want.minimum, want.dtype)
        assert torch.equal(layer.matrix.codes, expected.codes) and layer.matrix.bits == want.bits
        assert torch.equal(layer.matrix.dequantized(), expected.dequantized())
    # One table for embedding and head: looked up in rows of the vocabulary, and of the same memory.
    table = next(m for m in model.modules() if isinstance(m, QuantizedEmbedding))
    assert model.lm_head.matrix is table.matrix and model.config.tied
    ids = torch.tensor([[5, 0], [7, 5]])
    assert torch.equal(table(ids), table.matrix.dequantized()[ids])


@pytest.mark.parametrize(
    ("name", "width", "bits", "group"),
    [("lm_head", 64, 8, 32), ("lm_head", 48, 8, 48), ("h.0.mlp.c_fc", 64, 4, 32)],
)
def test_a_head_has_eight_bits_in_groups_where_they_divide_it(name, width, bits, group):
    """An untied one as a table."""
    layer = Quantize("int4").layer(name, nn.Linear(width, 48))
    assert (layer.matrix.bits, layer.matrix.group) == (bits, group)
    if name == "lm_head":
        table = Quantize("int4").embedding("wte", nn.Embedding(48, width))
        assert (table.matrix.bits, table.head().matrix.group) == (bits, group)


def test_widths_and_numbers_that_do_not_fit_are_refused_by_name():
    with pytest.raises(UserError, match="^h.0.attn.c_attn.weight has 24 inputs.* groups of 32"):
        quantized(random_checkpoint(CONFIG), "int4")
    weight = torch.ones(2, 64)
    for value in (3e6, torch.nan, -torch.inf):
        weight[1, 40] = value
        with pytest.raises(UserError, match="^one.weight has NaN, infinity or numbers.* in row 1"):
            INT4.quantized("one", weight)
    weight[1, 40] = 3e6
    assert INT8.quantized("one", weight).scale.isfinite().all()
