"""The next tokens of a step: stage 01's `choose`, with C for those that are drawn (sample.c)."""

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
from .operations import fields

SOURCE = ROOT / "stage09_kernels" / "fast" / "sample.c"
NUMBERS = "temperatures", "min_ps", "top_ps", "darts", "top_ks", "ids"  # of each row


class Draw(ctypes.Structure):
    """`struct draw` of sample.c."""

    _fields_ = fields("scores " + " ".join(NUMBERS), "count stride")


def choose(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row of scores (R, V), which are overwritten; -1 where they are NaN or
    infinite."""
    numbers = np.zeros((len(NUMBERS), len(rows)))  # of 8 bytes each
    temperatures, min_ps, top_ps, darts = numbers[:4]
    top_ks, ids = numbers[4:].view(np.int64)
    numpy_scores = scores.numpy()
    best = numpy_scores.argmax(-1)  # of several the first, and NaN before any number
    ids[:] = np.where(np.isfinite(numpy_scores[np.arange(len(rows)), best]), best, -1)
    for i, row in enumerate(rows):
        p = row.params
        if not p.greedy:
            temperatures[i] = max(p.temperature, MIN_TEMPERATURE)
            min_ps[i], top_ps[i], darts[i] = p.min_p, p.top_p, row.dart()
            top_ks[i] = min(p.top_k, scores.shape[1])
    start, line = numbers.ctypes.data, numbers.strides[0]
    pointers = {name: start + i * line for i, name in enumerate(NUMBERS)}
    call = Draw(scores.data_ptr(), **pointers, count=scores.shape[1], stride=scores.stride(0))
    sizes = tuple(f"{name}={scores.itemsize}" for name in ("REAL", "WEIGHT", "CACHE"))
    if temperatures.any():
        library.call(library.load(SOURCE, sizes).draw, ctypes.byref(call), len(ids))
    return ids.tolist()


sample_tokens = partial(engine.sample_tokens, choose=choose)
