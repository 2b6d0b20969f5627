"""Samples the next tokens of a step in one call, for the usual options (see sample.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.paths import ROOT
from stage01_forward.sampling import MIN_TEMPERATURE
from stage04_continuous import engine
from stage04_continuous.engine import Sampled
from stage04_continuous.request import Request

from . import library

SOURCE = ROOT / "stage09_kernels" / "sample.c"


class Draw(ctypes.Structure):
    """`struct draw` of sample.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "temperatures", "top_ps", "darts")),
        *((name, ctypes.c_void_p) for name in ("top_ks", "ids")),
        *((name, ctypes.c_int64) for name in ("count", "stride")),
    ]


def usual(request: Request) -> bool:
    """Whether the request asks for no more than temperature, top_k and top_p."""
    p = request.sampling
    changed = p.penalised or p.logit_bias or len(request.output.token_ids) < p.min_tokens
    return not changed and p.min_p == 0 and p.logprobs is None


def draw(requests: Sequence[Request], logits: Tensor, eos_ids: Sequence[int]) -> list[Sampled]:
    """Like stage 04's `draw`, which still samples for requests that are not `usual`. Overwrites
    logits."""
    rows = [row for row, request in enumerate(requests) if usual(request)]
    ids = np.full(len(requests), -1)
    if rows:
        scores = logits if len(rows) == len(logits) else logits[rows]
        ids[rows] = tokens(scores, [requests[row] for row in rows])
    pairs = zip(requests, ids.tolist(), strict=True)
    found: list[Sampled] = [(request, id, None) for request, id in pairs if id >= 0]
    left = np.flatnonzero(ids < 0).tolist()
    if left:
        found += engine.draw([requests[row] for row in left], logits[left], eos_ids)
        found.sort(key=lambda one: requests.index(one[0]))
    return found


def tokens(scores: Tensor, requests: Sequence[Request]) -> np.ndarray:
    """The tokens (R,) of `usual` requests from their scores (R, V), which are overwritten with
    weights; -1 where scores are NaN or infinite."""
    options = [request.sampling for request in requests]
    drawn = [row for row, p in enumerate(options) if not p.greedy]
    given = np.zeros((3, len(requests)))
    top_ks, ids = np.zeros((2, len(requests)), np.int64)
    for row in drawn:
        p, generator = options[row], requests[row].generator
        dart = torch.rand(1, dtype=torch.float64, generator=generator).item()
        given[:, row] = max(p.temperature, MIN_TEMPERATURE), p.top_p, dart
        top_ks[row] = min(p.top_k, scores.shape[1])
    names = ("temperatures", "top_ps", "darts", "top_ks", "ids")
    arrays = dict(zip(names, (*given, top_ks, ids), strict=True))
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    stride, count = scores.stride(0), scores.shape[1]
    call = Draw(scores=scores.data_ptr(), count=count, stride=stride, **pointers)
    sizes = tuple(f"{name}={scores.itemsize}" for name in ("REAL", "WEIGHT", "CACHE"))
    library.call(library.load(SOURCE, sizes).draw, ctypes.byref(call), len(ids))
    return ids
