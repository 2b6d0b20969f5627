"""Folders of Hugging Face whose config.json has a quantization_config: GPTQ and AWQ in 4 bits, and
compressed-tensors, the format that this stage also writes.

Each stores a matrix (N, K) in several tensors, `parts`, called by the end of their names: weights
are scale * (code - zero), with a scale and a zero for each of G groups of neighbouring columns.
`Unfit` is raised with the reason if the tensors do not fit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.checkpoint import WEIGHTS, Checkpoint, read_tensors
from shared.config import read_config
from shared.errors import UserError
from shared.files import read_json

from . import OPTION, Unfit
from .convert import opened
from .matrix import PROJECTIONS, QuantizedMatrix

Parts = dict[str, Tensor]  # a method takes those that it reads out
Options = Mapping[str, Any]  # quantization_config
FORMATS = ("pack-quantized", "int-quantized")  # of compressed-tensors
UNREAD = ("kv_cache_scheme", "sparsity_config", "transform_config")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # column n of eight is in this nibble


# ---- matrices -----------------------------------------------------------------------------------


def part(parts: Parts, kind: str, *shape: int) -> Tensor:
    """Take the tensor of this kind. Raises Unfit if it is missing or has another shape."""
    if kind not in parts:
        raise Unfit(f"{kind} is missing")
    tensor = parts.pop(kind)
    if tensor.shape != shape:
        raise Unfit(f"{kind} has the shape {tuple(tensor.shape)} instead of {shape}")
    return tensor


def fields(words: Tensor, bits: int = 4) -> Tensor:
    """Words (R, W) int32 -> (R, 32 W / bits) uint8, the lowest bits first."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """The reverse: codes (R, C) uint8 -> int32 (R, C bits / 32, rounded up)."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    octets = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(codes), -1)


def matrix_of(codes: Tensor, scale: Tensor, zeros: Tensor, bits: int = 4) -> QuantizedMatrix:
    """scale * (code - zero): codes (N, K) uint8 from 0 on, scale and zeros (N, G)."""
    middle, scale = 2 ** (bits - 1), scale.float().contiguous()
    if codes.shape[1] % scale.shape[1]:
        raise Unfit(f"its {codes.shape[1]} columns are no {scale.shape[1]} groups")
    if (zeros == middle).all():  # codes have a sign
        return QuantizedMatrix((codes - middle).view(torch.int8), scale, bits=bits)  # wraps
    if bits == 8:
        raise Unfit("codes of 8 bits with zeros of their own are not read")
    return QuantizedMatrix(codes.view(torch.int8), scale, -(scale * zeros.float()), bits=bits)


def group_count(parts: Parts, kind: str, axis: int) -> int:
    """The number of groups, from the scales; 1 if they are missing."""
    return parts[kind].shape[axis] if kind in parts else 1


