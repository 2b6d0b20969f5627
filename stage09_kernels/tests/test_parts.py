"""Attention by an online softmax, and what Python prepares for the kernels."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
import torch.nn.functional as F

from stage09_kernels import library
from stage09_kernels.cache import NAIVE
from stage09_kernels.online import attend, merge
from stage09_kernels.program import pack
from stage09_kernels.tile import MR, NR, Memory, most_loads, product


@pytest.mark.parametrize(
    ("tokens", "block", "width"), [(1, 4, 8), (4, 4, 8), (5, 4, 8), (37, 5, 24), (64, 16, 64)]
)
def test_an_online_softmax_reads_its_blocks_and_nothing_else(tokens, block, width):
    torch.manual_seed(tokens)
    count = -(-tokens // block)
    keys, values = torch.full((2, count + 3, block, width), torch.nan)
    table = torch.randperm(count + 3)[:count].tolist()
    lines = torch.randn(2, tokens, width)
    for token in range(tokens):
        place = table[token // block], token % block
        keys[place], values[place] = lines[:, token]
    for scale in (1, 300):  # the second overflows without the maximum
        q = scale * torch.randn(width)
        query, all_keys, all_values = (x.double()[None] for x in (q[None], *lines))
        expected = F.scaled_dot_product_attention(query, all_keys, all_values)[0, 0]
        output = attend(q, keys, values, table, tokens).double()
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1, 300])  # all parts count, and one part alone
def test_parts_of_a_sequence_are_put_together(scale):
    scores = torch.arange(1000, 1009).double() + scale * torch.randn(9).double()
    values, parts = torch.randn(9, 8).double(), []
    for first, last in ((0, 0), (0, 0), (0, 4), (4, 4), (4, 5), (5, 9), (9, 9)):
        largest = scores[first:last].max() if last > first else torch.tensor(-torch.inf).double()
        weights = (scores[first:last] - largest).exp()
        parts.append((largest, weights.sum(), weights @ values[first:last]))
    expected = scores.softmax(0) @ values
    torch.testing.assert_close(merge(parts), expected)
    torch.testing.assert_close(merge(parts[::-1]), expected)
    torch.testing.assert_close(merge(parts[2:3]), scores[:4].softmax(0) @ values[:4])


SIZES = [(1, 1, 1), (MR, 7, NR), (MR + 1, 5, NR + 1), (2 * MR + 3, 3, 2 * NR + 5)]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_product_of_tiles_is_the_product(sizes):
    rows, inputs, outputs = sizes
    x, weights = torch.randn(rows, inputs).double(), torch.randn(inputs, outputs).double()
    result = product(Memory(x), Memory(weights))
    torch.testing.assert_close(result, x @ weights, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_tile_loads_each_number_once(sizes):
    rows, inputs, outputs = sizes
    x, weights = Memory(torch.randn(rows, inputs)), Memory(torch.randn(inputs, outputs))
    product(x, weights)
    loads, expected = (x.loads, weights.loads), most_loads(*sizes)
    assert loads == expected, f"{sizes}: {loads} of x and weights were loaded, not {expected}"


def test_weights_are_packed_by_panels():
    """64 outputs a panel, input by input; several layers side by side; zeros behind the last."""
    first, second = torch.randn(70, 5), torch.randn(3, 5)
    packed = pack([first, second], torch.float32)
    assert packed.shape == (2, 5, 64)
    rows = packed.transpose(1, 2).flatten(0, 1)  # (128, 5)
    assert torch.equal(rows[:73], torch.cat((first, second))) and not rows[73:].any()
    assert pack([first.bfloat16()], torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("level", sorted({library.levels()[0], "plain"}))
def test_a_vector_is_rounded_as_its_numbers_are(level):
    """Both zeros, ties, subnormal numbers, infinities and NaN, then numbers of any bits; after the
    last one nothing is written."""
    text = (NAIVE.parent / "fast" / "vec.h").read_text(encoding="utf-8")
    body = re.sub(r"/\*[\s\S]*?\*/|//.*", "", text.partition(" store_bf16(")[2].partition("\n}")[0])
    assert not re.search(r"\[|\b(for|while|do|goto)\b", body), "a loop, or a number by its index"
    special = [0, -(2**31), 0x8000, 0x18000, 0x7FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, -1]
    numbers = torch.cat((torch.tensor(special), torch.randint(-(2**31), 2**31, (9991,)))).int()
    sizes = ("REAL=4", "WEIGHT=4", "CACHE=4")
    kernels = library.load(NAIVE.parent / "tests" / "rounding.c", sizes, level)
    for count in (*range(70), 10_000):
        out = torch.full((2, count + 1), 7, dtype=torch.int16)
        for kernel, row in zip((kernels.by_vectors, kernels.one_by_one), out, strict=True):
            kernel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
            kernel(row.data_ptr(), numbers.data_ptr(), count)
        assert torch.equal(*out)
