"""Which stages there are. The only place where `shared` reaches a stage, and it does so by name at run time:
nothing in `shared` imports a stage when it is imported itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def discover() -> list[str]:
    """The stage packages in reading order: ["stage01_forward", "stage02_kv_cache", ...]."""
    return sorted(folder.name for folder in ROOT.glob("stage[0-9][0-9]_*") if (folder / "__init__.py").exists())


def engines() -> dict[str, Any]:
    """The Engine class of every stage that has one, in reading order."""
    names = [name for name in discover() if (ROOT / name / "engine.py").exists()]
    return {name: importlib.import_module(f"{name}.engine").Engine for name in names}


def oracle(model: Any) -> Any:
    """The engine of the first stage, which recomputes everything: what it says is right by definition."""
    return engines()[discover()[0]](model)


def sampling_params() -> Any:
    """The class SamplingParams, which the first stage defines and all others take."""
    return importlib.import_module(f"{discover()[0]}.sampling").SamplingParams


def load_model(checkpoint: Any, **options: Any) -> Any:
    """The one model of all stages, which the first defines."""
    return importlib.import_module(f"{discover()[0]}.model").load_model(checkpoint, **options)
