"""The shape of a model, for engines, caches and estimates. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .files import read_json

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function
# Options that change the arithmetic, with the one value that our model implements.
FIXED_OPTIONS = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Config:
    """The shape of a model. Fields are named as in a GPT-2's config.json where it has them.

    Caches allocate n_kv_head heads of head_dim channels; n_head, a multiple of n_kv_head, counts
    the query heads. Left at 0, n_kv_head is n_head and head_dim is n_embd / n_head, as in GPT-2.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv_head: int = 0
    head_dim: int = 0
    layer_norm_epsilon: float = 1e-5
    eos_ids: tuple[int, ...] = ()  # each of these tokens ends a text
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_kv_head", self.n_kv_head or self.n_head)
        object.__setattr__(self, "head_dim", self.head_dim or self.n_embd // self.n_head)
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"{self.n_head} query heads cannot share {self.n_kv_head} heads of keys evenly"
            )

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in expected_shapes(self).values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one cached position takes: a key and a value for each head of each layer."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * dtype.itemsize

    @classmethod
    def from_folder(cls, folder: str | Path, name: str | None = None) -> Config:
        """Read config.json of a checkpoint folder. Raises UserError as `from_dict` does, or if the
        file is absent or corrupt."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), name or Path(folder).resolve().name, str(path))

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any], name: str = "", source: str = "config.json"
    ) -> Config:
        """Check the fields of a config.json. Raises UserError for a wrong type or size, or for a
        model that this GPT-2 does not implement."""
        for option, ours in FIXED_OPTIONS.items():
            if fields.get(option, ours) != ours:
                raise UserError(
                    f"{source} sets {option} to {fields[option]!r}; only {ours!r} works: choose "
                    f"another model."
                )
        if fields.get("activation_function", ACTIVATIONS[0]) not in ACTIVATIONS:
            activation = fields["activation_function"]
            known = " or ".join(ACTIVATIONS)
            raise UserError(
                f"{source} sets activation_function to {activation!r}; only {known} works: choose "
                f"another model."
            )

        sizes: dict[str, Any] = {
            f: fields.get(f) for f in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        }
        for field, size in sizes.items():
            if type(size) is not int or size < 1:
                raise UserError(
                    f"{field} in {source} must be a whole number of at least 1, not {size!r}."
                )
        width, heads = sizes["n_embd"], sizes["n_head"]
        if width % heads:
            raise UserError(
                f"n_embd in {source} must be a multiple of n_head, which is {heads}, not {width}."
            )
        if fields.get("n_inner") not in (None, 4 * width):
            raise UserError(
                f"{source} sets n_inner to {fields['n_inner']!r}; only 4 * n_embd works: choose "
                f"another model."
            )

        epsilon = fields.get("layer_norm_epsilon", 1e-5)
        if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
            raise UserError(
                f"layer_norm_epsilon in {source} must be a number between 0 and 1, not {epsilon!r}."
            )
        eos = fields.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(type(token) is int and 0 <= token < sizes["vocab_size"] for token in eos_ids):
            raise UserError(
                f"eos_token_id in {source} must be a token id from 0 to {sizes['vocab_size'] - 1}, "
                f"not {eos!r}."
            )
        return cls(**sizes, layer_norm_epsilon=float(epsilon), eos_ids=eos_ids, name=name)


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor, in the model's order. No lm_head: it is wte again (tied)."""
    width = config.n_embd
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, width),
        "wpe.weight": (config.n_positions, width),
    }
    for layer in range(config.n_layer):
        block: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.c_attn.weight": (
                width,
                3 * width,
            ),  # Conv1D: (in, out), the transpose of nn.Linear
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width),
            "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width),
            "mlp.c_proj.bias": (width,),
        }
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}
