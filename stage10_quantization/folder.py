"""Folders of Hugging Face whose config.json has a quantization_config: GPTQ, AWQ, and
compressed-tensors, the format that this stage also writes.

Each stores a matrix (N, K) in several tensors, `parts`, called by the end of their names: weights
are scale * (code - zero), with a scale and a zero for each of G groups of neighbouring columns.
`Unfit` is raised with the reason if the tensors do not fit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.checkpoint import DTYPES, WEIGHTS, read_tensors
from shared.config import read_config
from shared.errors import UserError
from shared.files import read_json

from . import OPTION
from .matrix import PROJECTIONS, QuantizedMatrix

Parts = Mapping[str, Tensor]
Options = Mapping[str, Any]  # quantization_config
KINDS = {"qweight", "qzeros", "scales", "g_idx"}  # of tensors: of GPTQ and AWQ, and the others
KINDS |= {f"weight{kind}" for kind in ("", "_packed", "_scale", "_shape", "_zero_point")}
FORMATS = ("pack-quantized", "int-quantized")  # of compressed-tensors
UNREAD = ("kv_cache_scheme", "sparsity_config", "transform_config")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # column n of eight is in this nibble


class Unfit(Exception):
    """Why tensors are no matrix."""


# ---- matrices -----------------------------------------------------------------------------------


def part(parts: Parts, kind: str, *shape: int) -> Tensor:
    """The tensor of this kind. Raises Unfit if it is missing or has another shape."""
    if kind not in parts:
        raise Unfit(f"{kind} is missing")
    if (found := tuple(parts[kind].shape)) != shape:
        raise Unfit(f"{kind} has the shape {found} instead of {shape}")
    return parts[kind]


def fields(words: Tensor, bits: int) -> Tensor:
    """Words (R, W) int32 -> (R, 32 W / bits) uint8, the lowest bits first."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def words(codes: Tensor, bits: int) -> Tensor:
    """The reverse: codes (R, C) uint8 -> int32 (R, C bits / 32, rounded up)."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    octets = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(codes), -1)


def matrix_of(codes: Tensor, scale: Tensor, zeros: Tensor, bits: int) -> QuantizedMatrix:
    """scale * (code - zero): codes (N, K) uint8 from 0 on, scale and zeros (N, G). Raises Unfit for
    codes of 8 bits that are not symmetric."""
    middle, scale = 2 ** (bits - 1), scale.float().contiguous()
    if (zeros == middle).all():  # codes have a sign
        return QuantizedMatrix((codes - middle).view(torch.int8), scale, None, bits)  # wraps
    if bits == 8:
        raise Unfit("codes of 8 bits with zeros of their own are not read")
    return QuantizedMatrix(codes.view(torch.int8), scale, -(scale * zeros.float()), bits)


def group_count(options: Options, columns: int) -> int:
    """The number of groups from the option `group_size`, -1 or null for one. Raises Unfit."""
    size: int = options.get("group_size") or -1
    count, rest = (1, 0) if size == -1 else divmod(columns, size)
    if rest:
        raise Unfit(f"its {columns} columns are no groups of {size}")
    return count


def gptq(parts: Parts, shape: tuple[int, int], options: Options, less: int) -> QuantizedMatrix:
    """qweight int32 (K b / 32, N) and qzeros (G, N b / 32), packed downwards and along a row,
    scales (G, N), g_idx (K,), the group of each column. less: what the file's version subtracts
    from each zero, modulo 2^b."""
    rows, columns = shape
    bits: int = options["bits"]
    count, per_word = group_count(options, columns), 32 // bits
    codes = part(parts, "qweight", columns // per_word, rows)
    zeros = part(parts, "qzeros", count, rows // per_word)
    zeros = fields(zeros, bits).t() + less & 2**bits - 1  # (N, G)
    neighbours = torch.arange(columns) // (columns // count)
    if not torch.equal(parts.get("g_idx", neighbours).long(), neighbours):
        raise Unfit("columns that are ordered by activations (desc_act) are not read")
    return matrix_of(fields(codes.t(), bits), part(parts, "scales", count, rows).t(), zeros, bits)


def gptq_version(zeros: Iterable[Tensor], options: Options) -> int:
    """What a GPTQ file subtracts from its zeros: 1 in the first version, 0 in the second. It does
    not follow from the file's name for it: symmetric files, whose zeros are all the middle, tell by
    them, others by `checkpoint_format`."""
    bits: int = options["bits"]
    kinds = {kind for tensor in zeros for kind in fields(tensor, bits).unique().tolist()}
    middle = 2 ** (bits - 1)
    if kinds in ({middle - 1}, {middle}):
        return middle - min(kinds)
    return int(options.get("checkpoint_format") != "gptq_v2")


def awq(parts: Parts, shape: tuple[int, int], options: Options) -> QuantizedMatrix:
    """qweight int32 (K, N / 8) and qzeros (G, N / 8), both packed along a row in AWQ_ORDER,
    scales (G, N)."""
    rows, columns = shape
    if str(options.get("version", "gemm")).lower() != "gemm" or options["bits"] != 4:
        raise Unfit("only 4 bits in the packing version 'gemm' are read")
    count = group_count(options, columns)

    def unpacked(kind: str, lines: int) -> Tensor:
        eights = fields(part(parts, kind, lines, rows // 8), 4).unflatten(1, (-1, 8))
        return eights[:, :, AWQ_ORDER].flatten(1).t().contiguous()  # (N, lines)

    scale = part(parts, "scales", count, rows).t()
    return matrix_of(unpacked("qweight", columns), scale, unpacked("qzeros", count), 4)


def compressed(parts: Parts, shape: tuple[int, int], options: Options) -> QuantizedMatrix:
    """weight_packed int32 (N, K b / 32), of codes + 2^(b-1), or weight int8 (N, K); weight_scale
    (N, G); beside weight_packed weight_zero_point, packed downwards."""
    rows, columns = shape
    count = parts["weight_scale"].shape[-1] if "weight_scale" in parts else 1
    scale = part(parts, "weight_scale", rows, count)
    if columns % count:
        raise Unfit(f"weight_scale has {count} groups for {columns} columns")
    if (packed := parts.get("weight_packed")) is None:
        if "weight_zero_point" in parts and parts["weight_zero_point"].any():
            raise Unfit("codes of 8 bits with zeros of their own are not read")
        return QuantizedMatrix(part(parts, "weight", *shape), scale.float().contiguous())
    bits = 32 * packed.shape[-1] // columns
    if bits not in (4, 8):
        raise Unfit(f"codes of {bits} bits are not read, only 4 or 8")
    codes = fields(part(parts, "weight_packed", rows, columns * bits // 32), bits)
    zeros = torch.full((rows, count), 2 ** (bits - 1), dtype=torch.uint8)
    if "weight_zero_point" in parts:
        points = part(parts, "weight_zero_point", -(-rows * bits // 32), count)
        zeros = fields(points.t(), bits).t()[:rows]
    return matrix_of(codes, scale, zeros, bits)


METHODS: dict[str, Callable[..., QuantizedMatrix]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
}


# ---- folders ------------------------------------------------------------------------------------


class FolderModel:
    """A model in a folder. config: as without a quantization. quantized: names of config.shapes
    whose tensors are matrices of whole numbers."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a method that is not read, and for tensors that are missing or
        unexpected."""
        self.folder = Path(folder)
        self.options: dict[str, Any] = read_json(self.folder / "config.json")[OPTION]
        self.method, form = (str(self.options.get(key)) for key in ("quant_method", "format"))
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            raise self.error(f"its quant_method is {self.method[:40]!r}, and only {known} are read")
        if self.method != "compressed-tensors":
            if (bits := self.options.get("bits")) not in (4, 8):
                raise self.error(f"codes of {bits} bits are not read, only 4 or 8")
        elif form not in FORMATS:
            known = " and ".join(FORMATS)
            raise self.error(f"its format is {form[:40]!r}, and only {known} are read")
        elif odd := [name for name in UNREAD if self.options.get(name)]:
            raise self.error(f"it has a {odd[0]}, which is not read")
        self.config = read_config(self.folder, ignored=(OPTION,))
        shapes = self.config.shapes()
        self._parts: dict[str, dict[str, Tensor]] = {name: {} for name in shapes}
        for stored, tensor in read_tensors(self.folder).items():
            name = self.config.tensor_name(stored)
            if name is None or name == "lm_head.weight" and self.config.tied:
                continue
            layer, _, kind = name.rpartition(".")
            owner = name if name in shapes else f"{layer}.weight"
            if owner not in shapes or owner != name and kind not in KINDS:
                raise self.error(f"the tensor {stored} is none of the model")
            self._parts[owner][kind] = tensor
        for name, parts in self._parts.items():
            if not parts:
                raise self.error(f"it has no tensor for {name}")
        self.quantized = {name for name, parts in self._parts.items() if not _plain(parts)}
        self.unpack = METHODS[self.method]
        if self.method == "gptq":
            zeros = [parts["qzeros"] for parts in self._parts.values() if "qzeros" in parts]
            self.unpack = partial(gptq, less=gptq_version(zeros, self.options))

    def error(self, reason: str) -> UserError:
        return UserError(
            f"{self.folder} cannot be opened as a quantized model: {reason}; download it again, or "
            "choose another model."
        )

    def read(self, name: str) -> QuantizedMatrix | Tensor:
        """A tensor of config.shapes by its name: floats in that shape, of the file's dtype; or a
        QuantizedMatrix (out, in), GPT-2's projections too. Raises UserError if the stored tensors
        do not fit."""
        shape, parts = self.config.shapes()[name], self._parts[name]
        if name not in self.quantized:
            return next(iter(parts.values()))
        transposed = name.endswith(PROJECTIONS)  # GPT-2 alone has these names
        try:
            return self.unpack(parts, shape[::-1] if transposed else shape, self.options)
        except Unfit as error:
            layer = name.removesuffix(".weight")
            raise self.error(f"the tensors of {layer} are no {self.method}: {error}") from None


def _plain(parts: Parts) -> bool:
    """Whether these are one tensor of floats."""
    return len(parts) == 1 and next(iter(parts.values())).dtype in DTYPES


# ---- writing ------------------------------------------------------------------------------------

Scheme = tuple[int, int, bool]  # bits, columns of a group or 0 for a whole row, symmetric


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
    `FolderModel.read` returns them. copies: files to put beside them, the tokenizer's. Raises
    UserError if the folder exists or cannot be written."""
    prefix = "" if config.get("model_type", "gpt2") == "gpt2" else "model."
    packed = any(isinstance(t, QuantizedMatrix) and t.bits == 4 for t in tensors.values())
    stored: dict[str, Tensor] = {}
    layers: dict[Scheme, list[str]] = {}
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


def quantization(layers: Mapping[Scheme, Sequence[str]], packed: bool) -> dict[str, Any]:
    """The quantization_config: layers by scheme. Only codes of 8 bits meet rounded activations."""
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