def gptq(parts: Parts, shape: tuple[int, int], less: int) -> QuantizedMatrix:
    """qweight int32 (K / 8, N) and qzeros (G, N / 8), packed downwards and along a row, scales
    (G, N), g_idx (K,), the group of each column. less: what the file's version subtracts from each
    zero, modulo 16."""
    (rows, columns), count = shape, group_count(parts, "scales", 0)
    scale = part(parts, "scales", count, rows).t()
    codes = fields(part(parts, "qweight", columns // 8, rows).t())
    zeros = fields(part(parts, "qzeros", count, rows // 8)).t() + less & 15  # (N, G)
    neighbours = torch.arange(columns) // max(1, columns // count)
    if not torch.equal(parts.pop("g_idx", neighbours).long(), neighbours):
        raise Unfit("columns that are ordered by activations (desc_act) are not read")
    return matrix_of(codes, scale, zeros)


def gptq_version(zeros: Sequence[Tensor], options: Options) -> int:
    """What a GPTQ file subtracts from its zeros: 1 in the first version, 0 in the second. It does
    not follow from the file's name for it: symmetric files, whose zeros are all the middle, tell by
    them, others by `checkpoint_format`."""
    kinds = {kind for tensor in zeros for kind in fields(tensor).unique().tolist()}
    if kinds in ({7}, {8}):
        return 8 - min(kinds)
    return int(options.get("checkpoint_format") != "gptq_v2")


def awq(parts: Parts, shape: tuple[int, int]) -> QuantizedMatrix:
    """qweight int32 (K, N / 8) and qzeros (G, N / 8), both packed along a row in AWQ_ORDER,
    scales (G, N)."""
    (rows, columns), count = shape, group_count(parts, "scales", 0)
    scale = part(parts, "scales", count, rows).t()

    def unpacked(kind: str, lines: int) -> Tensor:
        eights = fields(part(parts, kind, lines, rows // 8)).unflatten(1, (-1, 8))
        return eights[:, :, AWQ_ORDER].flatten(1).t().contiguous()  # (N, lines)

    return matrix_of(unpacked("qweight", columns), scale, unpacked("qzeros", count))


def compressed(parts: Parts, shape: tuple[int, int]) -> QuantizedMatrix:
    """weight_packed int32 (N, K b / 32), of codes + 2^(b-1), or weight int8 (N, K); weight_scale
    (N, G); beside weight_packed weight_zero_point, packed downwards."""
    (rows, columns), count = shape, group_count(parts, "weight_scale", -1)
    scale = part(parts, "weight_scale", rows, count)
    parts.pop("weight_shape", None)
    if (packed := parts.get("weight_packed")) is None:
        points = parts.pop("weight_zero_point", torch.zeros(rows, count, dtype=torch.int8))
        codes, zeros = (x.view(torch.uint8) + 128 for x in (part(parts, "weight", *shape), points))
        return matrix_of(codes, scale, zeros, 8)
    bits = 32 * packed.shape[-1] // columns
    if bits not in (4, 8):
        raise Unfit(f"codes of {bits} bits are not read, only 4 or 8")
    codes = fields(part(parts, "weight_packed", rows, columns * bits // 32), bits)
    zeros = torch.full((rows, count), 2 ** (bits - 1), dtype=torch.uint8)
    if "weight_zero_point" in parts:
        points = part(parts, "weight_zero_point", -(-rows * bits // 32), count)
        zeros = fields(points.t(), bits).t()[:rows]
    return matrix_of(codes, scale, zeros, bits)


METHODS: Mapping[str, Any] = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed}


# ---- folders ------------------------------------------------------------------------------------


def open_folder(folder: Path) -> Checkpoint:
    """The quantized model in a folder, whose activations are rounded to int8 only if all groups of
    its quantization_config say so. Raises Unfit."""
    options: Options = read_json(folder / "config.json")[OPTION]
    method, form = (str(options.get(key)) for key in ("quant_method", "format"))
    if method not in METHODS:
        raise Unfit(f"its quant_method is {method[:40]!r}, and only {', '.join(METHODS)} are read")
    if method == "compressed-tensors":
        if form not in FORMATS:
            raise Unfit(f"its format is {form[:40]!r}, and only {' and '.join(FORMATS)} are read")
        if odd := [name for name in UNREAD if options.get(name)]:
            raise Unfit(f"it has a {odd[0]}, which is not read")
    elif (bits := options.get("bits")) != 4:
        raise Unfit(f"codes of {bits} bits are not read, only 4")
    elif method == "awq" and str(options.get("version", "gemm")).lower() != "gemm":
        raise Unfit("only the packing version 'gemm' is read")
    config = read_config(folder)
    shapes, values = config.shapes(), dict[str, Tensor | QuantizedMatrix]()
    layers: dict[str, Parts] = {}
    for stored, tensor in read_tensors(folder).items():
        name = config.tensor_name(stored)
        if name is None or name == "lm_head.weight" and config.tied:
            continue
        layer, _, kind = name.rpartition(".")
        if name in shapes and tensor.is_floating_point():
            values[name] = tensor
        elif len(shapes.get(f"{layer}.weight", ())) == 2:
            layers.setdefault(layer, {})[kind] = tensor
        else:
            raise Unfit(f"the tensor {stored} is none of the model")
    unpack = METHODS[method]
    if method == "gptq":
        zeros = [parts["qzeros"] for parts in layers.values() if "qzeros" in parts]
        unpack = partial(gptq, less=gptq_version(zeros, options))
    for layer, parts in layers.items():
        name = f"{layer}.weight"
        shape = shapes[name][::-1] if name.endswith(PROJECTIONS) else shapes[name]
        try:
            values[name] = unpack(parts, shape)
            if parts:
                raise Unfit(f"{min(parts)} is not read")
        except Unfit as error:
            raise Unfit(f"the tensors of {layer} are no {method}: {error}") from None
    schemes = options.get("config_groups", {}).values()
    rounded = [bool(scheme.get("input_activations")) for scheme in schemes]
    activations = "int8" if rounded and all(rounded) else "float"
    return opened(config, values, folder, activations)


# ---- writing ------------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor | QuantizedMatrix],
    copies: Sequence[Path] = (),
) -> None:
    """Write a new checkpoint folder with compressed-tensors' names: codes of 4 bits are
    `pack-quantized`, eight in an int32; those of 8 bits are `int-quantized`, or packed beside
    others, because a folder has one format.

    config: the fields of config.json, without a quantization. tensors: all of config.shapes, as
    `opened` takes them. copies: files to put beside them, the tokenizer's. Raises UserError if the
    folder exists or cannot be written."""
    prefix = "" if config.get("model_type", "gpt2") == "gpt2" else "model."
    packed = any(isinstance(t, QuantizedMatrix) and t.bits == 4 for t in tensors.values())
    stored: dict[str, Tensor] = {}
    layers: dict[tuple[int, int, bool], list[str]] = {}
    for name, tensor in tensors.items():
        name = name if name.startswith("lm_head.") else prefix + name
        if isinstance(tensor, Tensor):
            stored[name] = tensor.contiguous()
            continue
        stored |= parts_of(name, tensor, packed)
        group = tensor.group if tensor.scale.shape[1] > 1 else 0
        scheme = (tensor.bits, group, tensor.minimum is None)
        layers.setdefault(scheme, []).append(name.removesuffix(".weight"))
    described = json.dumps(dict(config) | {OPTION: quantization(layers, packed)}, indent=2)
    try:
        folder.mkdir(parents=True)
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        for path in copies:
            shutil.copy(path, folder)
        # At the end: a folder without it, which was not finished, is no model.
        (folder / "config.json").write_text(described, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder} cannot be written ({reason}): choose another place.") from None


def parts_of(name: str, matrix: QuantizedMatrix, packed: bool) -> dict[str, Tensor]:
    """The tensors of a matrix (N, K), by name. Its minima, if any, are multiples of its scales."""
    bits, layer, half = matrix.bits, name.removesuffix("weight"), matrix.scale.half()
    scale = half if torch.equal(half.float(), matrix.scale) else matrix.scale
    stored = {f"{layer}weight_scale": scale}
    if not packed:
        return stored | {name: matrix.codes}
    codes = matrix.codes.view(torch.uint8)
    if matrix.minimum is None:
        codes = codes + 2 ** (bits - 1)  # wraps around
    else:  # minimum = -scale * zero
        zeros = torch.where(matrix.scale == 0, 0, -matrix.minimum / matrix.scale).round()
        downwards = zeros.to(torch.uint8).t().contiguous()  # (G, N)
        stored[f"{layer}weight_zero_point"] = words(downwards, bits).t().contiguous()
    shape = torch.tensor(matrix.codes.shape)
    return stored | {f"{layer}weight_packed": words(codes, bits), f"{layer}weight_shape": shape}


def quantization(layers: Mapping[Any, Sequence[str]], packed: bool) -> dict[str, Any]:
    """The quantization_config: layers by bits, columns of a group or 0 for a whole row, and whether
    they are symmetric. Only codes of 8 bits meet rounded activations."""
    groups = {}
    for number, ((bits, group, symmetric), names) in enumerate(layers.items()):
        kind: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        size = {"strategy": "group", "group_size": group}
        inputs = kind | {"dynamic": True} | (size if group else {"strategy": "token"})
        groups[f"group_{number}"] = {
            "targets": list(names),
            "weights": kind | (size if group else {"strategy": "channel"}) | {"dynamic": False},
            "input_activations": None if packed else inputs,
            "format": FORMATS[not packed],
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": FORMATS[not packed],
        "config_groups": groups,
        "ignore": [],
    }
