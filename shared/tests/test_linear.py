"""Packed linear layers: the plain layer's results, and the plain layer where packing is impossible."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared import linear
from shared.course.testing import SHAPES, random_checkpoint
from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.attention import Recompute
from stage01_forward.model import load_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not linear.can_pack(CPU, torch.float32), reason="this build of PyTorch cannot pack"
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@needs_packing
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("single", [None, *linear.ONE_ROW])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 7), (2, 3, 7), (1, 1, 7), (33, 7)], ids=str)
@torch.inference_mode()
def test_packed_is_plain_to_rounding(shape, dtype, bias, single, gelu):
    torch.manual_seed(0)
    plain = nn.Linear(7, 24, bias=bias).to(dtype)
    x = torch.randn(shape).to(dtype)
    expected = nn.functional.linear(
        x.float(), plain.weight.float(), plain.bias.float() if bias else None
    )
    expected = nn.functional.gelu(expected, approximate="tanh") if gelu else expected
    layer = linear.PackedLinear(plain, gelu)
    got = (layer.by_rows(plain.weight, single) if single else layer)(x)
    assert got.shape == expected.shape
    assert (got.float() - expected).abs().max() <= BOUNDS[dtype]


@pytest.mark.parametrize(
    ("features", "count"), [(768, 8), (50257, 29), (2048, 8), (9, 9), (7, 0), (67, 0)]
)
def test_parts_divide_or_there_are_none(features, count):
    assert linear.parts(features) == count


@needs_packing
@torch.inference_mode()
def test_a_whole_packed_model_computes_the_same():
    """In a batch of rows and in one row; the GELU moves into the layer before it."""
    checkpoint = random_checkpoint(SHAPES["wide"], spread=1.0)
    plain, packed = load_model(checkpoint), load_model(checkpoint)
    assert linear.optimize(packed, "packed") == "packed"
    assert not [module for module in packed.modules() if isinstance(module, nn.Linear | nn.GELU)]
    for length in (1, 30):
        ids = torch.tensor(random_prompt(length, checkpoint.config, "linear"))
        hidden = [model(ids, torch.arange(length), Recompute().attend) for model in (plain, packed)]
        assert (hidden[0] - hidden[1]).abs().max() < 1e-4
        assert (plain.logits(hidden[0]) - packed.logits(hidden[1])).abs().max() < 1e-4


@needs_packing
def test_plain_layers_must_beat_the_best_of_the_packed_ways(monkeypatch):
    """The way for a single row is chosen first, and its weight is copied once for all ways."""
    calls = []

    def faster(first, second, rows, dtype):
        calls.append((first, second, rows))
        return True

    monkeypatch.setattr(linear, "faster", faster)
    assert linear.optimize(load_model(random_checkpoint(SHAPES["wide"])), "auto") == "packed"
    *ways, (plain, best, rows) = calls
    assert rows == (1, 32) and all(isinstance(layer, nn.Linear) for _, layer in plain)
    assert {layer.single for _, layer in best} == {linear.ONE_ROW[-1]}
    first, last = (
        {layer.rows.data_ptr() for _, layer in tried if layer.rows is not None}
        for _, tried, _ in ways
    )
    assert first <= last


class Adapter(nn.Linear):
    """A subclass, as of LoRA or quantization: its forward is its own."""


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 8
        self.weight = torch.zeros(8, 8, dtype=torch.int8)


@needs_packing
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@torch.inference_mode()
def test_what_is_unknown_stays_as_it_is(dtype):
    """A subclass, a quantized layer, another kind of module, another dtype, a weight of another class."""

    class Scaled(torch.Tensor):
        pass

    wrapped = nn.Linear(8, 8)
    wrapped.weight = nn.Parameter(wrapped.weight.data.as_subclass(Scaled), requires_grad=False)
    unknown = [Adapter(8, 8), Quantized(), nn.Bilinear(8, 8, 8), nn.Linear(8, 8).double(), wrapped]
    gelu = nn.GELU(approximate="tanh")
    model = nn.Sequential(*unknown, nn.Linear(8, 16).to(dtype), gelu, Adapter(16, 8), gelu)
    assert linear.optimize(model, "packed") == "packed"
    assert list(model)[: len(unknown)] == unknown
    assert [type(module) for module in list(model)[len(unknown) :]] == [
        linear.PackedLinear, nn.Identity, Adapter, nn.GELU
    ]  # fmt: skip
    assert linear.optimize(nn.Sequential(*unknown[:3]), "packed") == "plain"


@needs_packing
def test_a_packed_layer_has_nothing_to_save():
    assert not linear.PackedLinear(nn.Linear(7, 24)).state_dict()


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_float64_stays_plain_to_the_last_bit(mode, tiny):
    model = load_model(tiny, dtype=torch.float64)
    assert linear.optimize(model, mode) == "plain"
    assert isinstance(model.lm_head, nn.Linear)


def test_modes_that_are_impossible_or_unknown_are_refused(tiny):
    model = load_model(tiny, dtype=torch.float64)
    with pytest.raises(UserError, match="float64 on cpu"):
        linear.optimize(model, "packed")
    with pytest.raises(UserError, match="auto, plain, packed"):
        linear.optimize(model, "fast")


def test_the_faster_layers_are_found_by_measuring():
    slow = torch.randn(300, 300)
    lazy = [(4, lambda x: [slow @ slow for _ in range(20)][0])]
    quick = [(4, lambda x: x)]
    assert linear.faster(lazy, quick, (1,), torch.float32)
    assert not linear.faster(quick, lazy, (1,), torch.float32)


def test_only_gpt2s_gelu_right_behind_a_linear_layer_is_moved():
    exact, tanh = nn.GELU(), nn.GELU(approximate="tanh")
    assert linear.followed_by_gelu(
        nn.Sequential(nn.Linear(2, 2), exact, nn.Linear(2, 2), tanh)
    ) == {"2": "3"}
    assert linear.followed_by_gelu(nn.Sequential(nn.Linear(2, 2), nn.Identity(), tanh)) == {}
