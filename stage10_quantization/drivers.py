"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import torch

from shared.course.difference import difference
from shared.course.driver import now, tensors

from . import gptq, layers, numpy_quant
from .convert import INT4, INT8, Format
from .formats import blocks

ODD = (0.0, -0.0, 1e-40, 65504.0, 1e30, -3.4e38, float("nan"), float("inf"))


def bits(numbers: Any) -> list[Any]:
    """Numbers that must be the same to the last bit: whole numbers that are next to each other if
    the float32 are. There is one zero, and one NaN."""
    floats = np.asarray(numbers, np.float32) + np.float32(0)
    whole = floats.view(np.int32).astype(np.int64)
    whole = np.where(whole < 0, -(2**31) - whole, whole)
    return np.where(np.isnan(floats), 2**40, whole).tolist()


def rounded(draw: Random) -> Any:
    """Groups with weights of many sizes, some of them with numbers that are not usual."""
    seen: list[Any] = []
    for _ in range(16):
        group, count, dtype = draw.choice([16, 32]), draw.randint(1, 3), draw.choice(["f4", "f2"])
        w = tensors(draw, 3, count, group).numpy() * 10.0 ** draw.randint(-5, 3)
        w[0, 0] = draw.choice([0.0, 7.7, -7.7])
        w[1, -1] += draw.choice([0.0, 1.0, -2.0]) * np.abs(w[1, -1]).max()
        if draw.random() < 0.5:
            w[2, 0, draw.randrange(group)] = draw.choice(ODD)
        w = w.reshape(3, -1).astype(np.float32)
        for function, several in (("symmetric", (4, 6, 8)), ("asymmetric", (4, 5, 8))):
            width = draw.choice(several)
            call = f"{function} of {w.shape} to {width} bits by {group}, stored in {dtype}"
            with np.errstate(all="ignore"):
                codes, *scales = getattr(numpy_quant, function)(w, width, group, np.dtype(dtype))
                seen.append({"call": call, "kind": str(codes.dtype), "shape": list(codes.shape)})
                seen[-1] |= {"stored": dtype, "scales": [bits(part) for part in scales]}
                seen[-1]["codes"] = _without_ties(w.reshape(3, -1, group), codes, *scales)
    return seen


def _without_ties(w: Any, codes: Any, scale: Any, minimum: Any = None) -> list[Any]:
    """Codes, the lower one where float32 cannot tell which of two is nearer."""
    codes = codes.reshape(w.shape).astype(np.int64)
    exact = w.astype(np.float64) - (0 if minimum is None else minimum[:, :, None])
    exact = exact / np.where(scale > 0, scale, 1)[:, :, None]
    doubt = 1e-4 + 2.0**-22 * np.abs(w) / np.where(scale > 0, scale, 1)[:, :, None]
    tie = np.abs(exact - np.floor(exact) - 0.5) < doubt
    return np.where(tie & (codes == np.ceil(exact)), np.floor(exact), codes).tolist()


def nearly_rounded(expected: Any, result: Any) -> str:
    """Scales stored in float32 may be a last bit apart, as a division in float64 rounds, too."""
    for right, entry in zip(expected, result, strict=True):
        alike = np.shape(right["scales"]) == np.shape(entry["scales"])
        if right["stored"] == "f4" and alike:
            apart = np.abs(np.subtract(right["scales"], entry["scales"])).max()
            entry["scales"] = right["scales"] if apart <= 1 else entry["scales"]
    return difference(expected, result)


