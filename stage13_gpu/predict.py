"""A decode step on paper, by the makers' data sheets, whose rates no program reaches. It takes the
longest of three times:

    bytes        weights, keys and values, over the bandwidth
    operations   over the rate of the tensor cores
    launches     each kernel has to be started, by Python one by one, or by a captured graph
"""

from __future__ import annotations

import torch

from shared.config import Config
from shared.roofline import Limits, forward_cost

from .naive import PIECE

# GB/s; GFLOP/s in float32, and in the half formats on tensor cores, dense
GPUS = {
    "H100 SXM": {"memory": 3350, "float32": 67e3, "bfloat16": 989e3},
    "A100 80 GB": {"memory": 2039, "float32": 19.5e3, "bfloat16": 312e3},
    "L4": {"memory": 300, "float32": 30.3e3, "bfloat16": 121e3},
    "T4": {"memory": 320, "float32": 8.1e3, "bfloat16": 65e3},  # float16 in place of it
}
LAUNCH = 5e-6  # seconds for Python and the driver to start one kernel: assumed
NODE, REPLAY = 1e-6, 10e-6  # seconds from a kernel of a graph to the next, and to start it: assumed


def launches(config: Config, context: int) -> int:
    """Kernels of a decode step with this runner: `tests/test_predict.py` counts them."""
    attention = 2 if context < PIECE else 3  # store, decode, and merge
    products = 4  # q k v, projection, up, down
    between = 3  # two norms, and GELU or a gate
    ends = 8 if hasattr(config, "rope") else 7  # embedding and positions; wanted rows and head
    return config.n_layer * (attention + products + between) + ends


def seconds(
    config: Config, dtype: torch.dtype, rows: int, context: int, gpu: Limits
) -> dict[str, float]:
    """Of a decode step of `rows` rows with `context` keys each: what each part takes at least, and
    the step without and with a graph."""
    times = forward_cost(config, dtype, 1, context, rows=rows).times(gpu, dtype)
    parts = {"bytes": times["memory"], "operations": times["compute"]}
    kernels, least = launches(config, context), max(parts.values())
    return parts | {
        "eager": max(least, kernels * LAUNCH),
        "graph": max(least, kernels * NODE) + REPLAY,
    }
