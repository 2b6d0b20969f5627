"""Matrices as GPTQ, AWQ, compressed-tensors and bitsandbytes store them.

The packers of this file write words as hexadecimal digits, after the layouts that the projects
publish; compressed-tensors is judged by its own package.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage10_quantization.formats.packed import METHODS, NF4, Unfit
from stage10_quantization.layers import QuantizedMatrix

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of nibbles 0 to 7


def word(codes, bits):
    """The int32 with these codes, the first in the lowest bits."""
    digits = bits // 4
    text = "".join(f"{int(code):0{digits}x}" for code in reversed(codes))
    return int(np.array(int(text, 16), np.uint32).view(np.int32))


def words(rows, bits):
    """Each row (R, C) packed along itself: (R, C b / 32)."""
    each = 32 // bits
    return torch.tensor(
        [
            [word(row[i : i + each], bits) for i in range(0, len(row), each)]
            for row in rows.tolist()
        ],
        dtype=torch.int32,
    )


def draw(seed, rows, columns, count, bits, zero=None):
    """Codes (N, K), scales (N, G), zeros (N, G)."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=random)
    scale = (torch.randn(rows, count, generator=random) / 100).half()
    zeros = torch.randint(0, 2**bits, (rows, count), generator=random)
    return codes, scale, zeros if zero is None else torch.full_like(zeros, zero)


def expected(codes, scale, zeros, index=None):
    index = (
        torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
        if index is None
        else index
    )
    return ((codes - zeros[:, index]) * scale.double()[:, index]).float()


def values(matrix):
    return matrix.dequantized() if isinstance(matrix, QuantizedMatrix) else matrix


def unpack(method, parts, shape, **options):
    return METHODS[method][0](parts, shape, options)


def gptq_parts(codes, scale, zeros, bits=4, less=1, index=None):
    stored = (zeros - less) % 2**bits
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(stored.t(), bits),
        "scales": scale.t().contiguous(),
    }
    return parts if index is None else parts | {"g_idx": index.int()}


def awq_parts(codes, scale, zeros):
    def packed(lines):  # (R, C) -> (R, C / 8)
        shuffled = lines.unflatten(1, (-1, 8))[:, :, AWQ_COLUMNS].flatten(1)
        return words(shuffled, 4)

    return {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scale.t()}


shapes = st.tuples(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from([4, 8]), st.sampled_from([0, 1]), st.booleans(), st.booleans())
def test_gptq_in_both_versions(drawn, bits, less, symmetric, ordered):
    seed, height, count, wide = drawn
    rows, columns, middle = 8 * height, 8 * wide * count, 2 ** (bits - 1)
    codes, scale, zeros = draw(seed, rows, columns, count, bits, middle if symmetric else None)
    index = torch.arange(columns) // (8 * wide)
    if not ordered:
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    # Symmetric files lie about their version; the zeros count.
    version = "gptq_v2" if bool(less) == symmetric else "gptq"
    ours = unpack(
        "gptq",
        gptq_parts(codes, scale, zeros, bits, less, None if ordered and seed % 2 else index),
        (rows, columns),
        bits=bits,
        group_size=8 * wide,
        checkpoint_format=version,
        sym=symmetric,
    )
    stored = zeros - less
    if not symmetric and (stored == stored[0, 0]).all() and stored[0, 0] in (middle - 1, middle):
        return  # a single zero, which looks symmetric
    assert torch.equal(values(ours), expected(codes, scale, zeros, index))
    neighbours = bool((index.diff() >= 0).all())
    assert isinstance(ours, QuantizedMatrix) == (neighbours and (bits == 4 or symmetric))


def test_gptq_adds_one_within_a_field():
    """A zero of 0 is stored as 15; one more must not reach the field beside it."""
    codes, scale, zeros = draw(0, 16, 8, 1, 4)
    zeros[::3] = 0
    ours = unpack("gptq", gptq_parts(codes, scale, zeros), (16, 8), bits=4, group_size=8)
    assert torch.equal(values(ours), expected(codes, scale, zeros))


@settings(max_examples=30, deadline=None)
@given(shapes, st.sampled_from([None, 8]))
def test_awq(drawn, zero):
    seed, height, count, wide = drawn
    rows, columns = 8 * height, 4 * wide * count
    codes, scale, zeros = draw(seed, rows, columns, count, 4, zero)
    parts = awq_parts(codes, scale, zeros)
    ours = unpack("awq", parts, (rows, columns), bits=4, group_size=4 * wide, version="GEMM")
    assert isinstance(ours, QuantizedMatrix) and (ours.minimum is None) == bool((zeros == 8).all())
    assert torch.equal(values(ours), expected(codes, scale, zeros))


