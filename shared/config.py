"""The shape of a model, for engines, caches and estimates. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from . import registry
from .errors import UserError
from .files import read_json

if TYPE_CHECKING:
    import torch

MOST_LAYERS, MOST_SIZE = 2**12, 2**24
SCALE_BYTES = 2  # of a cached key or value in whole numbers
# Options that change the arithmetic, with the values that our model implements, the default first.
FIXED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True)
class Config:
    """The shape of a model. Fields are named as in GPT-2's config.json, if they are there.

    Caches allocate n_kv_head heads of head_dim channels; n_head, a multiple of n_kv_head, counts
    the query heads. Left at 0, n_kv_head is n_head and head_dim is n_embd / n_head, as in GPT-2.
    """

    family: ClassVar[str] = "gpt2"  # in registry.MODELS

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv_head: int = 0
    head_dim: int = 0
    layer_norm_epsilon: float = 1e-5
    eos_ids: tuple[int, ...] = ()  # each ends a text
    tied: bool = True  # the output layer is the embedding again
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_kv_head", self.n_kv_head or self.n_head)
        object.__setattr__(self, "head_dim", self.head_dim or self.n_embd // self.n_head)

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one cached position takes: a key and a value for each head of each layer. In
        whole numbers, such as int8, each of them has a scale."""
        scale = 0 if dtype.is_floating_point else SCALE_BYTES
        return 2 * self.n_layer * self.n_kv_head * (self.head_dim * dtype.itemsize + scale)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor, the embedding first, in the model's order. A tied output
        layer has no tensor of its own."""
        width = self.n_embd
        block: dict[str, tuple[int, ...]] = {  # matrices are (in, out), the transpose of nn.Linear
            "ln_1": (width,),
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "ln_2": (width,),
            "mlp.c_fc": (width, 4 * width),
            "mlp.c_proj": (4 * width, width),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "wte.weight": (self.vocab_size, width),
            "wpe.weight": (self.n_positions, width),
        }
        for layer in range(self.n_layer):
            for name, shape in block.items():
                shapes[f"h.{layer}.{name}.weight"] = shape
                shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
        shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocab_size, width)}

    @staticmethod
    def tensor_name(name: str) -> str | None:
        """A tensor's name in `shapes`, given its name in a file, with "transformer." before it or
        not; None for the attention masks of old checkpoints."""
        name = name.removeprefix("transformer.")
        return None if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name) else name

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], name: str = "", source: str = "config.json"
    ) -> Config:
        """Check the fields of a config.json. Raises UserError for a wrong size, or for a model that
        this GPT-2 does not implement."""
        names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        sizes: dict[str, Any] = {f: check_size(fields.get(f), f, source) for f in names}
        width, heads = sizes["n_embd"], sizes["n_head"]
        for option, works in (FIXED_OPTIONS | {"n_inner": (None, 4 * width)}).items():
            if fields.get(option, works[0]) not in works:
                raise UserError(
                    f"{source} sets {option} to {fields[option]!r}; only "
                    f"{' or '.join(map(str, works))} works: choose another model."
                )
        if width % heads:
            raise UserError(
                f"n_embd in {source} must be a multiple of n_head, which is {heads}, not {width}."
            )
        return cls(
            **sizes,
            layer_norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
            eos_ids=end_ids(fields, sizes["vocab_size"]),
            tied=fields.get("tie_word_embeddings", True),
            name=name,
        )


def check_size(size: object, field: str, source: str) -> int:
    """The size in `field` of a config.json. Raises UserError if no model has it: a billion layers
    would take all memory before any weight is read."""
    most = MOST_LAYERS if "layer" in field else MOST_SIZE
    if type(size) is not int or not 1 <= size <= most:
        raise UserError(
            f"{field} in {source} must be a whole number from 1 to {most}, not {size!r:.40}."
        )
    return size


Reader = Callable[[Mapping[str, Any], str, str], Config]  # fields, name of the model, source


def read_config(folder: str | Path, name: str | None = None) -> Config:
    """Read a checkpoint folder's config.json with the reader of its model_type; without a
    model_type, the model is a GPT-2. The end tokens in generation_config.json override those in
    config.json, as in transformers.

    Raises UserError as the reader does, for a model_type without a reader, or if a file is absent
    or corrupt.
    """
    path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
    fields = read_json(path)
    fields.pop("quantization_config", None)  # which registry.QUANTIZED reads
    kind = str(fields.get("model_type", "gpt2"))
    if kind not in registry.CONFIGS:
        raise UserError(
            f"{path} sets model_type to {kind!r}; only {', '.join(registry.CONFIGS)} work: choose "
            "another model."
        )
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    if ends is not None:
        fields["eos_token_id"] = ends
    reader: Reader = registry.load(registry.CONFIGS[kind])
    return reader(fields, name or Path(folder).resolve().name, str(path))


def end_ids(fields: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text: eos_token_id, an id or a list of them. An id outside the
    vocabulary, which transformers saves for small models made with default settings, ends none."""
    stated = fields.get("eos_token_id")
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    return tuple(token for token in ids if token < vocab_size)
