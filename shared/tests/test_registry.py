"""Every name in the tables of shared/registry.py leads to what the table promises."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import catalog, models, registry
from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config
from shared.paths import ROOT

TABLES = {
    name: table for name, table in vars(registry).items() if name.isupper() and type(table) is dict
}
ENTRIES = [(name, key) for name, table in TABLES.items() for key in table]


def arguments(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def engines(make, tiny):
    engine = make(models.load_model(tiny), contexts=2)
    for name in ("generate", "stream"):
        assert callable(getattr(engine, name))
    later = [hasattr(engine, name) for name in ("add", "abort", "step", "run")]
    assert all(later) or not any(later[:3])


def configs(read, tiny):
    assert arguments(read)[1:] == ["name", "source"]


def loaders(load, tiny):
    assert arguments(load) == ["checkpoint", "device", "dtype"]


def shapes(table, tiny):
    for name, config in table.items():
        assert isinstance(config, Config) and config.family in registry.MODELS
        assert config.name == name


def formats(module, tiny):
    assert module.KIND and not module.reads(ROOT / "README.md")
    assert all(map(callable, [module.open, *module.NAMES.values()]))


def weights(change, tiny):
    assert arguments(change) == ["checkpoint", "weights"]


def caches(cache, tiny):
    assert arguments(cache)[:6] == [
        *("config", "blocks", "block_size", "swap_blocks", "dtype", "device")
    ]


def kernels(backend, tiny):
    assert all(map(callable, (backend.cache, backend.runner, backend.sample_tokens)))


def trials(reason, tiny):
    assert arguments(reason) == ["dtype", "device"]


def drafts(speculate, tiny):
    assert len(arguments(speculate)) == 5


def forms(kind, tiny):
    for name in ("prepare", "conversation", "answer", "chat_body", "completion_body"):
        assert hasattr(kind, name)


PROTOCOLS = {
    "ENGINES": engines,
    "CONFIGS": configs,
    "MODELS": loaders,
    "SHAPES": shapes,
    "FORMATS": formats,
    "WEIGHTS": weights,
    "CACHES": caches,
    "KERNELS": kernels,
    "KERNEL_CACHES": caches,
    "TRIALS": trials,
    "DRAFTS": drafts,
    "FORMS": forms,
}


@pytest.mark.parametrize(("table", "key"), ENTRIES, ids=[f"{t}-{k}" for t, k in ENTRIES])
def test_every_name_is_found_and_keeps_its_protocol(table, key, tiny):
    if "stage13" in TABLES[table][key]:
        pytest.importorskip("triton")
    PROTOCOLS[table](registry.load(TABLES[table][key]), tiny)
    assert TABLES.keys() == PROTOCOLS.keys()


def test_a_config_of_every_family_makes_its_model(tiny):
    config = catalog.presets()["HuggingFaceTB/SmolLM2-135M"]
    assert {tiny.config.family, config.family} == registry.MODELS.keys()
    sizes: Any = {"vocab_size": 64, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_kv_head": 1}
    small = replace(config, **sizes | {"n_inner": 8, "head_dim": 8})
    for shape in (tiny.config, small):
        model = models.load_model(Checkpoint(shape, random_tensors(shape)))
        assert model.config == shape and model.dtype == torch.float32


def test_nothing_else_in_the_ground_imports_a_stage_by_name():
    for path in (ROOT / "shared").glob("*.py"):
        if path.name != "registry.py":
            assert "import_module" not in path.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) stage\d", path.read_text(), re.MULTILINE)
