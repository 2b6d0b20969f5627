"""Models by name: their checkpoints, and what runs them. Imports no torch before it loads one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registry
from .catalog import AUTO

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint


def load(name: str, random_weights: bool = False, seed: int = 0, weights: str = AUTO) -> Checkpoint:
    """`checkpoint.load`. weights: of --weights, in place of how the checkpoint stores them."""
    from . import checkpoint

    loaded = checkpoint.load(name, random_weights, seed)
    if weights != AUTO:
        registry.load(registry.WEIGHTS[weights])(loaded, weights)
    return loaded


def load_model(
    loaded: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """The model of a checkpoint. It offers what all engines use: `config`, `device`, `dtype`, a
    call with (ids, positions, attend), and `logits`. Its linear layers are those of the
    checkpoint's conversion."""
    from .conversion import convert

    make = registry.load(registry.MODELS[loaded.config.family])
    model = make(loaded, device=device, dtype=dtype)
    if loaded.conversion:
        convert(model, loaded.conversion)
    return model
