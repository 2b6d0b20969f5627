"""One row of larger models, ours beside llama.cpp: `python -m reports.peers.shapes`.

Measured as in `compare`, in bfloat16. The results are kept apart from its own, because these shapes
need 7 GB of disk and 12 GB of memory, which not every machine has.
"""

from __future__ import annotations

from dataclasses import replace

from shared import cli
from shared.bench import kit, rows
from shared.bench.rows import Results

from . import compare
from .install import OURS

KIND, NAME = "peers_shapes", "reports.peers.shapes"
FULL = replace(
    compare.FULL, models=("Qwen/Qwen3-0.6B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    dtypes=("bfloat16",), engines=(OURS, "llama.cpp"), prefills=(), answers=((1, 64),), load=None,
)  # fmt: skip


def headline(results: Results) -> str:
    cells = compare.mine("cells", results)
    return "; ".join(f"{row['model']}: {compare.against(row)}" for row in cells)


COLUMNS = compare.COLUMNS | {
    "proved": lambda row: row.proof if row.variant in row.group["proof"] else ""
}
HEADER = "model | dtype | engine | tok/s | of the bound | memory, GB/s | proved"
TABLES = rows.tables(COLUMNS, f"larger < cells: {HEADER}")
BENCHMARK = kit.Benchmark(KIND, __doc__, FULL, compare.run, TABLES, {}, headline, module=NAME)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
