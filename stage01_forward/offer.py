"""Offers: what a stage brings to the server and to the tools that drive all stages.

A stage with an engine, a family of models or kernels defines `OFFER` in its `__init__.py`. Stages
are found by their folders, so a new one runs everywhere without an edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from shared.paths import discover


@dataclass(frozen=True)
class Offer:
    """What `stage` brings. `engine`, `trial`, `family` and `backends` name modules of the stage,
    which only `load` imports: PyTorch takes seconds, and a student's copy may replace them.

    engine: has make(model, contexts=None, **options) -> Engine, with memory for `contexts` whole
        contexts, and answer(engine, prompts, sampling) -> (place, Token)..., which answers all
        prompts as fast as the engine can.
    served: the engine's name for the server, which gives `make` the options of stage 05's; "" if
        the server does not run it, or adapts it itself.
    trial: has unsupported_reason(dtype, device) -> str, if not every machine can run the engine.
    linear: the value of --linear that the engine needs; "" for any.
    alone: options of `make` in a program that runs only this engine.
    family: has FAMILY: models, for all engines.
    backends: kernels by type of device; each module has a BACKEND.
    """

    stage: str
    engine: str = ""
    served: str = ""
    trial: str = ""
    linear: str = ""
    alone: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)

    def load(self, module: str) -> ModuleType:
        """A module of the stage."""
        return import_module(f"{self.stage}.{module}")


def offers() -> list[Offer]:
    """The offers of all stages, in reading order."""
    packages = map(import_module, discover())
    return [package.OFFER for package in packages if hasattr(package, "OFFER")]
