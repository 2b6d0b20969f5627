"""Packed and widened linear layers: the results of plain ones, which stay where neither helps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shared import linear
from shared.parity import random_prompt
from shared.testing import SHAPES, random_checkpoint
from stage01_forward.attention import Recompute
from stage01_forward.model import load_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not linear.can_pack(CPU, torch.float32), reason="this build of PyTorch cannot pack"
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.05}
PACKABLE = [dtype for dtype in BOUNDS if linear.can_pack(CPU, dtype)]


@pytest.mark.parametrize(("gelu", "amd"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@torch.inference_mode()
def test_packed_is_plain_to_rounding(dtype, bias, gelu, amd, monkeypatch):
    monkeypatch.setattr(linear, "AMD", amd)
    torch.manual_seed(0)
    plain = nn.Linear(7, 24, bias=bias).to(dtype)
    layer = linear.PackedLinear(plain, gelu)
    weights = (plain.weight.float(), plain.bias.float() if bias else None)
    for shape in ((7,), (1, 7), (3, 7), (2, 3, 7), (1, 1, 7), (33, 7)):
        x = torch.randn(shape).to(dtype)
        expected = nn.functional.linear(x.float(), *weights)
        expected = nn.functional.gelu(expected, approximate="tanh") if gelu else expected
        assert layer(x).shape == expected.shape
        assert (layer(x).float() - expected).abs().max() <= BOUNDS[dtype]
    assert torch.equal(layer.weight, plain.weight)
    assert not layer.state_dict()  # it cannot store the packed layout


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", linear.WIDENED_DTYPES, ids=str)
@torch.inference_mode()
def test_widened_is_float32_rounded_once(dtype, bias, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Linear(7, 25, bias=bias).to(dtype)
    wide = linear.WidenedLinear(plain)
    for numbers in (1, 28, 2**19):  # in a piece: one output, 4 with one left, all
        monkeypatch.setattr(linear, "WIDENED", numbers)
        for shape in ((7,), (1, 7), (7, 7), (2, 4, 7), (33, 7)):
            x = torch.randn(shape).to(dtype)
            expected = plain.float()(x.float())
            plain.to(dtype)
            assert wide(x).shape == expected.shape and wide(x).dtype == dtype
            torch.testing.assert_close(wide(x).float(), expected, rtol=2**-8, atol=1e-5)
    assert wide.state_dict().keys() == plain.state_dict().keys()


@needs_packing
@torch.inference_mode()
def test_a_whole_packed_model_computes_the_same():
    """In a batch of rows and in one row; the GELU moves into the layer before it."""
    checkpoint = random_checkpoint(SHAPES["wide"], spread=1.0)
    plain, packed = load_model(checkpoint), load_model(checkpoint)
    assert linear.optimize(packed) == "packed"
    assert not [module for module in packed.modules() if isinstance(module, nn.Linear | nn.GELU)]
    for length in (1, 30):
        ids = torch.tensor(random_prompt(length, checkpoint.config, "linear"))
        hidden = [model(ids, torch.arange(length), Recompute().attend) for model in (plain, packed)]
        assert (hidden[0] - hidden[1]).abs().max() < 1e-4
        assert (plain.logits(hidden[0]) - packed.logits(hidden[1])).abs().max() < 1e-4


@needs_packing
@torch.inference_mode()
def test_unknown_layers_stay_as_they_are():
    """And only GPT-2's GELU directly behind a linear layer moves into it."""
    gelu = partial(nn.GELU, approximate="tanh")
    adapter = type("Adapter", (nn.Linear,), {})  # as of LoRA, with a forward of its own
    unknown = [adapter(8, 8), gelu(), nn.Bilinear(8, 8, 8), nn.Linear(8, 8).double()]
    known = [nn.Linear(8, 8), gelu(), nn.Linear(8, 8), nn.GELU(), nn.Identity(), gelu()]
    model = nn.Sequential(*unknown, *known)
    assert linear.optimize(model) == "packed"
    assert list(model)[: len(unknown)] == unknown
    packed, identity = linear.PackedLinear, nn.Identity
    kinds = [type(module) for module in list(model)[len(unknown) :]]
    assert kinds == [packed, identity, packed, nn.GELU, identity, nn.GELU]
    assert linear.optimize(nn.Sequential(*unknown)) == "plain"


@pytest.mark.parametrize("dtype", linear.WIDENED_DTYPES, ids=str)
def test_16_bits_that_do_not_pack_are_widened(dtype, tiny, monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda device, dtype: False)
    model: Any = load_model(tiny, dtype=dtype)
    assert linear.optimize(model) == "widened"
    assert type(model.h[0].attn.c_proj) is linear.WidenedLinear
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()  # still tied
    assert model.h[0].mlp.c_fc.weight.is_contiguous()
