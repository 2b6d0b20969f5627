"""Families of models: GPT-2, which this stage implements, and those that later stages add.

A stage that adds a family names in its `OFFER` the module that defines `FAMILY`. So every engine,
the server and the load test run the new models without an edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from shared import checkpoint
from shared.checkpoint import Checkpoint
from shared.config import READERS, Config, Reader
from shared.linear import Conversion, convert

from .attention import Recompute
from .model import load_model as load_gpt2
from .offer import AUTO, module_for, offers


class Whole(Protocol):
    """Attention of one forward pass over a whole sequence."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Family:
    """Models that share one implementation.

    config: the class of their configs. readers: by model_type. presets: known shapes, by name.
    load_model: makes a model from a checkpoint, a device and a dtype.

    Attention of a family's own is what these bring for a config, where the stages' own will not do:
    attention: that over a whole sequence, in place of stage 01's.
    plain: the config with the longest context in which each token attends to all before it.
    organs: the cache and the scheduler for stage 05's `make`, as make_cache and make_scheduler.
    """

    config: type[Config]
    readers: Mapping[str, Reader]
    presets: Mapping[str, Config]
    load_model: Callable[..., Any]
    attention: Callable[..., Whole] = lambda config: Recompute()
    plain: Callable[..., Config] = lambda config: config
    organs: Callable[..., Mapping[str, Callable]] = lambda config: {}


GPT2 = Family(Config, READERS, checkpoint.PRESETS, load_gpt2)


@cache
def families() -> tuple[Family, ...]:
    """All families, GPT-2 first."""
    return GPT2, *(offer.load(offer.family).FAMILY for offer in offers() if offer.family)


def family_of(config: Config) -> Family:
    """The family whose config this is. One that is none's has no needs of its own, as GPT-2."""
    kinds = {family.config: family for family in families()}
    return kinds.get(type(config), GPT2)


def attention_of(config: Config) -> Whole:
    """Attention over a whole sequence: for GPT-2 this stage's `Recompute`."""
    return family_of(config).attention(config)


def plain(config: Config) -> Config:
    """The config for engines whose attention sees all tokens before a query (stages 02 to 04)."""
    return family_of(config).plain(config)


def presets() -> dict[str, Config]:
    """The known shapes of all families, by name."""
    return {name: config for family in families() for name, config in family.presets.items()}


def load(
    name: str,
    random_weights: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    conversion: Conversion | None = None,
    weights: str = AUTO,
) -> Checkpoint:
    """`checkpoint.load` for the models of all families. weights: of --weights, in place of how the
    checkpoint stores them."""
    readers = {kind: read for family in families() for kind, read in family.readers.items()}
    args = random_weights, seed, dtype, readers, presets(), conversion
    loaded = checkpoint.load(name, *args)
    if weights != AUTO and (brought := module_for("weights", weights)):
        brought.change(loaded, weights)
    return loaded


def load_model(
    loaded: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """The model of a checkpoint of any family. It offers what all engines use: `config`, `device`,
    `dtype`, a call with (ids, positions, attend), and `logits`. Its linear layers are those of the
    checkpoint's conversion."""
    for family in families():
        if type(loaded.config) is family.config:
            model = family.load_model(loaded, device=device, dtype=dtype)
            if loaded.conversion:
                convert(model, loaded.conversion, loaded.declared)
            return model
    raise TypeError(f"no family has the config {type(loaded.config).__name__}")
