"""Whole models: every layer is converted or refused by name, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shared.errors import UserError
from shared.models import load, load_model
from shared.testing import random_checkpoint
from stage04_continuous.tests.oracle import CONFIG
from stage10_quantization import numpy_quant as page
from stage10_quantization.convert import FORMATS, INT4, INT8, Quantize
from stage10_quantization.layers import QuantizedEmbedding, QuantizedLinear


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
        w, group = plain.get_submodule(layer_name).weight.detach().numpy(), 32
        if layer_name == "lm_head" or weights == "int8-g32":
            codes, *scales = page.symmetric(w, 8, group, np.float16)
        elif weights == "int8":
            codes, *scales = page.symmetric(w, 8, group := w.shape[1])
        else:
            codes, *scales = page.asymmetric(w, 4, group)
        matrix = layer.matrix
        assert np.array_equal(matrix.codes, codes) and matrix.group == group
        assert matrix.bits == (4 if len(scales) == 2 else 8)
        assert np.array_equal(matrix.dequantized(), page.dequantize(codes, *scales))
    # One table for embedding and head: looked up in rows of the vocabulary, and of the same memory.
    table = next(m for m in model.modules() if isinstance(m, QuantizedEmbedding))
    assert model.lm_head.matrix is table.matrix and model.config.tied
    ids = torch.tensor([[5, 0], [7, 5]])
    assert torch.equal(table(ids), table.matrix.dequantized()[ids])


@pytest.mark.parametrize(("width", "group"), [(64, 32), (48, 48)])
def test_an_untied_head_and_a_table_have_groups_where_they_divide_it(width, group):
    head = Quantize("int4").layer("lm_head", nn.Linear(width, 48))
    table = Quantize("int4").embedding("wte", nn.Embedding(48, width))
    for layer in (head, table):
        assert (layer.matrix.bits, layer.matrix.group) == (8, group)


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
