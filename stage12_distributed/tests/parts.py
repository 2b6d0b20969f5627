"""Models that the ranks of a test load, adapters, and ranks that are threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared import models
from shared.config import Config
from shared.testing import random_checkpoint
from stage01_forward.attention import Recompute
from stage12_distributed import lora
from stage12_distributed.tensor.collectives import Collectives
from stage12_distributed.tensor.shard import shard

ODD = Config(101, 64, 24, 2, 3, name="odd")  # 3 heads, 101 tokens, 96 channels in the MLP


def random_model(config: Config, conversion: Any = None) -> Any:
    checkpoint = random_checkpoint(config, spread=24)
    checkpoint.conversion = conversion
    return models.load_model(checkpoint, dtype=torch.float64)


def stored(name: str) -> Any:
    """An embedded model, or a folder's, in float64."""
    return models.load_model(models.load(name), dtype=torch.float64)


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    """(N, V), of one pass without a cache."""
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend))


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    seed: int = 0,
    zero: bool = False,
    **fields: Any,
) -> Path:
    """A GPT-2's adapter of random numbers for layers of `shapes` (out, in), as PEFT saves it; its
    B is `zero`, or it makes another model. fields: of its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out, width) in shapes.items():
        key = f"base_model.model.transformer.{name}.lora_"
        tensors[f"{key}A.weight"] = torch.randn(4, width, generator=generator)
        b = torch.randn(out, 4, generator=generator)
        tensors[f"{key}B.weight"] = torch.zeros_like(b) if zero else b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / lora.WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "bias": "none", "use_rslora": False}
    (folder / lora.CONFIG).write_text(json.dumps(config | fields), encoding="utf-8")
    return folder


class ThreadCollectives(Collectives):
    """Ranks that are threads of one process and meet at barriers."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self.table, self.barrier = table, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self.table[self.rank] = x.clone()
        self.barrier.wait(60)
        parts = list(self.table)
        self.barrier.wait(60)
        assert len({part.shape for part in parts}) == 1  # as gloo needs them
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self._all(x)
        return parts if self.rank == 0 else []


def in_threads(config: Config, ranks: int, ids: list[int], make: Any = random_model) -> list[Any]:
    """[(model, logits of all `ids` on rank 0)] by rank, of a model split into `ranks` parts."""
    table, barrier = [None] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> tuple[Any, Tensor]:
        model = make(config)
        shard(model, ThreadCollectives(rank, ranks, table, barrier))
        return model, logits_of(model, ids)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
