"""How GPTQ, AWQ, compressed-tensors and bitsandbytes store a matrix (N, K), in several tensors.

Each reader takes them by kind, the part of their names after the layer's, and returns the matrix:
whole if it is scale * (code - zero) with groups of neighbouring columns, else as float32. It raises
`Unfit` with the reason if the tensors do not fit. G is the number of groups.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layers import QuantizedMatrix

Parts = Mapping[str, Tensor]
Options = Mapping[str, Any]  # quantization_config
Matrix = QuantizedMatrix | Tensor
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # column n of eight is in this nibble
NF4 = "quant_state.bitsandbytes__nf4"


class Unfit(Exception):
    """Why tensors are no matrix."""


def part(parts: Parts, kind: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """The tensor of this kind. Raises Unfit if it is missing or has another shape or dtype, or
    numbers that are not finite."""
    tensor = parts.get(kind)
    if tensor is None:
        raise Unfit(f"{kind} is missing")
    if tuple(tensor.shape) != shape:
        raise Unfit(f"{kind} has the shape {tuple(tensor.shape)} instead of {shape}")
    if tensor.dtype not in (dtypes or (torch.float16, torch.bfloat16, torch.float32)):
        raise Unfit(f"{kind} is {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise Unfit(f"{kind} has a value that is not finite")
    return tensor if dtypes else tensor.float()


def fields(words: Tensor, bits: int) -> Tensor:
    """Words (R, W) int32 -> (R, 32 W / bits) uint8, the lowest bits first."""
    assert sys.byteorder == "little"
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def whole(codes: Tensor, scale: Tensor, zeros: Tensor, bits: int) -> Matrix:
    """scale * (code - zero): codes (N, K) from 0 on, scale (N, G) float32, zeros (N, G)."""
    middle, zero = 2 ** (bits - 1), zeros.float()
    if (zeros == middle).all():  # codes have a sign
        return QuantizedMatrix((codes - middle).view(torch.int8), scale, None, bits)  # wraps
    if bits < 8:
        return QuantizedMatrix(codes.view(torch.int8), scale, -(scale * zero), bits)
    grouped = codes.unflatten(1, (scale.shape[1], -1)).float() - zero[:, :, None]
    return (grouped * scale[:, :, None]).flatten(1)


def groups(options: Options, columns: int) -> int:
    """The number of groups from the options `group_size`, -1 or null for one. Raises Unfit."""
    size = options.get("group_size")
    size = columns if size in (-1, None) else size
    if type(size) is not int or size < 1 or columns % size:
        raise Unfit(f"its {columns} columns are no groups of {size!r}")
    return columns // size


def width(bits: object) -> int:
    """Bits of a code. Raises Unfit for those that are not read."""
    if bits not in (4, 8) or type(bits) is not int:
        raise Unfit(f"codes of {bits!r} bits are not read, only 4 or 8")
    return bits


def scattered(index: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor) -> Tensor | None:
    """The matrix as float32 if column k is of any group, index[k]; None if the groups are
    neighbours in order. Raises Unfit."""
    count, columns = scale.shape[1], codes.shape[1]
    if index.min() < 0 or index.max() >= count:
        raise Unfit(f"g_idx has groups that are not among the {count}")
    if torch.equal(index, torch.arange(columns, device=index.device) // (columns // count)):
        return None
    return (codes.float() - zeros.float()[:, index]) * scale[:, index]


def gptq(parts: Parts, shape: tuple[int, int], options: Options) -> Matrix:
    """qweight int32 (K b / 32, N) and qzeros (G, N b / 32), both packed downwards and along a row,
    scales (G, N), g_idx (K,): the group of each column, in any order.

    The first version stores each zero less one, modulo 2^b, the second as it is. Which one a file
    has does not follow from its name: files whose zeros are all the middle tell by them, and others
    by `checkpoint_format`.
    """
    rows, columns = shape
    bits = width(options.get("bits"))
    count, per_word = groups(options, columns), 32 // bits
    words = part(parts, "qweight", (columns // per_word, rows), torch.int32)
    stored = fields(
        part(parts, "qzeros", (count, rows // per_word), torch.int32), bits
    ).t()  # (N, G)
    scale = part(parts, "scales", (count, rows)).t().contiguous()
    codes = fields(words.t(), bits)  # (N, K)
    middle, kinds = 2 ** (bits - 1), stored.unique().tolist()
    if kinds not in ([middle - 1], [middle]) and options.get("sym") is True:
        raise Unfit(f"its zeros are {kinds[:3]}, but sym is true: neither packing version")
    older = kinds == [middle - 1] or options.get("checkpoint_format") != "gptq_v2"
    older = older and kinds != [middle]
    zeros = stored + older & 2**bits - 1
    if "g_idx" in parts:
        index = part(parts, "g_idx", (columns,), torch.int32, torch.int64).long()
        if (matrix := scattered(index, codes, scale, zeros)) is not None:
            return matrix
    return whole(codes, scale, zeros, bits)


def awq(parts: Parts, shape: tuple[int, int], options: Options) -> Matrix:
    """qweight int32 (K, N / 8) and qzeros (G, N / 8), both packed along a row in AWQ_ORDER,
    scales (G, N)."""
    rows, columns = shape
    if str(options.get("version", "gemm")).lower() != "gemm":
        raise Unfit(f"its packing version is {options['version']!r}, not 'gemm'")
    if width(options.get("bits")) != 4:
        raise Unfit("codes of 8 bits are not read, only 4")
    count = groups(options, columns)

    def unpacked(kind: str, lines: int) -> Tensor:
        eights = fields(part(parts, kind, (lines, rows // 8), torch.int32), 4).unflatten(1, (-1, 8))
        return eights[:, :, AWQ_ORDER].flatten(1).t().contiguous()  # (N, lines)

    scale = part(parts, "scales", (count, rows)).t().contiguous()
    return whole(unpacked("qweight", columns), scale, unpacked("qzeros", count), 4)


def compressed(parts: Parts, shape: tuple[int, int], options: Options) -> Matrix:
    """weight_packed int32 (N, K b / 32), of codes + 2^(b-1), or weight int8 (N, K); weight_scale
    (N, G), (N, 1) or (1,); weight_zero_point, packed downwards beside weight_packed, else int8
    (N, G); weight_g_idx (K,), if columns are in any order."""
    rows, columns = shape
    scale = parts.get("weight_scale", torch.empty(0))
    count = scale.shape[1] if scale.ndim == 2 else 1
    if count < 1 or columns % count:
        raise Unfit(f"weight_scale has {count} groups for {columns} columns")
    scale = part(parts, "weight_scale", (rows, count) if scale.ndim == 2 else (1,))
    scale = scale.expand(rows, count).contiguous()
    bits = 8
    if packed := "weight_packed" in parts:
        words = parts["weight_packed"]
        bits = 32 * words.shape[-1] // columns if words.ndim == 2 else 0
        if width(bits) not in bit_widths(options):
            raise Unfit(f"weight_packed holds codes of {bits} bits, which no config_groups names")
        part(parts, "weight_packed", (rows, columns * bits // 32), torch.int32)
        stated = part(parts, "weight_shape", (2,), torch.int64, torch.int32).tolist()
        if stated != [rows, columns]:
            raise Unfit(f"weight_shape is {stated} instead of {[rows, columns]}")
        codes = fields(words, bits)
    else:
        codes = part(parts, "weight", shape, torch.int8).view(torch.uint8) ^ 128
    zeros = torch.full((rows, count), 2 ** (bits - 1), dtype=torch.uint8)
    if "weight_zero_point" in parts and packed:
        words = part(parts, "weight_zero_point", (-(-rows * bits // 32), count), torch.int32)
        zeros = fields(words.t(), bits).t()[:rows]
    elif "weight_zero_point" in parts:
        stored = parts["weight_zero_point"]
        sizes: tuple[int, ...] = (rows, count) if stored.ndim == 2 else (1,)
        stored = part(parts, "weight_zero_point", sizes, torch.int8)
        zeros = stored.view(torch.uint8).expand(rows, count) ^ 128
    if "weight_g_idx" in parts:
        index = part(parts, "weight_g_idx", (columns,), torch.int32, torch.int64).long()
        if (matrix := scattered(index, codes, scale, zeros)) is not None:
            return matrix
    return whole(codes, scale, zeros, bits)


def bit_widths(options: Options) -> set[object]:
    """num_bits of all weights in config_groups."""
    schemes = options.get("config_groups")
    schemes = schemes.values() if isinstance(schemes, dict) else ()
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    return {entry.get("num_bits") for entry in weights if isinstance(entry, dict)}


def bitsandbytes(parts: Parts, shape: tuple[int, int], options: Options) -> Matrix:
    """int8: weight (N, K) and SCB (N,): weight * SCB / 127.

    nf4: weight uint8 (N K / 2, 1), row by row, the first of two values in the high nibble;
    quant_map (16,) has the value of a code, absmax the factor of 64 of them. Nested: absmax uint8
    is a place in nested_quant_map (256,), times nested_absmax for 256 of them, plus an offset.
    """
    rows, columns = shape
    if "SCB" in parts:
        if parts.get("weight_format", torch.zeros(1)).any():
            raise Unfit("its weight_format is not 0, rows")
        codes = part(parts, "weight", shape, torch.int8)
        return QuantizedMatrix(codes, part(parts, "SCB", (rows,))[:, None] / 127)
    if NF4 not in parts:
        kinds = sorted(kind for kind in parts if kind.startswith("quant_state."))
        raise Unfit(f"it is {kinds[0]}, not nf4" if kinds else "SCB and quant_state are missing")
    state = _state(parts[NF4])
    if state.get("shape") != [rows, columns]:
        raise Unfit(f"quant_state has the shape {state.get('shape')!r}, not {[rows, columns]}")
    size, outer, count = state.get("blocksize"), state.get("nested_blocksize", 1), rows * columns
    if type(size) is not int or type(outer) is not int or min(size, outer) < 1 or count % size:
        raise Unfit(f"quant_state has blocks of {size!r} and {outer!r}")
    octets = part(parts, "weight", (count // 2, 1), torch.uint8).flatten()
    blocks = count // size
    if "nested_absmax" in parts:
        places = part(parts, "absmax", (blocks,), torch.uint8).int()
        absmax = part(parts, "nested_quant_map", (256,))[places]
        factors = part(parts, "nested_absmax", (-(-blocks // outer),))
        absmax *= factors.repeat_interleave(outer)[:blocks]
        absmax += float(state.get("nested_offset", 0))
    else:
        absmax = part(parts, "absmax", (blocks,))
    codes = torch.stack([octets >> 4, octets & 15], -1).view(blocks, size).int()
    return (part(parts, "quant_map", (16,))[codes] * absmax[:, None]).view(rows, columns)


def _state(octets: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(octets.tolist()))
    except (ValueError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise Unfit("quant_state is not JSON")
    return state


Unpack = Callable[[Parts, tuple[int, int], Options], Matrix]
PARTS = "absmax nested_absmax nested_quant_map quant_map SCB weight weight_format"
METHODS: dict[str, tuple[Unpack, set[str]]] = {  # with the kinds of tensors that it knows
    "gptq": (gptq, {"qweight", "qzeros", "scales", "g_idx"}),
    "awq": (awq, {"qweight", "qzeros", "scales"}),
    "compressed-tensors": (
        compressed,
        {f"weight{kind}" for kind in ("", "_packed", "_scale", "_shape", "_zero_point", "_g_idx")},
    ),
    "bitsandbytes": (bitsandbytes, {*PARTS.split(), NF4}),
}
