"""Kernels by type of device: a backend brings the parts of an engine that run on one.

shared/registry.py names them: the CPU's is this stage's, and stage 13 adds one for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared import registry
from shared.config import Config
from shared.errors import UserError
from stage04_continuous.engine import Sampled
from stage04_continuous.runner import AnyRunner

SMALL = Config(211, 64, 48, 2, 3)


class NoKernels(UserError):
    """There is no kernel for this model or machine, or no compiler that works here."""


@dataclass(frozen=True)
class Backend:
    """What `make` plugs into stage 05's engine.

    cache: takes the arguments of PagedCache. Raises NoKernels for a config, dtype or device without
        kernels.
    runner: takes a model, such a cache, and `release`: whether the model may drop the weights that
        the kernels keep in their own layout.
    sample_tokens: stage 04's, or one that draws the same tokens.
    """

    cache: Callable[..., Any]
    runner: Callable[..., AnyRunner]
    sample_tokens: Callable[..., list[Sampled]]


def backend_of(device: torch.device | str) -> Backend:
    """The kernels for `device`. Raises NoKernels if there are none."""
    kind = torch.device(device).type
    if kind not in registry.KERNELS:
        known = " and ".join(registry.KERNELS)
        raise NoKernels(f"There are no kernels for {kind}, only for {known}.")
    backend: Backend = registry.load(registry.KERNELS[kind])
    return backend


def unsupported_reason(dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Why the kernels do not run models in `dtype` on `device`, in a sentence; "" if they do, and
    then they are compiled."""
    try:
        backend_of(device).cache(SMALL, 1, dtype=dtype, device=device)
    except NoKernels as error:
        return str(error)
    return ""
