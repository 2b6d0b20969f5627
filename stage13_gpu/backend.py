"""The backend for CUDA: what stage 09 plugs into the engine where the model is on a GPU."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from stage04_continuous.engine import sample_tokens
from stage09_kernels.backend import Backend, NoKernels

if find_spec("triton") is None:
    raise NoKernels("Triton is not installed: run pip install -r requirements-gpu.txt.")
if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
    raise NoKernels("Triton needs a C compiler to start its kernels: install gcc or clang.")

from .cache import GpuCache  # noqa: E402
from .runner import GpuRunner  # noqa: E402

BACKEND = Backend(GpuCache, GpuRunner, sample_tokens)
