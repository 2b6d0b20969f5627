"""Checks once whether the kernels are right here, and keeps the answer beside the library.

Two small models with random weights, a GPT-2 and a Llama, run a prompt and a decode step on stage
05 in float64, on stage 05 in the requested dtype, and on the kernels. Up to a factor, the kernels
may be as far from float64 as stage 05 is. So even a processor, compiler or PyTorch that is new to
the project gets tested before the server picks the kernels by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config
from shared.measure import cache_folder
from shared.models import load_model
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig

from .backend import Backend, NoKernels, backend_of

SHAPES = (Config(211, 64, 48, 2, 3), LlamaConfig(211, 64, 48, 2, 6, 2, n_inner=80))
PASSES = (  # two prompts in blocks of 16, and the next token of each
    (list(range(3, 45)), [([4, 1, 5], 0, 37), ([2], 0, 5)], [36, 41]),
    ([7, 8], [([4, 1, 5], 37, 1), ([2], 5, 1)], [0, 1]),
)
# Allowed distance from float64: FACTOR times stage 05's, plus LEAST, because stage 05 computes a
# Llama's norms in float32 whatever the dtype.
FACTOR, LEAST = 4, 1e-5


def unsupported_reason(dtype: torch.dtype, device: torch.device | str = "cpu") -> str:
    """Why not to run models in `dtype` on the kernels here, in a sentence; "" if they are right."""
    try:
        kernels = backend_of(device)
        kernels.cache(SHAPES[0], 1, dtype=dtype, device=device)
        name = cache_folder() / "kernels" / kernels.fingerprint(dtype)
    except NoKernels as error:
        return str(error)
    right, trying = name.with_suffix(".right"), name.with_suffix(".trying")
    if right.exists():
        return ""
    if trying.exists():
        return f"The kernels crashed a process on this machine: delete {trying} to try them again."
    with suppress(OSError):
        trying.parent.mkdir(parents=True, exist_ok=True)
        trying.touch()
    try:
        agree = all(_agree(kernels, config, dtype, device) for config in SHAPES)
    except Exception as error:  # a compiler of the backend's, say
        with suppress(OSError):
            trying.unlink()
        return f"The kernels do not run on this machine ({type(error).__name__}: {error})."
    with suppress(OSError):
        if agree:
            trying.replace(right)
        else:
            trying.unlink()
    return "" if agree else "The kernels and stage 05 disagree on this machine."


def _agree(kernels: Backend, config: Any, dtype: torch.dtype, device: torch.device | str) -> bool:
    exact = _logits(config, torch.float64, Runner, PagedCache)
    theirs, ours = (
        _logits(config, dtype, make_runner, make_cache, device)
        for make_runner, make_cache in ((Runner, PagedCache), (kernels.runner, kernels.cache))
    )
    allowed = FACTOR * (theirs - exact).abs().max() + LEAST
    return bool((ours - exact).abs().max() <= allowed)  # False for NaN


def _logits(
    config: Any,
    dtype: torch.dtype,
    make_runner: Callable[..., Any],
    make_cache: Callable[..., Any],
    device: torch.device | str = "cpu",
) -> Tensor:
    """The logits of all passes, (4, V), in float64 on the CPU."""
    tensors = random_tensors(config)
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor *= 8  # fresh weights hardly change their input, and would hide a mistake
    model = load_model(Checkpoint(config, tensors), dtype=dtype, device=device)
    runner = make_runner(model, make_cache(config, 6, dtype=dtype, device=device))
    # Each pass overwrites the logits of the one before.
    return torch.cat([runner.run(*inputs).double().cpu().clone() for inputs in PASSES])
