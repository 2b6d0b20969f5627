"""How kernels run: compiled for a GPU, or on the processor by Triton's interpreter.

The interpreter runs a kernel program by program, with NumPy: thousands of times slower, but every
address and every sum is the kernel's. Triton decides when a kernel is decorated, so this module is
imported before any kernel: without a GPU, it chooses the interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # bits depend on it: one rounding, not two
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"  # where the tensors of kernels are


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run one program of `kernel` for each place of `grid`. All kernels are launched here, so that
    who notes what is launched puts a function in place of `run`."""
    if 0 not in grid:
        run(kernel, grid, *arguments, **constants)


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)
