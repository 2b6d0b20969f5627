"""The next tokens of a step in one call: stage 01's `choose` in C (see sample.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from shared.paths import ROOT
from stage01_forward.generation import Row
from stage01_forward.sampling import MIN_TEMPERATURE
from stage04_continuous import engine

from . import library

SOURCE = ROOT / "stage09_kernels" / "fast" / "sample.c"


class Draw(ctypes.Structure):
    """`struct draw` of sample.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "temperatures", "min_ps", "top_ps")),
        *((name, ctypes.c_void_p) for name in ("darts", "top_ks", "ids")),
        *((name, ctypes.c_int64) for name in ("count", "stride")),
    ]


def choose(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row of scores (R, V), which are overwritten; -1 where they are NaN or
    infinite."""
    options = np.zeros((4, len(rows)))
    top_ks, ids = np.zeros((2, len(rows)), np.int64)
    for i, row in enumerate(rows):
        p = row.params
        if not p.greedy:
            options[:, i] = max(p.temperature, MIN_TEMPERATURE), p.min_p, p.top_p, row.dart()
            top_ks[i] = min(p.top_k, scores.shape[1])
    names = ("temperatures", "min_ps", "top_ps", "darts", "top_ks", "ids")
    arrays = dict(zip(names, (*options, top_ks, ids), strict=True))
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    stride, count = scores.stride(0), scores.shape[1]
    call = Draw(scores=scores.data_ptr(), count=count, stride=stride, **pointers)
    sizes = tuple(f"{name}={scores.itemsize}" for name in ("REAL", "WEIGHT", "CACHE"))
    library.call(library.load(SOURCE, sizes).draw, ctypes.byref(call), len(ids))
    return ids.tolist()


sample_tokens = partial(engine.sample_tokens, choose=choose)
