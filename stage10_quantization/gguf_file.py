"""Models in GGUF, the files of llama.cpp: config from the metadata, tensors under our names.

The package `gguf` reads the file and knows its types. Matrices in Q8_0, Q4_0 and Q4_1 stay whole
numbers with scales, which the kernels multiply by; those of all other types are dequantized.

One thing differs from a folder of Hugging Face: the rows of the query and key projections are in
another order. Each head has its channels in pairs 0, D/2, 1, D/2 + 1, ..., because llama.cpp
rotates neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from shared.checkpoint import Checkpoint
from stage08_llama.config import LlamaConfig, llama

from . import Unfit
from .convert import opened
from .gguf_tokenizer import tokenizer_folder
from .matrix import QuantizedMatrix

CODES = {"Q8_0": (8, 34), "Q4_0": (4, 18), "Q4_1": (4, 20)}  # bits, and bytes of a block of 32
SIZES = {  # keys of a model, after its architecture, and the options of a config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
REPEATED = ("attention.value_length", "rope.dimension_count")  # must be the heads' width
HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


class Reader(gguf.GGUFReader):
    """The package's reader, on an ordinary array: slices of an np.memmap take four times as long,
    and the vocabulary alone needs two hundred thousand."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


def open_file(path: Path) -> Checkpoint:
    """The model in a GGUF file, whose activations stay floats. Raises Unfit."""
    try:
        reader = Reader(path, "c")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever a byte leads to
        raise Unfit(f"it is cut, corrupt or no GGUF file ({error})") from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise Unfit("it is big-endian, for other processors than this one")
    # Of float32 the shortest decimal: 1e-05 and not 9.99999974737875e-06.
    metadata = {
        key: float(str(np.float32(value))) if type(value) is float else value
        for key, value in fields.items()
    }
    if (kind := metadata.get("general.architecture")) != "llama":
        raise Unfit(f"its architecture is {str(kind)[:40]!r}, and only llama is read")
    folder = tokenizer_folder(metadata)
    config = config_of(metadata, path, tied="output.weight" not in tensors)
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layer)
    values: dict[str, Tensor | QuantizedMatrix] = {}
    for name, shape in config.shapes().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        tensor = tensors.pop(theirs.get_name(full, (".weight", ".bias")) or "", None)
        if tensor is None:
            raise Unfit(f"it has no tensor for {name}")
        stored = tuple(tensor.shape.tolist())[::-1]  # innermost first
        if stored != shape:
            raise Unfit(f"{tensor.name} has the shape {stored}, not {shape}")
        data = tensor.data
        if re.search(r"\.[qk]_proj\.", name):
            heads = config.n_head if ".q_proj." in name else config.n_kv_head
            data = data[in_halves(heads, config.head_dim).numpy()]
        values[name] = value_of(data, tensor.tensor_type)
    if tensors:
        raise Unfit(f"the tensor {min(tensors)[:99]!r} is none of its architecture")
    return opened(config, values, folder, "float")


def config_of(metadata: Mapping[str, Any], path: Path, tied: bool) -> LlamaConfig:
    options = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    for key, value in options.items():
        if key not in {*SIZES, *REPEATED, *HARMLESS} and value not in (0, "none"):
            raise Unfit(f"it sets llama.{key:.99}, which our model does not implement")
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    fields = {SIZES[key]: value for key, value in options.items() if key in SIZES} | {
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
        "tie_word_embeddings": tied,
    }
    config = llama(fields, path.stem, f"the metadata of {path}")
    for key in REPEATED:
        if options.get(key, config.head_dim) != config.head_dim:
            raise Unfit(f"{key} is {options[key]!r}, not {config.head_dim} as its heads")
    return config


def value_of(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor | QuantizedMatrix:
    """A tensor, as floats or as a QuantizedMatrix, from its rows in the file."""
    stored = torch.from_numpy(data)
    if kind.name in CODES:
        return unpacked(stored, kind.name)
    if stored.is_floating_point():
        return stored
    try:
        return torch.from_numpy(gguf.dequantize(data, kind))
    except NotImplementedError:
        raise Unfit(f"it has a tensor of the type {kind.name}, which is not read") from None


def unpacked(octets: Tensor, kind: str) -> QuantizedMatrix:
    """Rows of blocks (N, bytes) uint8 of a type in CODES. A block has 32 values: the scale d in
    float16, in Q4_1 the minimum m in float16, and the codes. Those of 4 bits are nibbles: first the
    low halves of 16 bytes, then the high ones.

    Q8_0 d * q    Q4_0 d * (q - 8)    Q4_1 d * q + m
    """
    bits, size = CODES[kind]
    blocks = octets.unflatten(1, (-1, size))  # (N, B, size)
    head = size - 4 * bits
    floats = blocks[:, :, :head].contiguous().view(torch.float16).float()  # (N, B, 1 or 2)
    codes = blocks[:, :, head:]
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), 2)
    codes = codes.contiguous().view(torch.int8).flatten(1)
    sides = (side.contiguous() for side in floats.unbind(2))
    return QuantizedMatrix(codes - 8 if kind == "Q4_0" else codes, *sides, bits=bits)


def in_halves(heads: int, head_dim: int) -> Tensor:
    """For each row of a query or key projection as transformers has it, its row in the file: head
    by head, channel i is at 2i and channel i + D/2 at 2i + 1."""
    order = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return order.transpose(1, 2).flatten()
