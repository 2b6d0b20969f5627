"""Products with quantized weights: the numbers of stage 10's slow layers, from packed codes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

from typing import Any

import torch

from shared import parity
from shared.conversion import Linear
from shared.models import load_model
from shared.testing import random_checkpoint
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage10_quantization.convert import Format, Quantize
from stage10_quantization.layers import QuantizedEmbedding, QuantizedLinear
from stage13_gpu.launch import DEVICE
from stage13_gpu.layers import GpuMatrix, KernelLinear
from stage13_gpu.tests.test_engine import CONFIGS, KERNELS
from stage13_gpu.tests.test_graphs import graphed
from stage13_gpu.tests.tools import TOLERANCE

# bits, group, with minima: rows of int8, GPTQ's and AWQ's groups, and what fits no tile
FORMATS = [(8, None, False), (4, 32, True), (4, 64, False), (4, 128, True), (8, 32, False)]
RAGGED = [(8, None, False), (4, 20, True), (6, 20, True), (4, 5, False), (8, 100, False)]


def layers(bits, group, minimum, activations, inputs, outputs, bias=True):
    """A slow layer of stage 10, and the kernels' over the same numbers."""
    format = Format(bits, group, minimum, torch.float16 if minimum else torch.float32)
    matrix = format.quantized("w", torch.randn(outputs, inputs, device=DEVICE))
    slow = QuantizedLinear(matrix, torch.randn(outputs, device=DEVICE) if bias else None)
    slow.activations = activations
    return slow, KernelLinear(GpuMatrix(matrix, matrix.codes.device), slow.bias, activations)


def numbers(layer):
    """All tensors of a layer."""
    matrix = layer.matrix.rows(torch.arange(layer.out_features))
    parts = matrix.codes, matrix.scale, matrix.minimum, layer.bias
    return [part for part in parts if part is not None]


def agree(slow, fast, x):
    """Rounded inputs give the same bits, where rounding the result does not hide them."""
    want, got = slow(x), fast(x)
    assert got.dtype == x.dtype and got.shape == want.shape
    if slow.activations == "int8" and x.dtype == torch.float32:
        assert torch.equal(got, want)
    weights = slow.matrix.dequantized()
    scale = (x.float().abs().flatten(0, -2) @ weights.abs().t()).amax().item()
    tolerance = TOLERANCE[x.dtype] * max(1, scale)
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize(("bits", "group", "minimum"), FORMATS)
def test_products_are_those_of_stage_10(bits, group, minimum, activations):
    torch.manual_seed(0)
    slow, fast = layers(bits, group, minimum, activations, 128, 40)
    agree(slow, fast, torch.randn(3, 128, device=DEVICE))  # decode
    agree(slow, fast, torch.randn(2, 10, 128, device=DEVICE).half())  # tiles of a prompt


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize(("bits", "group", "minimum"), RAGGED)
def test_sizes_that_fit_no_tile(bits, group, minimum, activations):
    torch.manual_seed(1)
    slow, fast = layers(bits, group, minimum, activations, 100, 33, bias=False)
    for dtype in TOLERANCE:
        agree(slow, fast, torch.randn(17, 101, device=DEVICE).to(dtype)[:, 1:])


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy multiplies infinity by 0
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_a_row_is_alone_with_its_numbers(activations):
    """Beside NaN, infinity, zeros and numbers whose scale would be 0."""
    torch.manual_seed(2)
    slow, fast = layers(4, 32, True, activations, 64, 20)
    x = torch.randn(6, 64, device=DEVICE)
    x[1, 5], x[2, 40], x[3], x[4] = torch.nan, torch.inf, 0, 2.0**-130
    got = fast(x)
    assert torch.equal(got[[0, 5]], torch.cat((fast(x[:1]), fast(x[5:]))))
    assert got[[0, 3, 4, 5]].isfinite().all() and not got[1:3].isfinite().any()
    if activations == "int8":
        assert torch.equal(got[[0, 3, 4, 5]], slow(x[[0, 3, 4, 5]]))


def test_halves_are_rounded_to_even():
    slow, fast = layers(8, None, False, "int8", 8, 8)
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    assert torch.equal(fast(x), slow(x))


@pytest.mark.parametrize(("bits", "group", "minimum"), [*FORMATS[:3], *RAGGED[1:4]])
def test_a_packed_matrix_gives_back_what_it_holds(bits, group, minimum):
    torch.manual_seed(3)
    slow, fast = layers(bits, group, minimum, "float", 640, 8)
    assert all(map(torch.equal, numbers(fast), numbers(slow)))
    if bits == 4 and group % 2 == 0:
        assert fast.matrix.stored.nbytes == 8 * 640 / 2
    if minimum:  # scales that fit into float16 are stored so
        assert fast.matrix.sides.nbytes == 2 * 2 * 8 * 640 // group
    parts = [layer.shard(torch.tensor([5, 0, 2]), None) for layer in (fast, slow)]
    assert all(map(torch.equal, *map(numbers, parts)))
    assert isinstance(fast, Linear)


def quantized(name: str, weights: Any, activations: str = "int8") -> Any:
    checkpoint = random_checkpoint(CONFIGS[name], spread=24)
    checkpoint.conversion = Quantize(weights, activations)
    return load_model(checkpoint, dtype=torch.float32, device=DEVICE)


SMALL = Format(4, group=8, minimum=True, dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "weights", "activations"), [("gpt2", SMALL, "float"), ("grouped", "int8", "int8")]
)
def test_tokens_are_those_of_the_slow_layers(name, weights, activations, monkeypatch):
    """With decode steps replayed as graphs, as far as the stand-in for CUDA's goes."""
    monkeypatch.setattr("stage13_gpu.layers.OUTPUTS", (256, 256))  # fewer programs to interpret
    model = quantized(name, weights, activations)
    engine = make(model, pool=BlockPool(60, 4), max_sequences=7, token_budget=7, **KERNELS)
    graphs = graphed(engine) if DEVICE == "cpu" else None
    kinds = {type(layer) for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    (table,) = (layer for layer in model.modules() if isinstance(layer, QuantizedEmbedding))
    assert kinds == {KernelLinear} and table.matrix is model.lm_head.matrix
    slow = Naive(quantized(name, weights, activations))
    proof = parity.prove(engine, slow, SamplingParams, ["own limits"])
    assert proof.tokens > 20 and proof.near_ties < 2, proof
    assert graphs is None or graphs.kept
