"""config.json of the Llama family: one reader for each `model_type`, and no guesses.

A reader knows every option of its models. An option that it does not know, or whose value the model
does not implement, is refused by name: a silent default would give a model that runs and is wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.config import Config, Reader, check_size, end_ids
from shared.errors import UserError

from .rope import KINDS, Rope, yarn_scale

# Options of transformers that do not change the arithmetic of inference.
HARMLESS = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # how its training split the products
    "problem_type",
    "return_dict",
    "rope_interleaved",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}
COMMON = {
    *SIZES,
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "model_type",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
}
BIASES = {"attention_bias", "mlp_bias"}
LAYERS = ("full_attention", "sliding_attention")
ALL = sys.maxsize  # a sliding window that hides nothing
WINDOWS = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


@dataclass(frozen=True)
class LlamaConfig(Config):
    """The shape of a model of the Llama family. Fields have GPT-2's names where it has them:
    `layer_norm_epsilon` is rms_norm_eps, `n_inner` is intermediate_size."""

    n_inner: int = 0
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # tokens that a query of each layer sees; empty: all before it

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor, in the model's order, without the prefix "model."."""
        width, inner, head = self.n_embd, self.n_inner, self.head_dim
        heads, kv_heads = self.n_head * head, self.n_kv_head * head

        def linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
            weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
            return weight | ({f"{name}.bias": (rows,)} if bias else {})

        layer = {
            "input_layernorm.weight": (width,),
            **linear("self_attn.q_proj", heads, width, self.qkv_bias),
            **linear("self_attn.k_proj", kv_heads, width, self.qkv_bias),
            **linear("self_attn.v_proj", kv_heads, width, self.qkv_bias),
            **linear("self_attn.o_proj", width, heads, self.o_bias),
        }
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        layer |= {
            "post_attention_layernorm.weight": (width,),
            **linear("mlp.gate_proj", inner, width, self.mlp_bias),
            **linear("mlp.up_proj", inner, width, self.mlp_bias),
            **linear("mlp.down_proj", width, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, width)}
        for number in range(self.n_layer):
            shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (width,)
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocab_size, width)}

    @staticmethod
    def tensor_name(name: str) -> str | None:
        """A tensor's name in `shapes`, from its name in a file; None for the angles that old files
        keep."""
        return None if name.endswith("rotary_emb.inv_freq") else name.removeprefix("model.")


# ---- reading ------------------------------------------------------------------------------------


class Fields:
    """The options of one config.json, read once each, with errors that name the option."""

    def __init__(self, values: Mapping[str, Any], source: str, known: set[str]) -> None:
        self.values, self.source = values, source
        for name, value in values.items():
            if name not in known | HARMLESS and value is not None:
                raise UserError(
                    f"{source} has the option {name}, set to {_short(value)}, which this model "
                    "does not implement: choose another model."
                )

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def refuse(self, name: str, value: object, wanted: str) -> UserError:
        return UserError(
            f"{self.source} sets {name} to {_short(value)}; only {wanted} works: choose another "
            "model."
        )

    def size(self, name: str, default: Any = None) -> int:
        return check_size(self.get(name, default), name, self.source)

    def number(self, name: str, default: Any = None, least: float = 0.0) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not least < value < math.inf:
            raise UserError(
                f"{name} in {self.source} must be a number above {least:g}, not {value!r}."
            )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise UserError(f"{name} in {self.source} must be true or false, not {value!r}.")
        return value

    @property
    def window(self) -> int | None:
        """sliding_window as transformers reads it: 4,096 if the file does not name it, and no
        window if it is null."""
        null = self.values.get("sliding_window", "absent") is None
        return None if null else self.size("sliding_window", 4096)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read(
    values: Mapping[str, Any], name: str, source: str, known: set[str], kv_heads: int | None
) -> tuple[Fields, LlamaConfig]:
    """What all readers share. kv_heads: heads of keys and values if the file does not name
    their number. If it is null, or this is None, there are as many as heads of queries."""
    fields = Fields(values, source, COMMON | known)
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", fields.get("hidden_act"), "'silu'")
    sizes: dict[str, Any] = {ours: fields.size(theirs) for theirs, ours in SIZES.items()}
    heads, width = sizes["n_head"], sizes["n_embd"]
    absent = "num_key_value_heads" not in values
    kv = fields.size("num_key_value_heads", kv_heads if absent and kv_heads else heads)
    if heads % kv:
        raise UserError(
            f"num_attention_heads in {source} must be a multiple of num_key_value_heads, which is "
            f"{kv}, not {heads}."
        )
    if fields.get("head_dim") is None and width % heads:
        raise UserError(
            f"hidden_size in {source} must be a multiple of num_attention_heads, which is {heads}, "
            f"not {width}, or head_dim must be given."
        )
    head_dim = fields.size("head_dim", width // heads)
    if head_dim % 2:
        raise UserError(
            f"head_dim in {source} is {head_dim}, but rotary positions turn pairs of channels: it "
            "must be even."
        )
    config = LlamaConfig(
        **sizes,
        n_kv_head=kv,
        head_dim=head_dim,
        layer_norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        eos_ids=end_ids(values, sizes["vocab_size"], source),
        name=name,
        rope=_rope(fields, sizes["n_positions"]),
        tied=fields.flag("tie_word_embeddings"),
    )
    return fields, config


ROPE_OPTIONS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    },
}


