"""Measuring: what machine this is, what it can do, and times.

A number is worth only what is known about its origin. So a machine's limits are measured rather
than looked up. What to measure is decided in the stages' `benchmark.py`; `kit.py` has it run in
turn and keeps it, and `charts.py` draws it.

Units: seconds, bytes, GB/s (1e9 bytes), GFLOP/s (1e9 operations; a multiply and an add are two).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from . import linear
from .paths import ROOT

PACKAGES = ("torch", "transformers", "tokenizers", "tiktoken", "safetensors", "numpy", "matplotlib")
GIB = 2**30
BUDGET = 0.05  # seconds for each way to reach a limit
Result = TypeVar("Result")


# ---- the machine ---------------------------------------------------------------------------------


def processor() -> str:
    """The processor's name as its maker writes it, or its architecture if the system names none."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        name = match[1] if match else None
    else:
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")  # macOS
    return " ".join((name or platform.processor() or platform.machine()).split())


def cpus() -> int:
    """How many logical processors this process may use; a container may have fewer than the
    machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str = "cpu") -> dict[str, Any]:
    """What this machine is: processor, the widest vector instructions that PyTorch uses on it,
    cores, cpus, memory, system, and the name of `device`."""
    tiles = " and AMX" if torch.cpu.get_capabilities().get("amx_bf16") else ""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability() + tiles,
        "cores": min(psutil.cpu_count(logical=False) or cpus(), cpus()),
        "cpus": cpus(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def versions() -> dict[str, str]:
    """Python's version and those of the packages that a number may depend on."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **installed}


def slug(described: Mapping[str, Any]) -> str:
    """A folder name for what `machine` describes: "amd-epyc-2cpu", or "nvidia-h200" where a GPU did
    the work. A cloud sells processors with AVX-512 and without under one name: the latter get
    "-avx2"."""
    on_gpu = described["device"] != "cpu"
    name = described["device" if on_gpu else "processor"]
    # "(R)" and "@ 3.2GHz" say nothing here.
    name = re.sub(r"\([A-Za-z]+\)|@.*|\b\d+-Core\b|\b(CPU|Processor)\b", " ", name)
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
    narrow = "-avx2" if described["instructions"] == "AVX2" else ""
    return words if on_gpu else f"{words}-{described['cpus']}cpu{narrow}"


def git_state() -> tuple[str | None, bool | None]:
    """The commit, and whether the code differs from it; (None, None) outside of a git checkout.

    Results and texts do not count: the first benchmark of a round writes them, and the second must
    still find the code clean.
    """
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return None, None
    left_out = (":(exclude)reports/*.json", ":(exclude)*.svg", ":(exclude)*.md")
    return commit, _output("git", "status", "--porcelain", "--", ".", *left_out) != ""


def _output(*command: str) -> str | None:
    """What a command prints, run in the repository; None if it fails or does not exist."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# ---- times ---------------------------------------------------------------------------------------


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """How many seconds one call of `run` takes, with all that it started on a GPU; and its
    result."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else int
    wait()
    started = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - started, result


# ---- what the machine can do ---------------------------------------------------------------------


def cache_folder() -> Path:
    """Where this user's programs keep what they can recreate."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "staircase"


def speeds(device: str = "cpu") -> dict[str, float]:
    """The machine's limits now: GB/s of memory, and GFLOP/s by dtype. What simple loops get out of
    it: reading memory once, and multiplying square matrices. The best of several tries, not the
    median, because nothing may exceed a limit."""
    on_cpu = device == "cpu"
    rates = {"memory": read_bandwidth(device, GIB // 4 if on_cpu else 4 * GIB)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        rates[name] = matmul_rate(device, dtype, 1024 if on_cpu else 8192)
    return rates


@torch.inference_mode()
def read_bandwidth(device: str, nbytes: int) -> float:
    """GB/s at which all threads read `nbytes` once, far more than a cache holds: the best of
    several ways to read."""
    columns = 4096
    numbers = torch.ones(nbytes // (4 * columns), columns, device=device)  # zeros share one page
    vector = torch.ones(columns, device=device)
    ways: list[Callable[[], object]] = [numbers.sum, numbers.max, lambda: numbers @ vector]
    return max(_best_rate(numbers.nbytes, way) for way in ways) / 1e9


@torch.inference_mode()
def matmul_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """GFLOP/s of products of matrices of `size` x `size`: the best of several ways. A processor
    without instructions for `dtype` is faster once it has widened the numbers to float32: with AVX2
    alone a hundred times, in bfloat16, so the slow way is tried on small matrices."""
    multiply: Callable[..., torch.Tensor] = torch.matmul
    if dtype.itemsize < 4 and device == "cpu":
        small = torch.ones(128, 128, dtype=dtype)
        products = (torch.matmul, lambda a, b: (a.float() @ b.float()).to(dtype))
        multiply = max(products, key=lambda way: _best_rate(1, partial(way, small, small)))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    ways: list[Callable[[], object]] = [partial(multiply, a, b)]
    if linear.can_pack(torch.device(device), dtype):
        ways.append(partial(linear.packed_linear, a, linear.pack(b), None))
    return max(_best_rate(2 * size**3, way) for way in ways) / 1e9


def _best_rate(work: float, run: Callable[[], object]) -> float:
    """The highest work per second over as many runs as fit in BUDGET, at least five after one to
    warm up."""
    run()
    times: list[float] = []
    while len(times) < 5 or sum(times) < BUDGET:
        times.append(timed(run)[0])
    return work / min(times)
