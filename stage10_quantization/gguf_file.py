"""Models in GGUF, the files of llama.cpp: config from the metadata, tensors under our names.

The package `gguf` reads the file and knows its types. Matrices in Q8_0, Q4_0 and Q4_1 stay whole
numbers with scales, which the kernels multiply by; those of all other types are dequantized.

Two things differ from a folder of Hugging Face. For the architecture `llama` the rows of the query
and key projections are in another order: each head has its channels in pairs 0, D/2, 1, D/2 + 1,
..., because llama.cpp rotates neighbours. And Llama 3's stretched positions are not named; they are
a tensor of divisors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from shared import registry
from shared.errors import UserError
from stage08_llama.config import LlamaConfig
from stage08_llama.rope import Rope, frequencies

from .matrix import QuantizedMatrix

KNOWN = ("llama", "qwen2", "qwen3")
CODES = {"Q8_0": (8, 34), "Q4_0": (4, 18), "Q4_1": (4, 20)}  # bits, and bytes of a block of 32
ROPE = "rope_freqs.weight"
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


class GGUFModel:
    """A model in a GGUF file. config: as for a folder. quantized: names of config.shapes whose
    tensors are matrices of whole numbers. metadata: key -> number, text, or list."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is corrupt or its model is of another kind."""
        self.path = Path(path)
        try:
            reader = Reader(self.path, "c")
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            fields = {key: field.contents() for key, field in reader.fields.items()}
        except Exception as error:  # the package raises whatever a byte leads to
            raise self.error(f"it is cut, corrupt or no GGUF file ({error})") from None
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise UserError(
                f"{self.path} is big-endian, for other processors than this one: convert it with "
                "gguf-convert-endian, or choose another file."
            )
        # Of float32 the shortest decimal: 1e-05 and not 9.99999974737875e-06.
        self.metadata: dict[str, Any] = {
            key: float(str(np.float32(value))) if type(value) is float else value
            for key, value in fields.items()
        }
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in KNOWN:
            kind = self.architecture[:40]
            raise self.error(f"its architecture is {kind!r}, none of {', '.join(KNOWN)}")
        self.config = self._config()
        self._stored = self._names()
        kinds = {name: self.tensors[stored].tensor_type for name, stored in self._stored.items()}
        self.quantized = {name for name, kind in kinds.items() if kind.name in CODES}

    def error(self, reason: str) -> UserError:
        return UserError(
            f"{self.path} cannot be opened: {reason}; download it again, or choose another file."
        )

    def _names(self) -> dict[str, str]:
        """Our name of each tensor -> that in the file. Raises UserError if they do not fit."""
        config, names = self.config, dict[str, str]()
        kind = gguf.MODEL_ARCH[self.architecture.upper()]
        theirs = gguf.get_tensor_name_map(kind, config.n_layer)
        for name, shape in config.shapes().items():
            full = name if name.startswith("lm_head") else f"model.{name}"
            names[name] = theirs.get_name(full, (".weight", ".bias")) or ""
            tensor = self.tensors.get(names[name])
            if tensor is None:
                raise self.error(f"it has no tensor for {name}")
            stored = tuple(tensor.shape.tolist())[::-1]  # innermost first
            if stored != shape:
                raise self.error(f"{names[name]} has the shape {stored}, not {shape}")
        if odd := sorted(self.tensors.keys() - {*names.values(), ROPE}):
            raise self.error(f"the tensor {odd[0][:99]!r} is none of its architecture")
        return names

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        """A tensor of config.shapes by its name, as floats or as a QuantizedMatrix. Raises
        UserError for a type that the package does not dequantize."""
        tensor = self.tensors[self._stored[name]]
        kind, data = tensor.tensor_type.name, tensor.data
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = self.config.n_head if ".q_proj." in name else self.config.n_kv_head
            data = data[in_halves(heads, self.config.head_dim).numpy()]
        floats = torch.from_numpy(data)
        if kind in CODES:
            return unpacked(floats, kind)
        if kind == "BF16":
            return floats.view(torch.bfloat16)
        if floats.is_floating_point():
            return floats
        try:
            return torch.from_numpy(gguf.dequantize(data, tensor.tensor_type))
        except NotImplementedError:
            raise self.error(f"{tensor.name} has the type {kind}, which is not read") from None

    def _config(self) -> LlamaConfig:
        prefix, metadata = f"{self.architecture}.", self.metadata
        options = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        for key, value in options.items():
            if key not in {*SIZES, *REPEATED, *HARMLESS} and value not in (0, "none"):
                raise self.error(f"it sets {prefix}{key:.99}, which our model does not implement")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.error("it has no tensor token_embd.weight")
        fields = {SIZES[key]: value for key, value in options.items() if key in SIZES}
        ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        fields |= {
            "vocab_size": int(embedding.shape[1]),
            "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }
        read = registry.load(registry.CONFIGS[self.architecture])
        config: LlamaConfig = read(fields, self.path.stem, f"the metadata of {self.path}")
        for key in REPEATED:
            if options.get(key, config.head_dim) != config.head_dim:
                raise self.error(f"{key} is {options[key]!r}, not {config.head_dim} as its heads")
        return replace(config, rope=self._rope(config))

    def _rope(self, config: LlamaConfig) -> Rope:
        """Llama 3's positions if the file has their divisors."""
        if ROPE not in self.tensors:
            return config.rope
        divisors, plain = torch.from_numpy(self.tensors[ROPE].data), Rope(config.rope.theta)
        rope = replace(plain, kind="llama3", factor=float(divisors.max()), trained=8192)
        expected = frequencies(plain, config.head_dim) / frequencies(rope, config.head_dim)
        if divisors.shape != expected.shape or not torch.allclose(divisors.float(), expected):
            raise self.error(f"the tensor {ROPE} is none of Llama 3's")
        return rope


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
    minimum = floats[:, :, 1].contiguous() if kind == "Q4_1" else None
    return QuantizedMatrix(
        codes - 8 if kind == "Q4_0" else codes, floats[:, :, 0].contiguous(), minimum, bits
    )


def in_halves(heads: int, head_dim: int) -> Tensor:
    """For each row of a query or key projection as transformers has it, its row in a GGUF file of
    the architecture llama: head by head, channel i is at 2i and channel i + D/2 at 2i + 1."""
    order = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return order.transpose(1, 2).flatten()
