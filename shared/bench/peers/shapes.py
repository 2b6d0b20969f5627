"""One row of larger models, ours beside llama.cpp: `python -m shared.bench.peers.shapes`.

Measured as in `compare`, in bfloat16. The results are kept apart from its own: they take gigabytes
of memory and disk, which not every machine has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shared import cli
from shared.bench import kit, rows
from shared.bench.rows import Results

from . import compare
from .install import OURS
from .process import Failures

KIND, NAME = "peers_shapes", "shared.bench.peers.shapes"


@dataclass(frozen=True)
class Plan(compare.Plan):
    models: tuple[str, ...] = ("Qwen/Qwen3-0.6B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    dtypes: tuple[str, ...] = ("bfloat16",)
    engines: tuple[str, ...] = (OURS, "llama.cpp")
    prompt: int = 64
    answers: tuple[tuple[int, int], ...] = ((1, 64),)


QUICK = replace(Plan(), models=Plan.models[:1], answers=((1, 16),), rounds=1, tries=1)


def run(plan: Plan) -> dict[str, Any]:
    """Raises AssertionError for a wrong token of ours."""
    found: dict[str, Any] = {"cells": [], "versions": {}, "failed": Failures()}
    for model in plan.models:
        for dtype in plan.dtypes:
            asks = plan.asks[1:]  # without the prefill
            found["cells"] += compare.measured(plan, model, dtype, plan.engines, asks, found)
    return found


def headline(results: Results) -> str:
    found = compare.mine("cells", results)
    return "; ".join(f"{row['model']}: {compare.against(row)}" for row in found)


COLUMNS = compare.COLUMNS | {
    "proved": lambda row: row.proof if row.variant in row.group["proof"] else ""
}
HEADER = "model | dtype | engine | tok/s | of the bound | memory, GB/s | proved"
TABLES = rows.tables(COLUMNS, f"larger < cells: {HEADER}")
ABOUT = "Measures one row of larger models, ours beside llama.cpp: 7 GB of disk, 12 GB of memory."
BENCHMARK = kit.Benchmark(KIND, ABOUT, Plan(), QUICK, run, TABLES, {}, headline, NAME)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
