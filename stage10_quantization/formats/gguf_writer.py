"""Writes models as GGUF files that llama.cpp opens; layout and names as in gguf.py, gguf_model.py.

Matrices of 8 bits become Q8_0, of 4 bits Q4_0 or, with a minimum, Q4_1: blocks of 32 values with
float16 scales. A scale that serves more values is repeated. Floats stay as they are, but llama.cpp
wants vectors, and GPT-2's positions, in float32.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.config import Config
from shared.errors import UserError
from stage08_llama.config import LlamaConfig, to_fields
from stage08_llama.rope import Rope, frequencies

from ..layers import QuantizedMatrix
from . import gguf_model as names
from .blocks import WRITERS
from .files import whole
from .gguf import ARRAY, FLOATS, NUMBERS, TEXT, VALUES

ALIGNMENT, BLOCK = 32, 32
CODES = {code: number for number, code in VALUES.items()}
KINDS = {dtype: name for name, dtype in FLOATS.items()}
Tensors = Iterable[tuple[str, Tensor | QuantizedMatrix]]


def write_gguf(
    path: str | Path, config: Config, tensors: Tensors, tokenizer: Mapping[str, Any] | None = None
) -> None:
    """Write a model, whole or not at all. tensors: all of config.shapes, as `GGUFModel.read`
    returns them; one is in memory at a time. tokenizer: metadata, from `tokenizer_metadata` or from
    another file. Raises UserError for a model that the format cannot hold."""
    path = Path(path)
    architecture, metadata = describe(config)
    ends = zip(("eos", "eot"), config.eos_ids, strict=False)
    metadata |= {f"tokenizer.ggml.{kind}_token_id": token for kind, token in ends}
    metadata |= tokenizer or {"tokenizer.ggml.model": "none"}
    infos = b""
    count, missing = 0, set(config.shapes())
    with whole(path) as part, part.with_name("data").open("w+b") as data:
        for name, tensor in with_divisors(config, tensors):
            tensor = in_file_order(name, tensor, config, architecture)
            kind, octets = encode(name, tensor)
            shape = (tensor if isinstance(tensor, Tensor) else tensor.codes).shape
            infos += _text(file_name(name)) + struct.pack("<I", len(shape))
            infos += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], NUMBERS[kind], data.tell())
            data.write(octets)
            data.write(bytes(-data.tell() % ALIGNMENT))
            count, missing = count + 1, missing - {name}
        if missing:
            raise UserError(f"{path} cannot be written: there is no tensor {min(missing)}.")
        with part.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, count, len(metadata)))
            for key, value in metadata.items():
                file.write(_text(key) + _value(value))
            file.write(infos)
            file.write(bytes(-file.tell() % ALIGNMENT))
            data.seek(0)
            shutil.copyfileobj(data, file)


# ---- the model ----


def describe(config: Config) -> tuple[str, dict[str, Any]]:
    """The architecture, and the metadata of a config. Raises UserError for one that GGUF cannot
    describe here."""
    fields: dict[str, Any]
    extra: dict[str, Any] = {}
    if not isinstance(config, LlamaConfig):
        fields = {option: getattr(config, option, None) for option in names.GPT2_SIZES.values()}
        fields["n_inner"] = 4 * config.n_embd
        architecture, sizes = "gpt2", names.GPT2_SIZES
    else:
        if config.mlp_bias or config.rope.kind not in ("default", "llama3"):
            raise UserError(
                f"The model {config.name} has biases in its MLP or stretched "
                "positions, which are not written as GGUF: choose another model, or a folder."
            )
        fields, sizes = to_fields(config), names.SIZES
        fields["rope_theta"] = config.rope.theta
        architecture = fields["model_type"]
        extra = {f"{architecture}.{key}": config.head_dim for key in names.REPEATED}
        extra[f"{architecture}.vocab_size"] = config.vocab_size
    metadata = {"general.architecture": architecture, "general.name": config.name or architecture}
    metadata |= {
        f"{architecture}.{key}": fields[option] for key, option in sizes.items() if option in fields
    }
    return architecture, metadata | extra


def file_name(name: str) -> str:
    """The name in a GGUF file of one of our tensors."""
    match = re.fullmatch(r"(?:(?:h|layers)\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if name == names.ROPE or not match:
        return name
    tables = (names.LLAMA_NAMES, names.GPT2_NAMES)
    parts = {ours: theirs for table in tables for theirs, ours in table.items()}
    return f"blk.{match[1]}." * bool(match[1]) + f"{parts[match[2]]}.{match[3]}"


def with_divisors(config: Config, tensors: Tensors) -> Tensors:
    """The tensors, and for Llama 3 the divisors of its positions."""
    yield from tensors
    if isinstance(config, LlamaConfig) and config.rope.kind == "llama3":
        plain = frequencies(Rope(config.rope.theta), config.head_dim)
        yield names.ROPE, plain / frequencies(config.rope, config.head_dim)


def in_file_order(
    name: str, tensor: Tensor | QuantizedMatrix, config: Config, architecture: str
) -> Tensor | QuantizedMatrix:
    """With the rows, and the direction, that the architecture has."""
    if isinstance(tensor, Tensor) and architecture == "gpt2" and name.endswith(names.PROJECTIONS):
        return tensor.t()
    if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
        heads = config.n_head if ".q_proj." in name else config.n_kv_head
        order = names.in_halves(heads, config.head_dim).argsort()
        return tensor[order] if isinstance(tensor, Tensor) else tensor.rows(order)
    return tensor


# ---- bytes ----


def encode(name: str, tensor: Tensor | QuantizedMatrix) -> tuple[str, memoryview]:
    """The type of a tensor, and its bytes. Raises UserError for one that no block holds."""
    if isinstance(tensor, Tensor):
        if tensor.ndim == 1 or name == "wpe.weight" or tensor.dtype not in KINDS:
            tensor = tensor.float()
        return KINDS[tensor.dtype], tensor.contiguous().flatten().view(torch.uint8).numpy().data
    kind, write = WRITERS.get((tensor.bits, tensor.minimum is not None), ("", None))
    if write is None or tensor.group % BLOCK:
        extra = "" if tensor.minimum is None else " and a minimum"
        raise UserError(
            f"{name} has codes of {tensor.bits} bits in groups of {tensor.group}{extra}, which no "
            f"type of GGUF here holds: choose int8 or int4 in groups of {BLOCK}."
        )

    def halves(values: Tensor) -> np.ndarray:  # (N, G) -> (B, 2) bytes
        repeated = values.repeat_interleave(tensor.group // BLOCK, 1).half().view(-1, 1)
        if not repeated.isfinite().all():
            raise UserError(f"{name} has a scale that float16 cannot hold: choose another format.")
        return repeated.view(torch.uint8).numpy()

    scale = halves(tensor.scale)
    minimum = scale if tensor.minimum is None else halves(tensor.minimum)
    codes = tensor.codes.contiguous().view(torch.uint8).view(-1, BLOCK).numpy()
    return kind, np.ascontiguousarray(write(codes, scale, minimum)).data


def _text(text: str) -> bytes:
    octets = text.encode()
    return struct.pack("<Q", len(octets)) + octets


def _value(value: Any) -> bytes:
    """A value of the metadata, with its type: bool, uint32, float32, text, an array of int32 or
    float32 from NumPy, or a list of texts."""
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, np.ndarray):
        kind = "f" if value.dtype.kind == "f" else "i"
        head = struct.pack("<IIQ", ARRAY, CODES[kind], len(value))
        return head + value.astype("<" + kind + "4").tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(map(_text, value))
    kind = {bool: "?", int: "I", float: "f"}[type(value)]
    return struct.pack("<I" + kind, CODES[kind], value)
