"""The blocks of GGUF against the package `gguf`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stage10_quantization.formats.blocks import FORMATS
from stage10_quantization.layers import QuantizedMatrix

gguf = pytest.importorskip("gguf", reason="requirements-formats.txt is not installed")


def dequantized(name, block):
    """Our values of blocks (B, size), as a matrix (B, values)."""
    codes, scale, minimum = FORMATS[name].read(block)
    low = None if minimum is None else torch.from_numpy(minimum)
    matrix = QuantizedMatrix(torch.tensor(codes), torch.from_numpy(scale), low, FORMATS[name].bits)
    least = 0 if minimum is not None else -(2 ** (matrix.bits - 1))
    assert least <= int(matrix.codes.min())
    assert int(matrix.codes.max()) < least + 2**matrix.bits
    return matrix.dequantized().numpy()


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_random_bytes_are_those_of_gguf(name):
    """All bits of the scales too: NaN, infinity, subnormal numbers, minus zero."""
    block = np.random.default_rng(0).integers(0, 256, (4000, FORMATS[name].size), dtype=np.uint8)
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        ours, theirs = dequantized(name, block), gguf.dequantize(block, kind)
    assert np.isnan(theirs).any() and np.isfinite(theirs).mean() > 0.8
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)) or np.array_equal(
        ours, theirs, equal_nan=True
    )


@pytest.mark.parametrize("name", FORMATS)
def test_each_bit_of_a_block(name):
    """A block of scale 1, and the same with any bit flipped."""
    size = FORMATS[name].size
    block = np.random.default_rng(1).integers(1, 64, size, dtype=np.uint8)
    place = slice(208, 210) if name == "Q6_K" else slice(0, 2)
    block[place] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    flipped = block ^ np.packbits(np.eye(8 * size + 1, 8 * size, dtype=np.uint8), axis=1)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(flipped, gguf.GGMLQuantizationType[name])
        ours = dequantized(name, flipped)
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert len(np.unique(theirs, axis=0)) == len(flipped)  # each bit shows