def scheme(bits, symmetric, strategy, group=None):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def config_groups(bits):
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows, columns, count", [(16, 64, 2), (9, 32, 1), (12, 96, 3)])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_as_compressed_tensors_packs(bits, rows, columns, count, symmetric):
    """Its own compressor packs, and its own decompressor dequantizes."""
    pytest.importorskip("compressed_tensors", reason="requirements-formats.txt is not installed")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    plan = scheme(bits, symmetric, "group", columns // count)
    codes, scale, zeros = draw(0, rows, columns, count, bits)
    middle = 2 ** (bits - 1)
    scale, zeros = scale.float().abs(), torch.zeros_like(zeros) if symmetric else zeros - middle
    state = {"weight": expected(codes - middle, scale, zeros), "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zeros.to(torch.int8)
    packed = PackedQuantizationCompressor.compress(state, plan)
    ours = unpack("compressed-tensors", packed, (rows, columns), config_groups=config_groups(bits))
    theirs = PackedQuantizationCompressor.decompress(packed, plan)["weight"]
    assert isinstance(ours, QuantizedMatrix) == (symmetric or bits == 4)
    torch.testing.assert_close(values(ours), theirs, rtol=1e-6, atol=1e-7)
    if symmetric:
        assert torch.equal(values(ours), theirs)
        assert torch.equal(ours.codes, (codes - middle).to(torch.int8))


@pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_whole_bytes_as_compressed_tensors_has_them(strategy, symmetric):
    pytest.importorskip("compressed_tensors", reason="requirements-formats.txt is not installed")
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor

    codes, scale, zeros = draw(1, 6, 32, 4 if strategy == "group" else 1, 8)
    parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale.float()}
    if not symmetric:
        parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
    if strategy == "tensor":
        parts |= {kind: parts[kind][0] for kind in parts if kind != "weight"}
    ours = unpack("compressed-tensors", parts, (6, 32), config_groups=config_groups(8))
    plan = scheme(8, symmetric, strategy, 8 if strategy == "group" else None)
    theirs = IntQuantizationCompressor.decompress(parts, plan)["weight"]
    assert isinstance(ours, QuantizedMatrix) == symmetric
    assert torch.equal(values(ours), theirs)


NORMAL = torch.linspace(-1, 1, 16) ** 3  # any table: the file brings its own


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_of_bitsandbytes(nested):
    rows, columns, size, outer = 8, 96, 64, 4
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    flat, blocks = codes.flatten().tolist(), rows * columns // size
    parts = {
        "weight": torch.tensor(list(bytes.fromhex("".join(f"{c:x}" for c in flat))))[:, None],
        "quant_map": NORMAL,
        "absmax": torch.rand(blocks, generator=random),
    }
    parts["weight"] = parts["weight"].to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [rows, columns]}
    largest = parts["absmax"].tolist()
    if nested:
        table, factors = torch.rand(256, generator=random), torch.rand(3, generator=random)
        places = torch.randint(0, 256, (blocks,), generator=random)
        parts |= {"absmax": places.to(torch.uint8), "nested_quant_map": table}
        parts["nested_absmax"] = factors
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.25}
        largest = [float(table[p] * factors[i // outer] + 0.25) for i, p in enumerate(places)]
    parts[NF4] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    ours = unpack("bitsandbytes", parts, (rows, columns))
    theirs = [float(NORMAL[c]) * largest[i // size] for i, c in enumerate(flat)]
    assert torch.equal(ours, torch.tensor(theirs).view(rows, columns))


def test_int8_of_bitsandbytes():
    codes = torch.arange(-128, 128).view(4, 64).to(torch.int8)
    largest = torch.tensor([0.5, 1.0, 2.0, 0.0])
    zero = torch.zeros((), dtype=torch.uint8)
    parts = {"weight": codes, "SCB": largest, "weight_format": zero}
    ours = unpack("bitsandbytes", parts, (4, 64))
    assert isinstance(ours, QuantizedMatrix)
    assert torch.equal(ours.dequantized(), codes * (largest[:, None] / 127))
    with pytest.raises(Unfit, match="weight_format"):
        unpack("bitsandbytes", parts | {"weight_format": zero + 1}, (4, 64))


# ---- what does not fit ----


def gptq_case(**changes):
    options = {"bits": 4, "group_size": 8, "sym": True}
    codes, scale, zeros = draw(3, 8, 16, 2, 4, 8)
    parts = gptq_parts(codes, scale, zeros, index=torch.arange(16) // 8)
    for name, change in changes.items():
        (options if name in options else parts)[name] = change
    return {name: part for name, part in parts.items() if part is not None}, options


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"scales": None}, "scales is missing"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"scales": torch.full((2, 8), torch.nan)}, "not finite"),
        ({"scales": torch.ones(2, 8, dtype=torch.int32)}, "scales is int32"),
        ({"group_size": 6}, "16 columns are no groups of 6"),
        ({"group_size": 4}, "qzeros has the shape"),
        ({"group_size": True}, "no groups of True"),
        ({"bits": 3}, "codes of 3 bits"),
        ({"bits": "4"}, "codes of '4' bits"),
        ({"qweight": torch.ones(2, 8)}, "qweight is float32"),
        ({"qweight": torch.ones(2, 4, dtype=torch.int32)}, "qweight has the shape"),
        ({"qzeros": torch.zeros(2, 1, dtype=torch.int32)}, "neither packing version"),
        ({"g_idx": torch.full((16,), 2)}, "g_idx has groups"),
        ({"g_idx": torch.full((16,), -1)}, "g_idx has groups"),
    ],
)
def test_gptq_that_does_not_fit(changes, reason):
    parts, options = gptq_case(**changes)
    with pytest.raises(Unfit, match=reason):
        unpack("gptq", parts, (8, 16), **options)


def test_other_versions_are_refused():
    with pytest.raises(Unfit, match="its packing version is 'gemv'"):
        unpack("awq", {}, (8, 8), bits=4, group_size=8, version="gemv")
    state = torch.tensor(list(b"{}"), dtype=torch.uint8)
    with pytest.raises(Unfit, match="bitsandbytes__fp4, not nf4"):
        unpack("bitsandbytes", {"quant_state.bitsandbytes__fp4": state}, (8, 8))
    for text in (b"{", b"[]", b"\xff"):
        parts = {NF4: torch.tensor(list(text), dtype=torch.uint8)}
        with pytest.raises(Unfit, match="not JSON"):
            unpack("bitsandbytes", parts, (8, 8))
    parts = {"weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(8, 1)}
    with pytest.raises(Unfit, match="weight is float8_e4m3fn"):
        unpack("compressed-tensors", parts, (8, 8))
