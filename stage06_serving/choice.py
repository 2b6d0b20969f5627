"""Which engine runs: `--engine auto` takes the newest that is right on this machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from shared import cli, linear
from shared.errors import UserError

from .settings import AUTO, engines

PAGED = "paged"  # runs everywhere
log = logging.getLogger(__name__)


@dataclass
class Choice:
    """An engine by its name for --engine, and why a faster one does not run here, if so."""

    name: str
    automatic: bool = False
    reason: str = ""

    @property
    def stage(self) -> str:
        return engines()[self.name]

    @property
    def made(self) -> Any:
        """The module make.py of the engine's stage, from stage 05 on."""
        return import_module(f"{self.stage}.make") if self.stage >= "stage05" else None

    def linear(self, wanted: str) -> str:
        """The --linear of this engine, where `wanted` was given."""
        return getattr(self.made, "LINEAR", wanted)

    def make(self, loaded: cli.Loaded, wanted: str, **options: Any) -> Any:
        """The engine for the model, which no other may use. If it does not support the model and
        was chosen automatically, stage 05's, with the linear layers of --linear `wanted`."""
        alone = getattr(self.made, "ALONE", {})
        try:
            insist = {"insist": True} if alone else {}
            return self.made.make(loaded.model, **insist, **alone, **options)
        except UserError as error:
            if not (self.automatic and alone):
                raise
            self.name, self.reason = PAGED, str(error)
        linear.optimize(loaded.model, wanted)
        return self.made.make(loaded.model, **options)


def choose(name: str, dtype: torch.dtype, device: torch.device) -> Choice:
    """The engine for --engine `name`. If not every machine can run an engine, its stage's make.py
    has a function `unsupported_reason`. Raises UserError for one that cannot run here."""
    reason = ""
    for newest, stage in reversed(engines().items()):
        made: Any = import_module(f"{stage}.make") if stage > "stage06" else None
        if name in (newest, AUTO) and hasattr(made, "unsupported_reason"):
            why = made.unsupported_reason(dtype, device)
            if not why:
                return Choice(newest, name == AUTO, reason)
            if name == newest:
                raise UserError(f"{why} Use --engine {AUTO} to get one that runs here.")
            reason = reason or why
    return Choice(PAGED if name == AUTO else name, name == AUTO, reason)


def faster(choice: Choice, loaded: cli.Loaded) -> str:
    """What would make the engine faster, in a line; "" if nothing is known."""
    if choice.reason:
        return choice.reason
    if choice.name == PAGED and not choice.automatic:
        return f"--engine {AUTO} runs stage 09's kernels, where they are right"
    if loaded.dtype == torch.float32 and cli.has_bfloat16(loaded.device):
        return "--dtype bfloat16 halves the memory to read; its rounding may choose another token"
    return ""
