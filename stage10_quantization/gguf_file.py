"""Models in GGUF, the files of llama.cpp: config from the metadata, tensors under our names.

The package `gguf` reads the file and knows its types. Matrices in Q8_0, Q4_0 and Q4_1 stay whole
numbers with scales, which the kernels multiply by; those of all other types are dequantized.

Three things differ from a folder of Hugging Face. The projections of GPT-2 are (out, in). For the
architecture `llama` the rows of the query and key projections are in another order: each head has
its channels in pairs 0, D/2, 1, D/2 + 1, ..., because llama.cpp rotates neighbours. And Llama 3's
stretched positions are not named; they are a tensor of divisors.
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
from shared.config import Config
from shared.errors import UserError
from stage08_llama.config import LlamaConfig
from stage08_llama.rope import Rope, frequencies

from .matrix import PROJECTIONS, QuantizedMatrix

KNOWN = ("gpt2", "llama", "qwen2", "qwen3")
ARCHITECTURES = {kind: gguf.MODEL_ARCH[kind.upper()] for kind in KNOWN}
CODES = {"Q8_0": (8, 34), "Q4_0": (4, 18), "Q4_1": (4, 20)}  # bits, and bytes of a block of 32
ROPE = "rope_freqs.weight"
SIZES = {  # keys of a Llama, after its architecture, and the options of a config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
REPEATED = ("attention.value_length", "rope.dimension_count")  # must be the heads' width
HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


class Reader(gguf.GGUFReader):
    """The package's reader, on an ordinary array: slices of an np.memmap take four times as long,
    and the vocabulary alone needs two hundred thousand."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class GGUFModel:
    """A model in a GGUF file, a `stored.Model`. config: as for a folder. metadata: key -> number,
    text, or list."""

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
        if self.architecture not in ARCHITECTURES:
            kind = self.architecture[:40]
            raise self.error(f"its architecture is {kind!r}, none of {', '.join(KNOWN)}")
        self.config = self._config()
        self._stored = self._names()

    def error(self, reason: str) -> UserError:
        return UserError(
            f"{self.path} cannot be opened: {reason}; download it again, or choose another file."
        )

    # ---- tensors ----

    def _names(self) -> dict[str, str]:
        """Our name of each tensor -> that in the file. Raises UserError if they do not fit."""
        config, names = self.config, dict[str, str]()
        theirs = gguf.get_tensor_name_map(ARCHITECTURES[self.architecture], config.n_layer)
        prefix = "transformer." if self.architecture == "gpt2" else "model."
        for name, shape in config.shapes().items():
            full = name if name.startswith("lm_head") else prefix + name
            names[name] = theirs.get_name(full, (".weight", ".bias")) or ""
            tensor = self.tensors.get(names[name])
            if tensor is None:
                raise self.error(f"it has no tensor for {name}")
            stored = tuple(tensor.shape.tolist())  # innermost first
            if stored != (shape if self._transposed(name) else shape[::-1]):
                raise self.error(f"{names[name]} has the shape {stored[::-1]}, not {shape}")
        if odd := sorted(self.tensors.keys() - {*names.values(), ROPE}):
            raise self.error(f"the tensor {odd[0][:99]!r} is none of its architecture")
        return names

    def _transposed(self, name: str) -> bool:
        return self.architecture == "gpt2" and name.endswith(PROJECTIONS)

    def is_quantized(self, name: str) -> bool:
        """Whether `read` returns a QuantizedMatrix."""
        return self.tensors[self._stored[name]].tensor_type.name in CODES

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        """A tensor of config.shapes by its name, as floats in that shape; or a QuantizedMatrix
        (out, in), GPT-2's projections too. Raises UserError if a scale is not finite."""
        tensor = self.tensors[self._stored[name]]
        kind, data = tensor.tensor_type.name, tensor.data
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = self.config.n_head if ".q_proj." in name else self.config.n_kv_head
            data = data[in_halves(heads, self.config.head_dim).numpy()]
        if kind in CODES:
            matrix = unpacked(torch.from_numpy(data), kind)
            finite = matrix.scale if matrix.minimum is None else matrix.scale + matrix.minimum
            if not finite.isfinite().all():
                raise self.error(f"the tensor {tensor.name} has a scale that is not finite")
            return matrix
        floats = torch.from_numpy(data)
        if kind == "BF16":
            floats = floats.view(torch.bfloat16)
        elif not floats.is_floating_point():
            try:
                floats = torch.from_numpy(gguf.dequantize(data, tensor.tensor_type))
            except NotImplementedError:
                raise self.error(f"{tensor.name} has the type {kind}, which is not read") from None
        return floats.t() if self._transposed(name) else floats

    # ---- the config ----

    def _config(self) -> Config:
        fields, options = self._fields()
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.error("it has no tensor token_embd.weight")
        ends = [self.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        fields |= {
            "vocab_size": int(embedding.shape[1]),
            "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }
        name, source = self.path.stem, f"the metadata of {self.path}"
        if self.architecture == "gpt2":
            return Config.from_dict(fields, name, source)
        kind = "mistral" if "sliding_window" in fields else self.architecture
        config = registry.load(registry.CONFIGS[kind])(fields, name, source)
        assert isinstance(config, LlamaConfig)
        if self.architecture == "llama":
            biased = "blk.0.attn_q.bias" in self.tensors
            o_bias = "blk.0.attn_output.bias" in self.tensors
            config = replace(config, qkv_bias=biased, o_bias=o_bias)
        for key in REPEATED:
            if options.get(key, config.head_dim) != config.head_dim:
                raise self.error(f"{key} is {options[key]!r}, not {config.head_dim} as its heads")
        return replace(config, rope=self._rope(config))

    def _fields(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a config.json; and those of the file, without the architecture's name.
        Raises UserError for one that is not known here."""
        prefix, metadata = f"{self.architecture}.", self.metadata
        options = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        names = GPT2_SIZES if self.architecture == "gpt2" else SIZES
        known = {*names, *REPEATED, *HARMLESS}
        for key, value in options.items():
            if key not in known and value not in (0, "none"):
                raise self.error(f"it sets {prefix}{key:.99}, which our model does not implement")
        fields = {names[key]: value for key, value in options.items() if key in names}
        return fields, options

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
