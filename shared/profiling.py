"""Where time goes, by PyTorch's profiler: the dominant operators of a run, for the benchmarks and
`python -m shared.course.profile`.

Profiling itself costs time, mostly around small operators: the shares are good to a few per cent.
For speeds, use the benchmarks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Before torch: its profiler announces itself on standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from torch.profiler import ProfilerActivity

from . import linear, measure

# Products with a weight: operator -> (place of x, place of the weight, whether the weight is (out,
# in)). Operators that only call one of these, as aten::linear does, are left out, or each product
# would count twice.
PRODUCTS = {
    "aten::addmm": (1, 2, False),
    "aten::mm": (0, 1, False),
    "aten::addmv_": (2, 1, True),
    "mkldnn::_linear_pointwise": (0, 1, True),
}

# A weight cut into pieces by rows, for a single row of x (linear.one_row): operator -> place of the
# pieces (P, out / P, in).
BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}


@dataclass
class Total:
    """All calls of one operator, or for products all calls with a weight of one shape."""

    operator: str
    kind: str  # "matrix-matrix", "matrix-vector", "attention" or "other"
    weight: tuple[int, int] | None = None  # (in, out)
    rows: tuple[int, int] = (0, 0)  # fewest and most rows of x
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0

    def describe(self, total_seconds: float, dtype: torch.dtype) -> dict[str, Any]:
        """This total as plain data, for a table or JSON."""
        fewest, most = self.rows
        product = None
        read = 0
        if self.weight:
            count = fewest if fewest == most else f"{fewest}..{most}"
            product = f"{count} x {self.weight[0]} -> {self.weight[1]}"
            read = self.calls * math.prod(self.weight) * dtype.itemsize
        timed = self.seconds > 0
        return {
            "operator": self.operator.split("::")[-1],
            "product": product,
            "kind": self.kind,
            "calls": self.calls,
            "seconds": self.seconds,
            "share": self.seconds / total_seconds if total_seconds else 0.0,
            "gb_s": read / self.seconds / 1e9 if self.weight and timed else None,
            "gflops": self.flops / self.seconds / 1e9 if self.weight and timed else None,
        }


def record(run: Callable[[], object], warmup: int = 1) -> Any:
    """Run `run` once under the profiler, after `warmup` runs without it; returns the finished
    torch.profiler.profile."""
    for _ in range(warmup):
        run()
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        run()
        measure.synchronize()
    return recorded


def dominant(
    recorded: Any, dtype: torch.dtype = torch.float32, rows: int = 10
) -> list[dict[str, Any]]:
    """The `rows` operators that took the most time, longest first; `dtype` is that of the weights.

    Each is {"operator", "product" ("1 x 768 -> 2304" or None), "kind", "calls", "seconds", "share"
    (0 to 1, of the time of all operators), "gb_s" (of weights read), "gflops"}; the last two are
    None where no weight is multiplied. An operator's time excludes that of operators it calls; on
    CUDA it is the time of its kernels.
    """
    entries = [
        entry
        for entry in recorded.key_averages(group_by_input_shape=True)
        if entry.device_type.name == "CPU"
    ]
    on_gpu = any(entry.self_device_time_total > 0 for entry in entries)
    totals: dict[tuple[str, str, tuple[int, int] | None], Total] = {}
    for entry in entries:
        kind, weight, count = _classify(entry.key, entry.input_shapes)
        total = totals.setdefault(
            (entry.key, kind, weight), Total(entry.key, kind, weight, (count, count))
        )
        total.rows = min(total.rows[0], count), max(total.rows[1], count)
        total.calls += entry.count
        microseconds = entry.self_device_time_total if on_gpu else entry.self_cpu_time_total
        total.seconds += microseconds / 1e6
        total.flops += 2 * entry.count * count * math.prod(weight or (0,))
    everything = sum(total.seconds for total in totals.values())
    ranked = sorted(totals.values(), key=lambda total: -total.seconds)[:rows]
    return [total.describe(everything, dtype) for total in ranked]


def profile(
    run: Callable[[], object], rows: int = 10, dtype: torch.dtype = torch.float32, warmup: int = 1
) -> list[dict[str, Any]]:
    """Run `run` under the profiler, after `warmup` runs without it; returns its dominant operators,
    as `dominant` does."""
    return dominant(record(run, warmup), dtype, rows)


def _classify(operator: str, shapes: list[list[int]]) -> tuple[str, tuple[int, int] | None, int]:
    """The kind of an operator; for a product with a weight also its (in, out) and the rows that are
    multiplied."""
    if "attention" in operator:
        return "attention", None, 0
    if (
        operator in BATCHED
        and len(pieces := shapes[BATCHED[operator]]) == 3
        and shapes[BATCHED[operator] + 1][-1] == 1
    ):
        return "matrix-vector", (pieces[2], pieces[0] * pieces[1]), 1
    if operator not in PRODUCTS:
        return "other", None, 0
    x_at, weight_at, out_first = PRODUCTS[operator]
    x, weight = shapes[x_at], shapes[weight_at]
    if len(weight) != 2 or not x:
        return "other", None, 0
    count = math.prod(x[:-1])
    size = (weight[1], weight[0]) if out_first else (weight[0], weight[1])
    # The packed layer runs a single row with three rows of zeros below it (linear.FEWEST_ROWS).
    few = linear.FEWEST_ROWS if operator.startswith("mkldnn") else 1
    return "matrix-vector" if count <= few else "matrix-matrix", size, count
