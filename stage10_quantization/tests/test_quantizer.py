"""The page: its bounds hold and are nearly reached, and unusual rows are as it defines them. And a
product of codes, written once more in NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shared.errors import UserError
from stage10_quantization import layers
from stage10_quantization import numpy_quant as page
from stage10_quantization.convert import INT4, INT8
from stage10_quantization.matrix import QuantizedMatrix

ROUNDING = 1 + 2.0**-14  # of the divisions in float32, which move a code's edge a little
KINDS: list[Any] = [(8, False), (4, False), (4, True)]  # bits, with a minimum
ODD = [0.0, -0.0, 1e-45, -1e-40, 2.0**-119, 6e-8, 65504.0, 1e30, -3.4e38]
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-100, 100, width=32)
WIDE = np.full((2, 64), -(2.0**103), np.float32)
WIDE[:, 0] = np.finfo(np.float32).max  # less the smallest: infinite
anything = st.floats(width=32) | st.sampled_from([*ODD, np.nan, np.inf, -np.inf])


def matrices(elements, rows=3, columns=64):
    return arrays.arrays(np.float32, (rows, columns), elements=elements)


def quantized(w, kind, group, dtype=np.float16):
    bits, minimum = kind
    quantize = page.asymmetric if minimum else page.symmetric
    return quantize(w, bits, group, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits,minimum", KINDS)
@given(w=matrices(ordinary | anything), group=st.sampled_from([16, 32, 64]))
@example(w=WIDE, group=16)
def test_no_weight_is_off_by_more_than_half_a_scale(bits, minimum, dtype, w, group):
    """Zeros, subnormals, extremes, NaN, infinity: NaN in the scale, or the bound."""
    with np.errstate(all="ignore"):
        codes, *scales = quantized(w, (bits, minimum), group, dtype)
        kept = [side.astype(dtype) for side in scales]
    assert all(map(partial(np.array_equal, equal_nan=True), scales, kept))  # nothing is rounded
    groups = w.reshape(len(w), -1, group).astype(float)
    finite, usable = np.isfinite(groups).all(-1), np.isfinite(scales[0])
    assert not usable[~finite].any() and not codes.reshape(groups.shape)[~usable].any()
    if not minimum and dtype == np.float32:
        assert (usable == finite).all()
    lowest, highest = (0, 2**bits - 1) if minimum else (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    assert codes.min() >= lowest and codes.max() <= highest
    back = codes.reshape(groups.shape) * scales[0].astype(float)[..., None]
    if minimum:
        back += scales[1].astype(float)[..., None]
    error = np.abs(back - groups).max(-1)[usable]
    rounding = 2.0**-23 * np.abs(groups).max(-1)[usable]  # a minimum is subtracted in float32
    assert (error <= scales[0][usable] / 2 * ROUNDING + rounding).all()
    assert not scales[0][(groups == 0).all(-1)].any()


@pytest.mark.parametrize("bits,minimum", KINDS)
def test_half_a_scale_is_nearly_reached(bits, minimum):
    w = np.random.default_rng(0).normal(size=(50, 640)).astype(np.float32)
    codes, *scales = quantized(w, (bits, minimum), 64)
    error = np.abs(page.dequantize(codes, *scales) - w).reshape(50, -1, 64)
    assert 0.95 < (error.max(-1) / scales[0]).mean() * 2 <= ROUNDING
    rms = np.sqrt((error**2).mean() / (scales[0] ** 2).mean())
    assert abs(rms - 12**-0.5) < 0.01  # that of a uniform error
    expected = {(8, False): 0.007, (4, False): 0.11}  # of the weights' rms
    if (bits, minimum) in expected:
        assert np.sqrt((error**2).mean()) == pytest.approx(expected[bits, minimum], rel=0.15)


@given(matrices(ordinary | anything, rows=5), st.sampled_from(KINDS), st.sampled_from([16, 32, 64]))
@example(WIDE, (4, True), 16)
def test_a_product_is_a_sum_of_whole_numbers_for_each_group(w, kind, group):
    with np.errstate(all="ignore"):
        parts = quantized(w, kind, group)
        back = page.dequantize(*parts)
    matrix = QuantizedMatrix(*map(torch.from_numpy, parts), bits=kind[0])
    assert np.array_equal(back, matrix.dequantized(), equal_nan=True)
    x, y = torch.randn(2, 64), torch.zeros(2, len(w))
    codes, x_scale = layers.quantize_activations(x, group)
    for g, scale in enumerate(x_scale[:, :, None].unbind(1)):
        p, q = (whole.long().split(group, 1)[g] for whole in (codes, matrix.codes))
        y += (p @ q.t()).float() * (matrix.scale[:, g] * scale)
        if matrix.minimum is not None:
            y += matrix.minimum[:, g] * (p.sum(1, keepdim=True).float() * scale)
    assert np.array_equal(y, layers.multiply(matrix, x), equal_nan=True)


@given(matrices(ordinary), st.floats(-200, 200, width=32))
def test_a_zero_point_is_a_code(w, far):
    """Also of weights that all lie on one side of 0, far from it."""
    w = w + np.float32(far)
    codes, scale, minimum = page.with_zero(w, 4, 32)
    point = -minimum / np.where(scale > 0, scale, 1)
    assert np.array_equal(point, np.rint(point).clip(0, 15))
    error = np.abs(page.dequantize(codes, scale, minimum) - w).reshape(3, 2, 32).max(-1)
    assert (error <= scale * ROUNDING + 1e-4).all()


# In the middle between two codes the last bit of the factor 127 / max|x| decides.
MIDDLE = np.random.default_rng(0).uniform(1, 2, (2000, 1)) * np.r_[127, np.arange(31) + 0.5] / 127


@given(matrices(anything, rows=4), st.sampled_from([32, 64]))
@example(MIDDLE.astype(np.float32), 32)
def test_activations_are_rounded_by_groups_to_the_nearest_code(x, group):
    codes, scale = (part.numpy() for part in layers.quantize_activations(torch.tensor(x), group))
    groups = x.reshape(len(x), -1, group)
    codes, largest = codes.reshape(groups.shape), np.abs(groups).max(-1)
    small, finite = largest < layers.SMALLEST, np.isfinite(largest)
    usable = finite & ~small
    assert np.isnan(scale[~finite]).all() and not scale[small].any() and not codes[~usable].any()
    factor = np.float32(127) / largest[usable]
    assert np.array_equal(codes[usable], np.rint(groups[usable] * factor[:, None]))
    assert np.array_equal(scale[usable], largest[usable] / np.float32(127))


@given(matrices(ordinary, rows=4), matrices(ordinary, rows=5), st.sampled_from(KINDS))
def test_a_layer_errs_by_no_more_than_its_bound(x, w, kind):
    """By group: scale / 2 * (sum of |x|) + x_scale / 2 * (sum of |w'|); and by sums in float32."""
    matrix = QuantizedMatrix(*map(torch.from_numpy, quantized(w, kind, 32)), bits=kind[0])
    x, w = torch.from_numpy(x), torch.from_numpy(w)
    x_scale, exact = layers.quantize_activations(x, 32)[1].double(), x.double() @ w.double().t()
    x_sums, w_sums = (
        side.double().abs().unflatten(1, (2, 32)).sum(2) for side in (x, matrix.dequantized())
    )
    bound = ROUNDING / 2 * (x_sums @ matrix.scale.double().t() + x_scale @ w_sums.t())
    bound += 1e-5 * (x.abs() @ w.abs().t()) + 1e-5
    assert ((layers.multiply(matrix, x) - exact).abs() <= bound).all()


def test_sums_of_whole_numbers_are_exact_at_both_ends():
    """Codes -128 and -8 occur in files; a row of 6,400 large ones, and one of an odd length."""
    torch.manual_seed(0)
    for columns, group, bits in ((6400, 6400, 8), (77, 77, 8), (96, 32, 4)):
        lowest = -(2 ** (bits - 1))
        codes = torch.randint(-lowest - 4, -lowest, (9, columns), dtype=torch.int8)
        codes[0], codes[1] = lowest, -1 - lowest
        matrix = QuantizedMatrix(codes, torch.ones(9, columns // group), bits=bits)
        x = torch.randint(120, 128, (3, columns))
        x[0, ::3], x[:, :: matrix.group] = -127, 127
        want = (x @ codes.long().t()).float()  # rounded once
        assert torch.equal(layers.multiply(matrix, x.float()), want)
    w = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    assert page.symmetric(w, 8, 64)[0].min() == -127  # ours keep to both sides


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_a_layer_is_split_by_outputs_and_by_groups_of_inputs(activations):
    torch.manual_seed(0)
    w, x, bias = torch.randn(12, 128), torch.randn(3, 128), torch.randn(12)
    layer = layers.QuantizedLinear(INT4.nearest(w), bias, activations)
    rows = torch.tensor([3, 1, 7])
    assert torch.allclose(layer.shard(rows, None)(x), layer(x)[:, rows], atol=1e-5)
    halves = [torch.arange(96, 128), torch.arange(96)]
    parts = [layer.shard(None, columns)(x[:, columns]) for columns in halves]
    assert torch.allclose(sum(parts) + bias, layer(x), atol=1e-4)
    with pytest.raises(UserError, match="groups of 32"):
        layer.shard(None, torch.arange(48))
    by_row = layers.QuantizedLinear(INT8.nearest(w), None, "float")
    odd = torch.tensor([5, 77, 2])
    assert torch.allclose(by_row.shard(None, odd)(x[:, odd]), x[:, odd] @ w[:, odd].t(), atol=0.1)


def test_one_row_of_nan_shows_in_its_outputs_alone():
    matrix = INT4.nearest(torch.randn(4, 64))
    x = torch.randn(3, 64)
    want = layers.multiply(matrix, x)
    for bad in (torch.nan, torch.inf):
        x[1, 40] = bad
        got = layers.multiply(matrix, x)
        assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])
