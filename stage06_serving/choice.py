"""Which engine runs: `--engine auto` takes the newest that is right on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shared import cli, linear, registry
from shared.errors import UserError

from .settings import AUTO, ENGINES, PAGED


@dataclass
class Choice:
    """An engine by its name for --engine, and why a faster one does not run here, if so."""

    name: str
    automatic: bool = False
    reason: str = ""

    def linear(self, wanted: str) -> str:
        """The --linear of this engine, where `wanted` was given: kernels lay the weights out
        themselves."""
        return "plain" if self.name in registry.TRIALS else wanted

    def make(self, loaded: cli.Loaded, wanted: str, **options: Any) -> Any:
        """The engine for the model, which no other may use. If it does not support the model and
        was chosen automatically, stage 05's, with the linear layers of --linear `wanted`."""
        tried = self.name in registry.TRIALS
        try:
            kernels = {"insist": True, "release": True} if tried else {}
            make = registry.load(registry.ENGINES[self.name])
            return make(loaded.model, **kernels, **options)
        except UserError as error:
            if not (self.automatic and tried):
                raise
            self.name, self.reason = PAGED, str(error)
        linear.optimize(loaded.model, wanted)
        return self.make(loaded, wanted, **options)


def choose(name: str, dtype: torch.dtype, device: torch.device) -> Choice:
    """The engine for --engine `name`; AUTO is the newest with a trial that this machine passes.
    Raises UserError for one that cannot run here."""
    reason = ""
    for newest in reversed(ENGINES):
        if newest in registry.TRIALS and name in (newest, AUTO):
            why = registry.load(registry.TRIALS[newest])(dtype, device)
            if not why:
                return Choice(newest, name == AUTO, reason)
            if name == newest:
                raise UserError(f"{why} Use --engine {AUTO} to get one that runs here.")
            reason = reason or why
    return Choice(PAGED if name == AUTO else name, name == AUTO, reason)
