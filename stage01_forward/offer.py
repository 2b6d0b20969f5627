"""Offers: what a stage brings to the server and to the tools that drive all stages.

A stage with an engine, a family of models, kernels or forms of answers defines `OFFER` in its
`__init__.py`. Stages are found by their folders, so a new one runs everywhere without an edit.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shared import models
from shared.paths import discover

if TYPE_CHECKING:
    import torch

AUTO = "auto"
KV_DTYPES = ("float32", "bfloat16")  # that need no cache of a later stage


@dataclass(frozen=True)
class Offer:
    """What `stage` brings. `engine`, `trial`, `family` and `backends` name modules of the stage,
    which only `load` imports: PyTorch takes seconds, and a student's copy may replace them.

    engine: has make(model, contexts=None, **options) -> Engine, with memory for `contexts` whole
        contexts, and answer(engine, prompts, sampling) -> (place, Token)..., which answers all
        prompts as fast as the engine can.
    served: the engine's name for the server, which gives `make` the options of stage 05's; "" if
        the server does not run it.
    trial: has unsupported_reason(dtype, device) -> str, if not every machine can run the engine.
    linear: the value of --linear that the engine needs; "" for any.
    alone: options of `make` in a program that runs only this engine.
    family: has FAMILY: models, for all engines.
    backends: kernels by type of device; each module has a BACKEND.
    formats: further files and names of models: a `shared.models.Format`.
    values: of options of the command line, which this stage adds: by option and value, the module
        for it. "weights": it has change(checkpoint, value), which changes a loaded checkpoint so
        that its model has such weights. "kv_dtype": CACHE for stage 05's engine, and KERNEL_CACHES
        for stage 09's, by type of device. For other options, what the stage with the option calls.
    forms: answers in a given form, for the server: the module has a class `Forms`, as
        stage06_serving/service.py describes it.
    """

    stage: str
    engine: str = ""
    served: str = ""
    trial: str = ""
    linear: str = ""
    alone: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    formats: str = ""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forms: str = ""

    def load(self, module: str) -> ModuleType:
        """A module of the stage."""
        return import_module(f"{self.stage}.{module}")


def offers() -> list[Offer]:
    """The offers of all stages, in reading order."""
    packages = map(import_module, discover())
    return [package.OFFER for package in packages if hasattr(package, "OFFER")]


def formats() -> list[models.Format]:
    """The formats of models that all stages bring."""
    return [offer.load(offer.formats) for offer in offers() if offer.formats]


def values(option: str) -> list[str]:
    """The values of an option that stages add."""
    return list(dict.fromkeys(v for offer in offers() for v in offer.values.get(option, ())))


def module_for(option: str, value: str) -> ModuleType | None:
    """The newest stage's module for a value of an option; None if no stage adds it."""
    brought = [offer for offer in offers() if value in offer.values.get(option, ())]
    return brought[-1].load(brought[-1].values[option][value]) if brought else None


def weight_formats() -> list[str]:
    """The values of --weights."""
    return [AUTO, *values("weights")]


def kv_formats() -> list[str]:
    """The values of --kv-dtype."""
    return [AUTO, *KV_DTYPES, *values("kv_dtype")]


def caches_of(dtype: torch.dtype) -> ModuleType | None:
    """The module with the caches that a stage offers for this dtype; None: the caches of stages 05
    and 09 keep it."""
    return module_for("kv_dtype", str(dtype).removeprefix("torch."))


ABOUT_WEIGHTS = (
    "format of the weights; auto is that of the file; a number format is also the --dtype, and "
    "computes what whole numbers in the file stand for; others round while the model loads"
)
ABOUT_KV = "format of keys and values in memory; auto is the --dtype"


def add_options(parser: argparse.ArgumentParser) -> None:
    """--weights and --kv-dtype: formats that later stages bring."""
    group = parser.add_argument_group("formats")
    group.add_argument("--weights", choices=weight_formats(), default=AUTO, help=ABOUT_WEIGHTS)
    group.add_argument("--kv-dtype", choices=kv_formats(), default=AUTO, help=ABOUT_KV)


models.register(formats)
