"""What this stage offers to the tools that drive every stage: an engine, and answers to many
prompts."""

from __future__ import annotations

import logging
from typing import Any

from stage04_continuous.engine import Engine
from stage04_continuous.make import answer as answer
from stage05_paged.engine import make as make_paged

from .cache import KernelCache
from .library import NoKernels
from .runner import KernelRunner
from .trial import why_not as why_not

log = logging.getLogger(__name__)
LINEAR = "plain"  # for --linear: this stage lays the weights out itself


def make(
    model: Any, contexts: int | None = None, *, insist: bool = False, **options: Any
) -> Engine:
    """Stage 05's engine with the kernels; without them, and with a warning, where there are none
    for this machine or model. insist: raise NoKernels instead."""
    try:
        kernels: dict[str, Any] = {"make_cache": KernelCache, "make_runner": KernelRunner}
        return make_paged(model, contexts, **kernels, **options)
    except NoKernels as error:
        if insist:
            raise
        log.warning("%s This runs as stage 05 does.", error)
        return make_paged(model, contexts, **options)
