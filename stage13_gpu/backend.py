"""The backend for CUDA: what stage 09 plugs into the engine where the model is on a GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from stage09_kernels.backend import Backend, NoKernels

if find_spec("triton") is None:
    raise NoKernels("Triton is not installed: run pip install -r requirements-gpu.txt.")
if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
    raise NoKernels("Triton needs a C compiler to start its kernels: install gcc or clang.")

from .cache import GpuCache  # noqa: E402
from .launch import DEVICE  # noqa: E402
from .runner import GpuRunner  # noqa: E402
from .sample import sample_tokens  # noqa: E402


def _fingerprint(dtype: torch.dtype) -> str:
    """A name that changes with the kernels' source, Triton, PyTorch, the GPU and the dtype."""
    import triton

    folder = Path(__file__).parent
    files = ["cache", "flash", "fused", "graphs", "layers", "quantized", "runner"]
    kinds = [torch.cuda.get_device_name(), torch.version.cuda] if DEVICE == "cuda" else [DEVICE]
    about = [triton.__version__, torch.__version__, *map(str, kinds), str(dtype)]
    source = "".join((folder / f"{file}.py").read_text(encoding="utf-8") for file in files)
    return f"gpu-{hashlib.sha256((source + ' '.join(about)).encode()).hexdigest()[:16]}"


BACKEND = Backend(GpuCache, GpuRunner, sample_tokens, _fingerprint)
