"""Which engine runs: `--engine auto` takes the newest that is right on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shared import cli, linear, registry
from shared.errors import UserError

from .settings import AUTO, KERNELS, PAGED


@dataclass
class Choice:
    """An engine by its name for --engine, and why a faster one does not run here, if so."""

    name: str
    automatic: bool = False
    reason: str = ""

    def linear(self, wanted: str) -> str:
        """The --linear of this engine, where `wanted` was given: kernels lay the weights out
        themselves."""
        return "plain" if self.name == KERNELS else wanted

    def make(self, loaded: cli.Loaded, wanted: str, **options: Any) -> Any:
        """The engine for the model, which no other may use. If it does not support the model and
        was chosen automatically, stage 05's, with the linear layers of --linear `wanted`."""
        try:
            kernels = {"insist": True, "release": True} if self.name == KERNELS else {}
            make = registry.load(registry.ENGINES[self.name])
            return make(loaded.model, **kernels, **options)
        except UserError as error:
            if not (self.automatic and self.name == KERNELS):
                raise
            self.name, self.reason = PAGED, str(error)
        linear.optimize(loaded.model, wanted)
        return self.make(loaded, wanted, **options)


@dataclass
class Served:
    """What the server runs: an engine with its model, how it was chosen, and the sampling options
    of requests that do not give them."""

    engine: Any
    loaded: cli.Loaded
    choice: Choice
    defaults: dict[str, Any]
    drafts: Any = None  # what the engine counts of its drafts, if it makes any


def choose(name: str, dtype: torch.dtype, device: torch.device) -> Choice:
    """The engine for --engine `name`; AUTO takes the kernels where they run correctly.
    Raises UserError for one that cannot run here."""
    if name == PAGED:
        return Choice(PAGED)
    why = registry.load(registry.TRIALS[KERNELS])(dtype, device)
    if why and name == KERNELS:
        raise UserError(f"{why} Use --engine {AUTO} to get one that runs here.")
    return Choice(PAGED if why else KERNELS, name == AUTO, why)
