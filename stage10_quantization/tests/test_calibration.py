"""GPTQ against least squares, and what it saves, by figures that are tested by their definition."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.config import Config
from shared.conversion import convert
from shared.errors import UserError
from shared.models import load, load_model
from shared.testing import random_checkpoint
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage10_quantization.convert import INT4, INT8, Format, Quantize
from stage10_quantization.gptq import calibrate, gptq, nearest, text_ids, windows_of
from stage10_quantization.layers import QuantizedLinear
from stage10_quantization.quality import divergence, engine_of

SMALL = Format(3, group=4, minimum=True, dtype=torch.float16)
WIDE = Format(4, group=64)


def by_least_squares(weight, hessian, format, damp):
    """Column by column: all columns behind the rounded one become those that make up for its error
    best, found by solving the equations anew each time."""
    w, inputs = weight.double(), weight.shape[1]
    h = hessian.double() + damp * hessian.double().diagonal().mean() * torch.eye(inputs)
    codes = torch.empty(w.shape, dtype=torch.int8)
    for j in range(inputs):
        if j % format.group == 0:
            group = format.nearest(w[:, j : j + format.group].float())
        codes[:, j] = nearest(w[:, j].float(), group)
        change = replace(group, codes=codes[:, j : j + 1]).dequantized(torch.double)[:, 0] - w[:, j]
        if j + 1 < inputs:
            rest = torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, j])
            w[:, j + 1 :] -= change[:, None] * rest
    return codes


@pytest.mark.parametrize("format,inputs", [(SMALL, 12), (WIDE, 192), (INT4, 160)])
def test_gptq_is_least_squares_column_by_column(format, inputs):
    """160 and 192 inputs are more than a block of columns."""
    torch.manual_seed(inputs)
    weight = torch.randn(7, inputs)
    x = torch.randn(500, inputs) @ torch.randn(inputs, inputs).tril() + torch.randn(inputs)
    h = 2 * x.t() @ x
    got = gptq(weight, h, format, damp=0.01)
    want = by_least_squares(weight, h, format, 0.01)
    assert (got.codes == want).float().mean() > 0.995  # float32 against float64
    assert torch.equal(gptq(weight, 3 * h, format).codes, got.codes)


@pytest.mark.parametrize("format", [INT4, INT8, WIDE, SMALL])
def test_independent_inputs_leave_the_nearest_codes(format):
    weight, h = torch.randn(9, 192), torch.diag(torch.rand(192) + 0.1)
    got, want = gptq(weight, h, format), format.quantized("w", weight)
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale, want.scale)
    assert torch.equal(got.dequantized(), want.dequantized()) and got.bits == want.bits


@pytest.mark.parametrize("damp", [0.0, 0.01])
def test_inputs_that_are_always_zero_and_too_few_samples(damp):
    """Neither a division by zero nor a factor that does not exist."""
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    x[:, [3, 40]] = 0
    weight, h = torch.randn(5, 64), x.t() @ x
    assert torch.linalg.matrix_rank(h) == 20
    matrix = gptq(weight, h, INT4, damp=damp)
    assert matrix.dequantized().isfinite().all()
    dead = matrix.dequantized()[:, [3, 40]].abs()
    assert (dead <= matrix.scale / 2 * 1.001).all()  # 0, as near as the group has it
    errors = (x @ (kind.dequantized() - weight).t() for kind in (matrix, INT4.nearest(weight)))
    ours, theirs = (error.square().sum() for error in errors)
    assert ours < theirs


@pytest.fixture(scope="module")
def stories() -> Any:
    checkpoint = load("stories")
    tokenizer = load_tokenizer(checkpoint.folder)
    return load_model(checkpoint), lambda count, seed: text_ids(tokenizer, 2047, count, None, seed)


def test_layers_are_calibrated_on_what_the_quantized_ones_before_them_make(stories):
    model, ids = copy.deepcopy(stories[0]), stories[1]
    windows = windows_of(ids(1024, "calibration"))
    calibrate(model, windows, "int4")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 4 * model.config.n_layer + 1 and model.lm_head.matrix.bits == 8
    # Another way: two quantized blocks, the rest in float, and a whole pass.
    half, last = copy.deepcopy(stories[0]), "h.2.mlp.c_proj"
    for name, layer in layers.items():
        if name.startswith(("h.0.", "h.1.")):
            half.set_submodule(name, layer)
    seen: list[torch.Tensor] = []
    half.get_submodule(last).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    with torch.inference_mode():
        for window in windows:
            half(window, torch.arange(512), Recompute().attend)
    x = torch.cat(seen)
    want = gptq(half.get_submodule(last).weight, x.t() @ x, INT4)
    assert (layers[last].matrix.codes == want.codes).float().mean() > 0.999


@torch.inference_mode()
def logprobs(model, ids):
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden).double().log_softmax(-1)


def test_the_divergence_is_that_of_the_second_half_of_whole_windows(stories):
    model, quantized = stories[0], copy.deepcopy(stories[0])
    convert(quantized, Quantize("int4", "float"))  # kernels round less than a code
    ids = stories[1](2 * 512 + 300, "judged")
    got = divergence(engine_of(model), engine_of(quantized), ids)
    kl, lost, same = 0.0, [], 0
    for window in (ids[:512], ids[512:1024]):
        p, q = (logprobs(m, window)[256:511] for m in (model, quantized))
        kl += torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
        lost.append((p - q).gather(1, torch.tensor(window)[257:, None]).mean().item())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert (got["tokens"], got["top_1"]) == (510, same / 510)
    assert got["kl"] == pytest.approx(kl / 510, rel=1e-3)
    assert got["difference"] == pytest.approx(sum(lost) / 2, rel=1e-3)
    assert min(lost) <= got["low"] + 1e-6 < got["high"] <= max(lost) + 1e-6


def test_inputs_that_are_not_finite_are_refused_by_name():
    model = load_model(random_checkpoint(Config(101, 64, 64, 2, 2)))
    model.h[1].ln_2.bias[3] = torch.inf
    with pytest.raises(UserError, match="^The inputs of layer 1, mlp.c_fc are not finite"):
        calibrate(model, [torch.arange(40)], "int4")
