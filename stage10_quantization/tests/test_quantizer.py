"""The page: its bounds hold and are nearly reached, unusual rows are as it defines them, and the
quantizer of whole models has the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shared.errors import UserError
from stage10_quantization import layers, rounding
from stage10_quantization import numpy_quant as page

KINDS: list[Any] = [(8, False), (4, False), (4, True)]  # bits, with a minimum
DTYPES = {np.float32: torch.float32, np.float16: torch.float16}
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits,minimum", KINDS)
@given(w=matrices(ordinary | st.just(0.0)), group=st.sampled_from([32, 64]))
def test_no_weight_is_off_by_more_than_half_a_scale(bits, minimum, dtype, w, group):
    codes, *scales = quantized(w, (bits, minimum), group, dtype)
    assert all(np.array_equal(s, s.astype(dtype)) for s in scales)  # stored without rounding
    back = codes.reshape(3, -1, group) * scales[0].astype(float)[..., None]
    if minimum:
        back += scales[1][..., None]
    error = np.abs(back - w.reshape(3, -1, group)).max(-1)
    # A minimum is subtracted in float32.
    assert (error <= scales[0] / 2 * page.ROUNDING + 2.0**-24 * np.abs(w).max()).all()
    lowest, highest = (0, 2**bits - 1) if minimum else (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    assert codes.min() >= lowest and codes.max() <= highest


@pytest.mark.parametrize("bits,minimum", KINDS)
def test_half_a_scale_is_nearly_reached(bits, minimum):
    w = np.random.default_rng(0).normal(size=(50, 640)).astype(np.float32)
    codes, *scales = quantized(w, (bits, minimum), 64)
    error = np.abs(page.dequantize(codes, *scales) - w).reshape(50, -1, 64)
    assert 0.95 < (error.max(-1) / scales[0]).mean() * 2 <= page.ROUNDING
    rms = np.sqrt((error**2).mean() / (scales[0] ** 2).mean())
    assert abs(rms - 12**-0.5) < 0.01  # that of a uniform error
    expected = {(8, False): 0.007, (4, False): 0.11}  # of the weights' rms
    if (bits, minimum) in expected:
        assert np.sqrt((error**2).mean()) == pytest.approx(expected[bits, minimum], rel=0.15)


@pytest.mark.parametrize("bits,minimum", KINDS)
@given(w=matrices(anything, rows=2), group=st.sampled_from([16, 64]))
@example(w=WIDE, group=16)
def test_unusual_groups_are_marked_or_right(bits, minimum, w, group):
    """Zeros, subnormals, extremes, NaN, infinity: NaN in the scale, or the bound."""
    with np.errstate(all="ignore"):
        codes, *scales = quantized(w, (bits, minimum), group, np.float32)
    groups = w.reshape(2, -1, group).astype(float)
    finite = np.isfinite(groups).all(-1)
    assert np.isnan(scales[0][~finite]).all() and not codes.reshape(groups.shape)[~finite].any()
    usable = np.isfinite(scales[0])
    if not minimum:
        assert (usable == finite).all()
    back = codes.reshape(groups.shape) * scales[0].astype(float)[..., None]
    if minimum:
        back += scales[1].astype(float)[..., None]
    error = np.abs(back - groups).max(-1)[usable]
    rounding = 2.0**-23 * np.abs(groups).max(-1)[usable]
    assert (error <= scales[0][usable] / 2 * page.ROUNDING + rounding).all()
    assert not scales[0][(groups == 0).all(-1)].any()


@given(
    matrices(anything, rows=5),
    st.sampled_from(KINDS),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(list(DTYPES)),
)
@example(WIDE, (4, True), 16, np.float32)
def test_the_quantizer_of_models_has_the_bits_of_the_page(w, kind, group, dtype):
    with np.errstate(all="ignore"):
        codes, *scales = quantized(w, kind, group, dtype)
    matrix = rounding.quantize(torch.tensor(w), kind[0], group, kind[1], DTYPES[dtype])
    assert np.array_equal(codes, matrix.codes.numpy())
    assert np.array_equal(scales[0], matrix.scale.numpy(), equal_nan=True)
    assert matrix.bits == kind[0] and matrix.group == group and (matrix.minimum is None) ^ kind[1]
    if matrix.minimum is not None:
        assert np.array_equal(scales[1], matrix.minimum.numpy())
    x = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    with np.errstate(all="ignore"):
        back, y = page.dequantize(codes, *scales), page.multiply(x, codes, *scales)
    assert np.array_equal(back, matrix.dequantized().numpy(), equal_nan=True)
    got = layers.multiply(matrix, torch.tensor(x)).numpy()
    assert np.array_equal(y, got, equal_nan=True)


@given(matrices(ordinary), st.floats(-200, 200, width=32))
def test_a_zero_point_is_a_code(w, far):
    """Also of weights that all lie on one side of 0, far from it."""
    matrix = rounding.quantize(torch.tensor(w) + far, 4, 32, True, torch.float16, zero=True)
    assert matrix.minimum is not None
    point = -matrix.minimum / torch.where(matrix.scale > 0, matrix.scale, 1)
    assert torch.equal(point, point.round().clamp(0, 15))
    error = (matrix.dequantized() - torch.tensor(w) - far).abs().unflatten(1, (-1, 32)).amax(-1)
    assert (error <= matrix.scale * page.ROUNDING + 1e-4).all()


@given(matrices(anything, rows=4), st.sampled_from([32, 64]))
def test_activations_are_those_of_the_page(x, group):
    with np.errstate(all="ignore"):
        codes, scale = page.quantize_activations(x, group)
    got = layers.quantize_activations(torch.tensor(x), group)
    assert np.array_equal(codes, got[0].numpy())
    assert np.array_equal(scale, got[1].numpy(), equal_nan=True)
    groups = x.reshape(4, -1, group).astype(float)
    finite = np.isfinite(groups).all(-1)
    assert np.isnan(scale[~finite]).all() and not codes.reshape(groups.shape)[~finite].any()
    error = np.abs(codes.reshape(groups.shape) * scale.astype(float)[..., None] - groups)
    assert (error.max(-1)[finite] <= scale[finite] / 2 * page.ROUNDING + page.SMALLEST).all()


def test_activations_in_the_middle_between_two_codes_are_those_of_the_page():
    """There the last bit of the factor 127 / max|x| decides."""
    largest = np.random.default_rng(0).uniform(1, 2, (2000, 1))
    x = (largest * np.r_[127, np.arange(31) + 0.5] / 127).astype(np.float32)  # (2000, 32)
    codes, scale = page.quantize_activations(x, 32)
    got = layers.quantize_activations(torch.tensor(x), 32)
    assert np.array_equal(codes, got[0].numpy()) and np.array_equal(scale, got[1].numpy())


@given(matrices(ordinary, rows=4), matrices(ordinary, rows=5), st.sampled_from(KINDS))
def test_a_layer_errs_by_no_more_than_its_bound(x, w, kind):
    codes, *scales = quantized(w, kind, 32)
    exact = x.astype(float) @ w.astype(float).T
    rounding_of_sums = 1e-5 * (np.abs(x) @ np.abs(w).T) + 1e-5
    error = np.abs(page.multiply(x, codes, *scales) - exact)
    assert (error <= page.bound(x, codes, *scales) + rounding_of_sums).all()


def test_sums_of_whole_numbers_are_exact_at_both_ends():
    """Codes -128 and -8 occur in files; a row of 6,400 large ones, and one of an odd length."""
    torch.manual_seed(0)
    for columns, group, bits in ((6400, 6400, 8), (77, 77, 8), (96, 32, 4)):
        lowest = -(2 ** (bits - 1))
        codes = torch.randint(-lowest - 4, -lowest, (9, columns), dtype=torch.int8)
        codes[0], codes[1] = lowest, -1 - lowest
        matrix = layers.QuantizedMatrix(codes, torch.ones(9, columns // group), bits=bits)
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
    matrix = rounding.quantize(w, 4, 32, True, torch.float16)
    layer = layers.QuantizedLinear(matrix, bias, activations)
    rows = torch.tensor([3, 1, 7])
    assert torch.allclose(layer.shard(rows, None)(x), layer(x)[:, rows], atol=1e-5)
    halves = [torch.arange(96, 128), torch.arange(96)]
    parts = [layer.shard(None, columns)(x[:, columns]) for columns in halves]
    assert torch.allclose(sum(parts) + bias, layer(x), atol=1e-4)
    with pytest.raises(UserError, match="groups of 32"):
        layer.shard(None, torch.arange(48))
    by_row = layers.QuantizedLinear(rounding.quantize(w), None, "float")
    odd = torch.tensor([5, 77, 2])
    assert torch.allclose(by_row.shard(None, odd)(x[:, odd]), x[:, odd] @ w[:, odd].t(), atol=0.1)


def test_one_row_of_nan_shows_in_its_outputs_alone():
    matrix = rounding.quantize(torch.randn(4, 64), 4, 32, True, torch.float16)
    x = torch.randn(3, 64)
    want = layers.multiply(matrix, x)
    for bad in (torch.nan, torch.inf):
        x[1, 40] = bad
        got = layers.multiply(matrix, x)
        assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])