def _rope(fields: Fields, context: int) -> Rope:
    """Rotary positions, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4).
    A theta in the dictionary wins."""
    source = fields.source
    spec = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(spec, dict) or any(isinstance(value, dict) for value in spec.values()):
        raise fields.refuse("rope_parameters", spec, "one set of rotary positions for all layers")
    spec = {key: value for key, value in spec.items() if value is not None}
    kind = spec.pop("rope_type", None) or spec.pop("type", "default")
    spec.pop("type", None)
    if kind not in KINDS:
        raise fields.refuse("rope_type", kind, ", ".join(KINDS))
    if spec.get("partial_rotary_factor") == 1:
        del spec["partial_rotary_factor"]
    inner = Fields(spec, f"{source}, rotary positions,", ROPE_OPTIONS[kind] | {"rope_theta"})
    theta = inner.number("rope_theta", fields.get("rope_theta", 10_000.0), least=1.0)
    rope = Rope(theta, kind)
    if kind == "default":
        return rope
    factor = inner.number("factor")
    trained = inner.size("original_max_position_embeddings", context)
    rope = replace(rope, factor=factor, trained=trained)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if low >= high:
            raise inner.refuse(
                "low_freq_factor", low, f"a number below high_freq_factor, {high:g},"
            )
        return replace(rope, low_factor=low, high_factor=high)
    if kind != "yarn":
        return rope
    scale = yarn_scale(factor)
    if inner.get("mscale") and inner.get("mscale_all_dim"):
        scale = yarn_scale(factor, inner.number("mscale"))
        scale /= yarn_scale(factor, inner.number("mscale_all_dim"))
    return replace(
        rope,
        slow=inner.number("beta_slow", 1.0),
        fast=inner.number("beta_fast", 32.0),
        truncate=inner.flag("truncate", True),
        scale=inner.number("attention_factor", scale),
    )


def _windowed(config: LlamaConfig, fields: Fields, layers: Sequence[bool]) -> LlamaConfig:
    """The config with sliding_window in `layers`, unless the window hides nothing there."""
    window = fields.window
    if window is None or not any(layers) or window >= config.n_positions:
        return config
    return replace(config, windows=tuple(window if here else ALL for here in layers))


# ---- one reader a model_type --------------------------------------------------------------------


def llama(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Llama 2 and 3, TinyLlama, SmolLM2."""
    fields, config = _read(values, name, source, BIASES, None)
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def mistral(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Mistral: a window, if any, is in every layer."""
    fields, config = _read(values, name, source, {"sliding_window"}, 8)
    return _windowed(config, fields, [True] * config.n_layer)


def qwen2(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Qwen2 and 2.5: biases of queries, keys and values, which no option names."""
    fields, config = _read(values, name, source, WINDOWS, 32)
    return replace(_qwen_window(fields, config), qkv_bias=True)


def qwen3(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Qwen3: queries and keys are normed, head by head."""
    fields, config = _read(values, name, source, WINDOWS | {"attention_bias"}, 32)
    bias = fields.flag("attention_bias")
    config = replace(_qwen_window(fields, config), qkv_bias=bias, o_bias=bias, qk_norm=True)
    return config if fields.get("head_dim") else replace(config, head_dim=128)


def _qwen_window(fields: Fields, config: LlamaConfig) -> LlamaConfig:
    """Qwen's window, which counts only if it is switched on, and only in some layers."""
    if not fields.flag("use_sliding_window") or fields.window is None:
        return config
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.number("max_window_layers", 28, least=-1)
        return _windowed(config, fields, [layer >= first for layer in range(config.n_layer)])
    wrong = not isinstance(kinds, list) or any(kind not in LAYERS for kind in kinds)
    if wrong or len(kinds) != config.n_layer:
        wanted = f"a list of {config.n_layer}, each {' or '.join(LAYERS)},"
        raise fields.refuse("layer_types", kinds, wanted)
    return _windowed(config, fields, [kind == "sliding_attention" for kind in kinds])


READERS: dict[str, Reader] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
