"""Stage 09: stage 05's engine with a cache, a runner and a sampler of kernels."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from shared import registry
from stage04_continuous.engine import Engine
from stage05_paged.engine import make as make_paged

from .backend import Backend, NoKernels, backend_of
from .cache import KernelCache
from .runner import KernelRunner
from .sample import sample_tokens

log = logging.getLogger(__name__)
BACKEND = Backend(KernelCache, KernelRunner, sample_tokens)  # of CPUs


def make(
    model: Any,
    contexts: int | None = None,
    *,
    insist: bool = False,
    release: bool = False,
    **options: Any,
) -> Engine:
    """Stage 05's engine with the kernels; or without them, after a warning, if they do not support
    this machine or model.

    insist: raise NoKernels instead. release: only this engine uses the model, so its weights are
        kept once.
    """
    try:
        kernels = backend_of(model.device)
        return make_paged(
            model,
            contexts,
            make_cache=_cache_type(model, options.get("dtype")) or kernels.cache,
            make_runner=partial(kernels.runner, release=release),
            sample_tokens=kernels.sample_tokens,
            **options,
        )
    except NoKernels as error:
        if insist:
            raise
        log.warning("%s The engine runs as stage 05 does.", error)
        return make_paged(model, contexts, **options)


def _cache_type(model: Any, dtype: torch.dtype | None) -> Any:
    """Makes the cache that the registry names for `dtype`; None: the kernels' own."""
    format = str(dtype).removeprefix("torch.")
    entry = registry.KERNEL_CACHES.get((format, model.device.type))
    real = torch.promote_types(model.dtype, torch.float32)
    return entry and partial(registry.load(entry), real=real)