def packed(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(8):
        lowest, (rows, columns) = draw.choice([0, -8]), (draw.randint(1, 4), 2 * draw.randint(1, 9))
        codes = [[lowest + draw.randrange(16) for _ in range(columns)] for _ in range(rows)]
        packed_codes = numpy_quant.pack_nibbles(np.array(codes, np.int8))
        seen.append({"call": f"pack_nibbles of {codes}", "out": packed_codes})
        raw = np.array([[draw.randrange(256) for _ in range(columns)] for _ in range(rows)], "u1")
        for signed in (False, True):
            call = f"unpack_nibbles of {raw.tolist()}, signed={signed}"
            seen.append({"call": call, "out": numpy_quant.unpack_nibbles(raw, signed)})
    return seen


def products(draw: Random) -> Any:
    """Matrices with codes at both ends, and rows that are not usual."""
    seen: list[Any] = []
    for _ in range(16):
        width, minimum = draw.choice([(8, False), (4, False), (4, True), (6, True)])
        group, count = draw.choice([(32, 1), (32, 3), (16, 5), (77, 1), (6400, 1)])
        lowest, highest = (0, 2**width - 1) if minimum else (-(2 ** (width - 1)), 2 ** (width - 1))
        spread = highest - lowest + (1 if minimum else 0)
        outputs, columns = draw.randint(1, 5), group * count
        codes = [[lowest + draw.randrange(spread) for _ in range(columns)] for _ in range(outputs)]
        codes[0] = [draw.choice([lowest, lowest + spread - 1])] * columns
        kind = torch.float32
        matrix = layers.QuantizedMatrix(
            torch.tensor(codes, dtype=torch.int8),
            tensors(draw, outputs, count, dtype=kind).abs(),
            tensors(draw, outputs, count, dtype=kind) if minimum else None,
            width,
        )
        x = tensors(draw, draw.randint(1, 3), columns, dtype=kind) * draw.choice([1, 1e-3, 300])
        x[0, draw.randrange(columns)] = draw.choice([0, 0, 1e4, float("nan"), float("inf")])
        call = f"multiply of ({outputs}, {columns}) by {group}, {width} bits, minimum: {minimum}"
        now(call)
        y = layers.multiply(matrix, x)
        seen.append({"call": call, "kind": y.dtype, "bits": bits(y.numpy())})
    return seen


def calibrated(draw: Random) -> Any:
    """Inputs that depend on each other; some are always 0."""
    seen: list[Any] = []
    formats = {"INT4": INT4, "INT8": INT8, "4 by 64": Format(4, group=64)}
    formats["3 by 4"] = Format(3, group=4, minimum=True, dtype=torch.float16)
    for name, format in formats.items():
        for act_order in (False, True):
            inputs = draw.choice([64, 192]) if name != "3 by 4" else draw.choice([12, 144])
            mix = tensors(draw, inputs, inputs) * 0.3 + torch.eye(inputs)
            x = tensors(draw, 2 * inputs + 20, inputs) @ mix
            x = x * (0.2 + tensors(draw, inputs).abs())
            x[:, draw.sample(range(inputs), 2)] = 0
            weight, hessian = tensors(draw, 12, inputs, dtype=torch.float32), 2 * x.t() @ x
            call = f"gptq of (12, {inputs}), {name}, act_order={act_order}"
            now(call)
            matrix = gptq.gptq(weight, hessian.float(), format, act_order)
            scale = bits(matrix.scale.half())
            low = [None] * 12 if matrix.minimum is None else bits(matrix.minimum.half())
            rows = list(zip(matrix.codes.tolist(), scale, low, strict=True))
            seen.append({"call": call, "bits": matrix.bits, "rows": rows})
    return seen


def most_rows(expected: Any, result: Any) -> str:
    """A code at a tie may be rounded to either side, which changes all columns behind it: at least
    half of the rows of each matrix must be the same."""
    for right, entry in zip(expected, result, strict=True):
        same = [row == other for row, other in zip(right["rows"], entry["rows"], strict=True)]
        if 2 * sum(same) >= len(same):
            entry["rows"] = right["rows"]
    return difference(expected, result)


def read_blocks(draw: Random) -> Any:
    """Blocks of random bytes, with scales that are numbers."""
    seen: list[Any] = []
    for _ in range(6):
        count = draw.randint(1, 3)
        raw = np.frombuffer(draw.randbytes(144 * count), "u1").reshape(count, 144).copy()
        halves = [[draw.uniform(0.5, 4), draw.uniform(-4, 4)] for _ in range(count)]
        raw[:, :4] = np.array(halves, "<f2").view("u1")
        scales = f"d and dmin {halves}, S {raw[:, 4:16].tolist()}"
        seen.append({"call": f"_eight_scales of {scales}", "out": blocks._eight_scales(raw)})
        seen.append({"call": f"q4_k of {count} blocks, {scales}", "out": blocks.q4_k(raw)})
    return seen


DRIVERS = {1: rounded, 2: packed, 3: products, 4: calibrated, 5: read_blocks}
RULES = {1: nearly_rounded, 4: most_rows}
TWINS = {
    1: {"stage10_quantization/rounding.py": ("fit", "codes_of")},
    3: {"stage10_quantization/numpy_quant.py": ("multiply",)},
}
