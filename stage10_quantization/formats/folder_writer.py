"""Writes folders with safetensors, quantized matrices under the names of compressed-tensors.

Codes of 4 bits are `pack-quantized`: eight in an int32, scales by row and group and, with a
minimum, whole zero points: minimum = -scale * zero. Codes of 8 bits are `int-quantized`: int8 with
scales; beside matrices of 4 bits they are packed too, because a folder has one format.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.checkpoint import WEIGHTS
from shared.errors import UserError

from ..layers import QuantizedMatrix
from .files import whole
from .folder import OPTION

KINDS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
Scheme = tuple[int, int, bool]  # bits, columns of a group or 0 for a whole row, symmetric


def write_folder(
    folder: str | Path,
    fields: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor | QuantizedMatrix]],
    copies: Sequence[Path] = (),
    packed: bool = True,
) -> None:
    """Write a checkpoint folder, whole or not at all. fields: of config.json, without a
    quantization. tensors: all of config.shapes, as `FolderModel.read` returns them; one is in
    memory at a time. copies: files to put beside them, the tokenizer's. packed: False if all codes
    have 8 bits. Raises UserError for a minimum that is no multiple of its scale, and if the folder
    has files."""
    folder = Path(folder)
    prefix = "" if fields.get("model_type", "gpt2") == "gpt2" else "model."
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    layers: dict[Scheme, list[str]] = {}
    with whole(folder) as part, part.with_name("data").open("w+b") as data:
        part.mkdir()
        for name, tensor in tensors:
            name = name if name.startswith("lm_head.") else prefix + name
            stored = {name: tensor} if isinstance(tensor, Tensor) else parts(name, tensor, packed)
            if isinstance(tensor, QuantizedMatrix):
                group = tensor.group if tensor.scale.shape[1] > 1 else 0
                scheme = (tensor.bits, group, tensor.minimum is None)
                layers.setdefault(scheme, []).append(name.removesuffix(".weight"))
            for key, values in stored.items():
                first = data.tell()
                data.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
                places = [first, data.tell()]
                kind, shape = KINDS[values.dtype], list(values.shape)
                header[key] = {"dtype": kind, "shape": shape, "data_offsets": places}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (part / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            data.seek(0)
            shutil.copyfileobj(data, file)
        for path in copies:
            shutil.copy(path, part)
        config = dict(fields) | ({OPTION: quantization(layers, packed)} if layers else {})
        (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def parts(name: str, matrix: QuantizedMatrix, packed: bool) -> dict[str, Tensor]:
    """The tensors of a matrix (N, K), by name."""
    bits, layer = matrix.bits, name.removesuffix("weight")
    if bits not in (4, 8) or bits < 8 and (not packed or matrix.codes.shape[1] % 8):
        raise UserError(
            f"{name} has {matrix.codes.shape[1]} columns of {bits} bits: a folder holds 8 bits, or "
            "4 in columns that are a multiple of 8; choose int8."
        )
    stored = {f"{layer}weight_scale": smallest(matrix.scale)}
    codes = matrix.codes.view(torch.uint8)
    if matrix.minimum is not None:
        zeros = torch.where(matrix.scale == 0, 0, -matrix.minimum / matrix.scale).round()
        exact = torch.equal(-(matrix.scale * zeros), matrix.minimum + 0)
        if not exact or zeros.min() < 0 or zeros.max() >= 2**bits:
            raise UserError(
                f"{name} has minima that are no whole multiples of its scales, which a folder "
                "cannot hold: write a .gguf file, or quantize with zero points."
            )
        downwards = zeros.to(torch.uint8).t().contiguous()  # (G, N)
        stored[f"{layer}weight_zero_point"] = words(downwards, bits).t()
    else:
        codes = codes + 2 ** (bits - 1)  # wraps around
    if packed:
        stored[f"{layer}weight_packed"] = words(codes, bits)
        stored[f"{layer}weight_shape"] = torch.tensor(matrix.codes.shape)
    else:
        stored[f"{layer}weight"] = matrix.codes
    return stored


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes (R, C) uint8 -> int32 (R, C bits / 32, rounded up), the first in the lowest bits."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    octets = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(codes), -1)


def smallest(scale: Tensor) -> Tensor:
    """In float16 or bfloat16 if that is exact."""
    narrow = (scale.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((values for values in narrow if torch.equal(values.float(), scale)), scale)


def quantization(layers: Mapping[Scheme, Sequence[str]], packed: bool) -> dict[str, Any]:
    """The quantization_config: layers by scheme."""
    form = "pack-quantized" if packed else "int-quantized"
    groups = {}
    for number, ((bits, group, symmetric), names) in enumerate(layers.items()):
        weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        size = {"strategy": "group", "group_size": group}
        weights |= size if group else {"strategy": "channel"}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}
        inputs |= size if group else {"strategy": "token"}
        groups[f"group_{number}"] = {
            "targets": list(names),
            "weights": weights | {"dynamic": False},
            "input_activations": None if packed else inputs,
            "output_activations": None,
            "format": form,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": groups,
        "ignore": [],
        "kv_cache_scheme": None,
    }
