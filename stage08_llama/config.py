"""config.json of the Llama family: one reader for each `model_type`, and no guesses.

A reader knows every option of its models. An option that it does not know, or whose value the model
does not implement, is refused by name: a silent default would give a model that runs and is wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from shared.config import Config, check_size, end_ids
from shared.errors import UserError

from .rope import KINDS, Rope

log = logging.getLogger(__name__)

# Options of transformers that do not change the arithmetic of inference.
NAMES = """_attn_implementation _name_or_path architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward dtype id2label initializer_range is_encoder_decoder is_llama_config
    label2id output_attentions output_hidden_states pad_token_id pretraining_tp problem_type
    return_dict rope_interleaved torch_dtype transformers.js_config transformers_version
    unk_token_id use_cache"""
HARMLESS = frozenset(NAMES.split())
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}
COMMON = {*SIZES, "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings"}
COMMON |= {"eos_token_id", "head_dim", "hidden_act", "model_type", "num_key_value_heads"}
COMMON |= {"rms_norm_eps", *(OFF := ("attention_bias", "mlp_bias"))}
QWEN_WINDOW = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


@dataclass(frozen=True)
class LlamaConfig(Config):
    """The shape of a model of the Llama family. Fields have GPT-2's names where it has them:
    `layer_norm_epsilon` is rms_norm_eps, `n_inner` is intermediate_size."""

    family: ClassVar[str] = "llama"

    n_inner: int = 0
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    qk_norm: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor, in the model's order, without the prefix "model."."""
        width, inner, head = self.n_embd, self.n_inner, self.head_dim
        heads, kv_heads = self.n_head * head, self.n_kv_head * head

        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            layer[f"self_attn.{name}_proj.weight"] = (rows, width)
            if self.qkv_bias:
                layer[f"self_attn.{name}_proj.bias"] = (rows,)
        layer["self_attn.o_proj.weight"] = (width, heads)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        layer |= {
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
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


class Options:
    """The options of one config.json, with errors that name the option. An option that is null
    counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str, known: set[str]) -> None:
        self.values, self.source = values, source
        for name, value in values.items():
            if name not in known | HARMLESS and value is not None:
                raise UserError(
                    f"{source} has the option {name}, set to {value!r:.60}, which this model does "
                    "not implement: choose another model."
                )

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def refuse(self, name: str, wanted: str) -> UserError:
        return UserError(
            f"{self.source} sets {name} to {self.get(name)!r:.60}; only {wanted} works: choose "
            "another model."
        )

    def size(self, name: str, default: Any = None) -> int:
        return check_size(self.get(name, default), name, self.source)

    def number(self, name: str, default: Any = None, least: float = 0.0) -> float:
        value = self.get(name, default)
        if type(value) in (int, float) and least < value < math.inf:
            return float(value)
        raise UserError(f"{name} in {self.source} must be a number above {least:g}, not {value!r}.")

    def flag(self, name: str) -> bool:
        return bool(self.get(name))


def read(
    values: Mapping[str, Any], name: str, source: str, known: set[str]
) -> tuple[Options, LlamaConfig]:
    """What all readers share. A number of heads or a width that the file lacks, and that is not the
    usual one, shows in the shapes of the weights."""
    options = Options(values, source, COMMON | known)
    if options.get("hidden_act", "silu") != "silu":
        raise options.refuse("hidden_act", "'silu'")
    for bias in OFF:
        if options.flag(bias):
            raise options.refuse(bias, "false")
    sizes: dict[str, Any] = {ours: options.size(theirs) for theirs, ours in SIZES.items()}
    heads, width = sizes["n_head"], sizes["n_embd"]
    kv = options.size("num_key_value_heads", heads)
    if heads % kv:
        raise options.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads},")
    head_dim = options.size("head_dim", width // heads)
    if head_dim % 2:  # rotary positions turn pairs of channels
        raise options.refuse("head_dim", "an even number")
    config = LlamaConfig(
        **sizes,
        n_kv_head=kv,
        head_dim=head_dim,
        layer_norm_epsilon=options.number("rms_norm_eps", 1e-6),
        eos_ids=end_ids(values, sizes["vocab_size"]),
        name=name,
        rope=read_rope(options, sizes["n_positions"]),
        tied=options.flag("tie_word_embeddings"),
    )
    return options, config


def read_rope(options: Options, context: int) -> Rope:
    """Rotary positions, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4).
    A theta in the dictionary wins."""
    spec = options.get("rope_parameters") or options.get("rope_scaling") or {}
    if not isinstance(spec, dict) or any(isinstance(value, dict) for value in spec.values()):
        raise options.refuse("rope_parameters", "one set of rotary positions for all layers")
    spec = {key: value for key, value in spec.items() if value is not None}
    kind = spec.pop("rope_type", None) or spec.get("type", "default")
    spec.pop("type", None)
    if str(kind) not in KINDS:
        raise UserError(
            f"{options.source} sets rope_type to {kind!r:.60}; only {', '.join(KINDS)} work: "
            "choose another model."
        )
    spec = Options(spec, f"{options.source}, rotary positions,", {"rope_theta", *KINDS[kind]})
    rope = Rope(spec.number("rope_theta", options.get("rope_theta", 10_000.0), least=1.0), kind)
    if kind == "default":
        return rope
    factor = spec.number("factor")
    trained = spec.size("original_max_position_embeddings", context)
    rope = replace(rope, factor=factor, trained=trained)
    if kind != "llama3":
        return rope
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    if low >= high:
        raise spec.refuse("low_freq_factor", f"a number below high_freq_factor, {high:g},")
    return replace(rope, low_factor=low, high_factor=high)


def within_window(config: LlamaConfig, options: Options) -> LlamaConfig:
    """The config with the context of its sliding window, within which nothing is hidden: no engine
    here implements more. As in transformers, an absent window is 4,096 tokens, and null is none."""
    if options.values.get("sliding_window", "absent") is None:
        return config
    window = options.size("sliding_window", 4096)
    if window >= config.n_positions:
        return config
    log.warning(
        f"{config.name} has a sliding window of {window} tokens, which the engines do not "
        f"implement: its context is {window} tokens here, not {config.n_positions}."
    )
    return replace(config, n_positions=window)


# ---- one reader a model_type --------------------------------------------------------------------


def llama(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Llama 2 and 3, TinyLlama, SmolLM2."""
    return read(values, name, source, set())[1]


def mistral(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Mistral: a window, if any, is in every layer."""
    options, config = read(values, name, source, {"sliding_window"})
    return within_window(config, options)


def qwen2(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Qwen2 and 2.5: biases of queries, keys and values, which no option names."""
    return replace(qwen(values, name, source), qkv_bias=True)


def qwen3(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """Qwen3: queries and keys are normed, head by head."""
    return replace(qwen(values, name, source), qk_norm=True)


def qwen(values: Mapping[str, Any], name: str, source: str) -> LlamaConfig:
    """What they share: the window counts only if it is switched on, in whatever layers."""
    options, config = read(values, name, source, QWEN_WINDOW)
    return within_window(config, options) if options.flag("use_sliding_window") else config
