"""The backend for CPUs: C, compiled at first use."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.config import Config

from .backend import Backend
from .cache import KernelCache
from .runner import KernelRunner
from .sample import sample_tokens


def _fingerprint(dtype: torch.dtype) -> str:
    """The name of the library, which contains a hash of its source, flags and compiler."""
    return Path(KernelCache(Config(1, 1, 1, 1, 1), 1, dtype=dtype).library(dtype)._name).stem


BACKEND = Backend(KernelCache, KernelRunner, sample_tokens, _fingerprint)
