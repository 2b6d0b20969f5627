"""Every name in the tables of shared/registry.py leads to what the table promises."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import catalog, models, registry
from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config

TABLES: dict[str, Any] = {
    name: value if isinstance(value, dict) else {"": value}
    for name, value in vars(registry).items()
    if name.isupper()
}
ENTRIES = [(name, key) for name, table in TABLES.items() for key in table]
ARGUMENTS: dict[str, list[Any]] = {  # the first ones, of what a table's entries name
    "ENGINES": ["model", "contexts"],
    "CONFIGS": [..., "name", "source"],
    "MODELS": ["checkpoint", "device", "dtype"],
    "WEIGHTS": ["checkpoint", "weights"],
    "KERNEL_CACHES": ["config", "blocks", "block_size", "swap_blocks", "dtype", "device"],
    "TRIALS": ["dtype", "device"],
    "DRAFTS": [..., ..., ..., ..., ...],
}
ATTRIBUTES = {
    "SAMPLING": ("check_vocabulary",),
    "SHAPES": ("items",),
    "QUANTIZED": ("KIND", "NAMES", "reads", "open"),
    "KERNELS": ("cache", "runner", "sample_tokens"),
    "FORMS": ("prepare", "conversation", "answer", "chat_body"),
}


@pytest.mark.parametrize(("table", "key"), ENTRIES, ids=[f"{t}-{k}" for t, k in ENTRIES])
def test_every_name_is_found_and_keeps_its_protocol(table, key):
    if "stage13" in TABLES[table][key]:
        pytest.importorskip("triton")
    value = registry.load(TABLES[table][key])
    assert TABLES.keys() == ARGUMENTS.keys() | ATTRIBUTES.keys()
    assert all(hasattr(value, name) for name in ATTRIBUTES.get(table, ()))
    if wanted := ARGUMENTS.get(table):
        names = list(inspect.signature(value).parameters)
        assert len(names) >= len(wanted)
        assert all(w in (n, ...) for n, w in zip(names, wanted, strict=False)), names


@pytest.mark.parametrize("name", registry.ENGINES)
def test_an_engine_generates_and_from_stage_04_on_takes_requests(name, tiny_model):
    engine = registry.load(registry.ENGINES[name])(tiny_model, contexts=2)
    assert callable(engine.generate) and callable(engine.stream)
    later = [hasattr(engine, name) for name in ("add", "abort", "step", "run")]
    assert all(later) or not any(later[:3])


def test_a_config_of_every_family_makes_its_model(tiny):
    for name, config in catalog.presets().items():
        assert isinstance(config, Config) and config.name == name
    config = catalog.presets()["HuggingFaceTB/SmolLM2-135M"]
    assert {tiny.config.family, config.family} == registry.MODELS.keys()
    sizes: Any = {"vocab_size": 64, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_kv_head": 1}
    small = replace(config, **sizes | {"n_inner": 8, "head_dim": 8})
    for shape in (tiny.config, small):
        model = models.load_model(Checkpoint(shape, random_tensors(shape)))
        assert model.config == shape and model.dtype == torch.float32
