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
from typing import Any

from shared import models
from shared.paths import discover

AUTO = "auto"
OFF = "off"
KV_DTYPES = ("float32", "bfloat16")  # that need no cache of a later stage


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
    formats: further files and names of models: a `shared.models.Format`.
    weights: values of --weights, and the module with change(checkpoint, value), which changes
        a loaded checkpoint so that its model has such weights.
    drafts: values of --speculate, and the module with speculate(engine, value, count, model), which
        makes of stage 05's engine, or a later one, one that verifies drafts.
    caches: caches by their dtype, such as "int8"; each module has a CACHE for stage 05's engine,
        and KERNEL_CACHES for stage 09's, by type of device.
    forms: answers in a given form, for the server: the module has a class `Forms`, as
        stage06_serving/forms.py describes it.
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
    weights: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    forms: str = ""

    def load(self, module: str) -> ModuleType:
        """A module of the stage."""
        return import_module(f"{self.stage}.{module}")


def offers() -> list[Offer]:
    """The offers of all stages, in reading order."""
    packages = map(import_module, discover())
    return [package.OFFER for package in packages if hasattr(package, "OFFER")]


def formats() -> list[Any]:
    """The formats of models that all stages bring."""
    return [offer.load(offer.formats) for offer in offers() if offer.formats]


def weight_formats() -> list[str]:
    """The values of --weights."""
    return [AUTO, *dict.fromkeys(value for offer in offers() for value in offer.weights)]


def kv_formats() -> list[str]:
    """The values of --kv-dtype."""
    return [AUTO, *KV_DTYPES, *dict.fromkeys(value for offer in offers() for value in offer.caches)]


def drafters() -> list[str]:
    """The values of --speculate."""
    return [OFF, *dict.fromkeys(value for offer in offers() for value in offer.drafts)]


def speculate(engine: Any, kind: str, count: int, draft: Any = None) -> Any:
    """The engine with drafts of `kind`, at most `count` in a pass of a request. draft: a model.
    Raises UserError if it does not fit."""
    brought = next(offer for offer in offers() if kind in offer.drafts)
    return brought.load(brought.drafts[kind]).speculate(engine, kind, count, draft)


def caches_of(dtype: Any) -> ModuleType | None:
    """The module with the caches that a stage offers for this dtype of PyTorch; None: the caches of
    stages 05 and 09 keep it."""
    name = str(dtype).removeprefix("torch.")
    brought = [offer for offer in offers() if name in offer.caches]
    return brought[-1].load(brought[-1].caches[name]) if brought else None


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
