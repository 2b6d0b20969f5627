"""Packed and widened linear layers: the results of plain ones, which stay where neither helps."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from shared import linear, models, testing
from shared.errors import UserError
from shared.parity import random_prompt
from shared.testing import SHAPES, random_checkpoint
from stage01_forward.attention import Recompute
from stage01_forward.model import load_model

from .int8 import Dequantized, Int8, Int8Linear

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not linear.can_pack(CPU, torch.float32), reason="this build of PyTorch cannot pack"
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.05}
PACKABLE = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not linear.can_pack(CPU, dtype), reason=f"this machine packs no {dtype}"
        ),
    )
    for dtype in BOUNDS
]


@needs_packing
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("single", [None, *linear.ONE_ROW])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@torch.inference_mode()
def test_packed_is_plain_to_rounding(dtype, bias, single, gelu):
    torch.manual_seed(0)
    plain = nn.Linear(7, 24, bias=bias).to(dtype)
    packed = linear.PackedLinear(plain, gelu)
    layer = packed.by_rows(plain.weight.detach(), single) if single else packed
    weights = (plain.weight.float(), plain.bias.float() if bias else None)
    for shape in ((7,), (1, 7), (3, 7), (2, 3, 7), (1, 1, 7), (33, 7)):
        x = torch.randn(shape).to(dtype)
        expected = nn.functional.linear(x.float(), *weights)
        expected = nn.functional.gelu(expected, approximate="tanh") if gelu else expected
        assert layer(x).shape == expected.shape
        assert (layer(x).float() - expected).abs().max() <= BOUNDS[dtype]
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


def test_the_parts_of_a_row_are_equal():
    sizes = {768: 8, 50257: 29, 2048: 8, 9: 9, 7: 0, 67: 0}
    assert {features: linear.parts(features) for features in sizes} == sizes


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
def test_plain_layers_compete_with_the_fastest_packed_ones(monkeypatch):
    """The way for a single row is chosen first, and its weight is copied once for all ways."""
    monkeypatch.setattr(linear, "faster", faster := Mock(return_value=True))
    assert linear.optimize(load_model(random_checkpoint(SHAPES["wide"])), "auto") == "packed"
    *ways, (plain, best, rows) = [call.args[:3] for call in faster.call_args_list]
    assert rows == (1, 32) and all(isinstance(layer, nn.Linear) for _, layer in plain)
    assert {layer.single for _, layer in best} == {linear.ONE_ROW[-1]}
    copies = [
        {layer.rows.data_ptr() for _, layer in way if layer.rows is not None} for _, way, _ in ways
    ]
    assert copies[0] <= copies[1]


class Adapter(nn.Linear):
    """A subclass, as of LoRA or quantization, has a forward of its own."""


class Scaled(torch.Tensor):
    """A weight of another class."""


@needs_packing
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@torch.inference_mode()
def test_unknown_layers_stay_as_they_are(dtype):
    """Subclasses, quantized layers, other modules, other dtypes, weights of another class."""
    wrapped, quantized = nn.Linear(8, 8), nn.Module()
    wrapped.weight = nn.Parameter(wrapped.weight.data.as_subclass(Scaled), requires_grad=False)
    quantized.weight = torch.zeros(8, 8, dtype=torch.int8)
    unknown = [Adapter(8, 8), quantized, nn.Bilinear(8, 8, 8), nn.Linear(8, 8).double(), wrapped]
    # Only GPT-2's GELU directly behind a linear layer is moved into it.
    one, two, three = (nn.Linear(8, 8).to(dtype) for _ in range(3))
    moved, first, second = (nn.GELU(approximate="tanh") for _ in range(3))
    known = [one, moved, Adapter(8, 8), first, two, nn.GELU(), three, nn.Identity(), second]
    model = nn.Sequential(*unknown, *known)
    assert linear.optimize(model, "packed") == "packed"
    assert list(model)[: len(unknown)] == unknown
    kinds = [type(module) for module in list(model)[len(unknown) :]]
    packed, identity = linear.PackedLinear, nn.Identity
    left = [Adapter, nn.GELU, packed, nn.GELU, packed, identity, nn.GELU]
    assert kinds == [packed, identity, *left]
    assert linear.optimize(nn.Sequential(*unknown[:3]), "packed") == "plain"


def test_a_processor_that_cannot_pack_is_named(tiny, monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda device, dtype: False)
    model = load_model(tiny, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="in bfloat16 on this processor.*use --linear auto"):
        linear.optimize(model, "packed")


@pytest.mark.parametrize("dtype", linear.WIDENED_DTYPES, ids=str)
def test_where_nothing_packs_the_faster_of_widened_and_plain_stays(dtype, tiny, monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda device, dtype: False)
    wide = linear.WidenedLinear
    for wins, kind, layer in (
        (False, "plain", nn.Linear),
        (True, "widened", wide),
        (None, "widened (not measured)", wide),
    ):
        monkeypatch.setattr(linear, "faster", Mock(return_value=wins))
        model: Any = load_model(tiny, dtype=dtype)
        plain = load_model(tiny, dtype=dtype)
        assert linear.optimize(model, "auto") == kind
        assert type(model.h[0].attn.c_proj) is layer
        assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()  # still tied
        assert model.h[0].mlp.c_fc.weight.is_contiguous() is (wins is not False)
        prompt = torch.tensor(random_prompt(20, model.config, "widened"))
        runs = [m(prompt, torch.arange(20), Recompute().attend) for m in (model, plain)]
        torch.testing.assert_close(*runs, rtol=0, atol=BOUNDS[torch.bfloat16])
    assert linear.optimize(load_model(tiny, dtype=dtype), "widened") == "widened"


def test_float64_stays_plain(tiny):
    model = load_model(tiny, dtype=torch.float64)
    for mode in ("auto", "plain"):
        assert linear.optimize(model, mode) == "plain"
        assert isinstance(model.lm_head, nn.Linear)
    for mode in ("packed", "widened"):
        pytest.raises(UserError, linear.optimize, model, mode).match("float64 on cpu")
    pytest.raises(UserError, linear.optimize, model, "fast").match("auto, plain, packed, widened")


def test_only_a_clear_winner_counts(monkeypatch):
    """times of the first and the second layer, in turn, after one run to warm up."""
    now = [0.0]

    def layer(times, runs):
        def run(x):
            now[0] += times[(len(runs) - 1) % len(times)]
            runs.append(x)

        return [(4, run)]

    monkeypatch.setattr(linear.time, "perf_counter", lambda: now[0])
    for first, second, won, pairs in (
        *(([0.03], [0.02], True, 5), ([0.02], [0.03], False, 5)),
        ([0.03] * 5, [0.02, 0.02, 0.09, 0.02, 0.02], True, 15),  # a fifth disturbed
        ([0.03] * 3, [0.02, 0.09, 0.02], None, 15),  # a third disturbed
        ([0.03], [0.0295], None, 15),
        ([0.03, 0.06, 0.06, 0.06], [0.02] * 4, None, 15),  # always slower, but hardly ever alone
        *(([3], [2], True, 3), ([3] * 3, [2, 9, 2], None, 3)),  # a slow model or machine
    ):
        runs: tuple[list[Any], list[Any]] = ([], [])
        both = layer(first, runs[0]), layer(second, runs[1])
        assert linear.faster(*both, (1,), torch.float32) is won
        assert len(runs[0]) == len(runs[1]) == pairs + 1


@needs_packing
def test_without_a_winner_auto_packs_and_reports_it(monkeypatch, tiny):
    monkeypatch.setattr(linear, "faster", lambda *_: None)
    model = load_model(tiny)
    assert linear.optimize(model, "auto") == "packed (not measured)"
    assert isinstance(model.lm_head, linear.PackedLinear)


# ---- layers of another format


def test_every_engine_runs_layers_of_another_format():
    """The tokens are those of the dequantized weights, and each layer packs itself."""
    both = []
    for conversion in (Int8(), Dequantized()):
        checkpoint = random_checkpoint(SHAPES["wide"], spread=24.0)
        checkpoint.conversion = conversion
        both.append(models.load_model(checkpoint, dtype=torch.float64))
    model, plain = both
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) == 4 * model.config.n_layer + 1
    assert isinstance(layers[0], linear.Linear) and not isinstance(nn.Linear(1, 1), linear.Linear)
    assert all(layer.bytes < 1.5 * layer.weight.numel() for layer in layers)
    assert linear.optimize(model, "plain") == "plain" and not layers[0].packed
    linear.optimize(model)
    assert all(layer.packed for layer in model.modules() if isinstance(layer, Int8Linear))
    prompts = [random_prompt(length, model.config, "int8") for length in (3, 17, 30)]
    params = testing.sampling_params()(max_tokens=20)
    want = [output.token_ids for output in testing.oracle(plain).generate(prompts, params)]
    for name, make in testing.engines().items():
        assert [o.token_ids for o in make(model).generate(prompts, params)] == want, name
