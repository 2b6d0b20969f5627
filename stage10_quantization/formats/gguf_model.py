"""Models in GGUF: the config from the metadata, and tensors under our names.

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

import torch
from torch import Tensor

from shared import registry
from shared.config import Config
from stage08_llama.config import LlamaConfig
from stage08_llama.rope import Rope, frequencies

from ..layers import QuantizedMatrix
from .blocks import FORMATS
from .gguf import GGUF

LLAMA_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
PROJECTIONS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in GPT-2's folders
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
SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
REPEATED = ("attention.value_length", "rope.dimension_count")  # must be the heads' width
HARMLESS = ("vocab_size", "rope.scaling.finetuned", "rope.scaling.type", "tensor_data_layout")


class GGUFModel:
    """A model in a GGUF file. config: as for a folder. names: of all tensors, as in config.shapes.

    `read` unpacks one tensor at a time, or rows of it: no others are in memory.
    """

    in_rows = True

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is corrupt or its model is of another kind."""
        self.file = GGUF(path)
        self.metadata = self.file.metadata
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ("gpt2", "llama", "qwen2", "qwen3"):
            raise self.file.error(
                f"its architecture is {self.architecture[:40]!r}, not gpt2, llama, qwen2 or qwen3"
            )
        self.config = self._config()
        names, shapes = self._names(), self.config.shapes()
        if missing := [name for name in shapes if name not in names]:
            raise self.file.error(f"it has no tensor for {missing[0]}")
        if odd := [name for name in names if name not in shapes]:
            raise self.file.error(f"the tensor {names[odd[0]][:99]!r} is none of its architecture")
        for name, shape in shapes.items():
            stored = self.file.infos[names[name]].shape
            if stored != (shape[::-1] if self._transposed(name) else shape):
                raise self.file.error(
                    f"the tensor {names[name]!r} has the shape {stored}, which does not fit "
                    f"{shape}, that of {name}"
                )
        self._stored = names
        self.names = list(shapes)

    def read(self, name: str, rows: Tensor | None = None) -> Tensor | QuantizedMatrix:
        """A tensor of config.shapes by its name. Floats have that shape and the file's dtype; a
        matrix in blocks is a QuantizedMatrix (out, in), GPT-2's projections too. rows: (R,), those
        that are read of it; None for all."""
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = self.config.n_head if ".q_proj." in name else self.config.n_kv_head
            order = in_halves(heads, self.config.head_dim)
            rows = order if rows is None else order[rows]
        tensor = self.file.read(self._stored[name], rows)
        if self._transposed(name) and isinstance(tensor, Tensor):
            tensor = tensor.t()
        return tensor

    def is_quantized(self, name: str) -> bool:
        """Whether `read` returns a QuantizedMatrix."""
        return self.file.infos[self._stored[name]].kind in FORMATS

    def _transposed(self, name: str) -> bool:
        return self.architecture == "gpt2" and name.endswith(PROJECTIONS)

    def _names(self) -> dict[str, str]:
        """Our name -> the file's name, of all tensors."""
        parts = GPT2_NAMES if self.architecture == "gpt2" else LLAMA_NAMES
        prefix = "h" if self.architecture == "gpt2" else "layers"
        names: dict[str, str] = {}
        for name in self.file.infos:
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name, re.ASCII)
            if match and match[2] in parts:
                layer = f"{prefix}.{int(match[1][:9])}." if match[1] else ""
                names[f"{layer}{parts[match[2]]}.{match[3]}"] = name
            elif name != ROPE:
                names[name] = name
        return names

    # ---- the config ----

    def _config(self) -> Config:
        fields, options = self._fields()
        embedding = self.file.infos.get("token_embd.weight")
        if embedding is None:
            raise self.file.error("it has no tensor token_embd.weight")
        fields |= {
            "vocab_size": embedding.shape[0],
            "eos_token_id": self._ends(),
            "tie_word_embeddings": "output.weight" not in self.file.infos,
        }
        name, source = self.file.path.stem, f"the metadata of {self.file.path}"
        if self.architecture == "gpt2":
            return Config.from_dict(fields, name, source)
        kind = "mistral" if "sliding_window" in fields else self.architecture
        biased = "blk.0.attn_q.bias" in self.file.infos
        config = registry.load(registry.CONFIGS[kind])(fields, name, source)
        assert isinstance(config, LlamaConfig)
        if self.architecture == "llama":
            config = replace(
                config, qkv_bias=biased, o_bias="blk.0.attn_output.bias" in self.file.infos
            )
        for key in REPEATED:
            if options.get(key, config.head_dim) != config.head_dim:
                raise self.file.error(
                    f"{key} is {options[key]!r}, not the heads' width, {config.head_dim}"
                )
        return replace(config, rope=self._rope(config))

    def _fields(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a config.json; and those of the file, without the architecture's name.
        Raises UserError for one that is not known here."""
        prefix = f"{self.architecture}."
        options = {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }
        names = GPT2_SIZES if self.architecture == "gpt2" else SIZES
        fields = {names[key]: value for key, value in options.items() if key in names}
        scaling = {SCALING[key]: value for key, value in options.items() if key in SCALING}
        kind = options.get("rope.scaling.type", "none")
        if kind != "none":
            fields["rope_scaling"] = scaling | {"rope_type": kind}
        for key, value in options.items():
            known = any(key in table for table in (names, SCALING, REPEATED, HARMLESS))
            if not known and not (type(value) is int and value == 0):
                name = f"{prefix}{key}"[:99]
                raise self.file.error(f"it sets {name!r}, which our model does not implement")
        return fields, options

    def _ends(self) -> list[int]:
        """The tokens that end a text: of a document, and of a turn of a chat."""
        ids = (self.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot"))
        return list(dict.fromkeys(token for token in ids if token is not None))

    def _rope(self, config: LlamaConfig) -> Rope:
        """Llama 3's positions if the file has their divisors, else those of the metadata."""
        if ROPE not in self.file.infos:
            return config.rope
        divisors = self.file.read(ROPE)
        assert isinstance(divisors, Tensor)
        plain = Rope(config.rope.theta)
        rope = replace(plain, kind="llama3", factor=float(divisors.max()), trained=8192)
        expected = frequencies(plain, config.head_dim) / frequencies(rope, config.head_dim)
        if divisors.shape != expected.shape or not torch.allclose(divisors.float(), expected):
            raise self.file.error(f"the tensor {ROPE!r} is none of Llama 3's")
        return rope


def in_halves(heads: int, head_dim: int) -> Tensor:
    """For each row of a query or key projection as transformers has it, its row in a GGUF file of
    the architecture llama: head by head, channel i is at 2i and channel i + D/2 at 2i + 1."""
    order = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return order.transpose(1, 2).flatten()
