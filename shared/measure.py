"""Measuring: what machine this is and what it can do, times, peak memory, and results as data.

A number is worth only what is known about its origin. So times are taken in turn (`turns`), a
machine's limits are measured rather than looked up, and `save` writes every repeat together with
the commit, the machine and the command. What to measure is decided in the stages' `benchmark.py`;
`charts.py` and `report.py` draw it.

Units: seconds, bytes, GB/s (1e9 bytes), GFLOP/s (1e9 operations; a multiply and an add are two).
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from . import linear
from .errors import UserError
from .files import read_text
from .paths import ROOT

SCHEMA = 2
REPORTS = ROOT / "reports"
PACKAGES = ("torch", "transformers", "tokenizers", "tiktoken", "safetensors", "numpy", "matplotlib")
GIB = 2**30
Device = torch.device | str


# ---- the machine ---------------------------------------------------------------------------------


def processor() -> str:
    """The processor's name as its maker writes it, or its architecture if the system names none."""
    name = ""
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        name = match[1] if match else ""
    elif sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or ""
    return " ".join(name.split()) or platform.processor() or platform.machine() or "unknown"


def cpus() -> int:
    """How many logical processors this process may use; a container may have fewer than the
    machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: Device = "cpu") -> dict[str, Any]:
    """What this machine is: processor, the widest vector instructions that PyTorch uses on it,
    cores, cpus, memory, system, and the name of `device`."""
    kind = torch.device(device).type
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": min(psutil.cpu_count(logical=False) or cpus(), cpus()),
        "cpus": cpus(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
    }


def versions() -> dict[str, str]:
    """Python's version and those of the packages that a number may depend on."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **installed}


def slug(described: Mapping[str, Any]) -> str:
    """A folder name for what `machine` describes: "amd-epyc-2cpu", or "nvidia-h200" where a GPU did
    the work. A cloud sells processors with AVX-512 and without under one name: the latter get
    "-avx2"."""
    on_gpu = described["device"] not in ("cpu", "mps")
    name = described["device"] if on_gpu else described["processor"]
    # "(R)" and "@ 3.2GHz" say nothing here.
    name = re.sub(r"\([A-Za-z]+\)|@.*|\b\d+-Core\b|\b(CPU|Processor)\b", " ", name)
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
    if not on_gpu:
        words += f"-{described['cpus']}cpu" + ("-mps" if described["device"] == "mps" else "")
        words += "-avx2" if described.get("instructions") == "AVX2" else ""
    return words


def git_state(untracked: bool = True) -> tuple[str | None, bool | None]:
    """The commit, and whether the code differs from it; (None, None) outside of a git checkout.

    Results and texts do not count: the first benchmark of a round writes them, and the second must
    still find the code clean. untracked: whether files that are not in the commit count.
    """
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return None, None
    files = "--untracked-files=" + ("normal" if untracked else "no")
    left_out = (":(exclude)reports", ":(exclude)*.md")
    changes = _output("git", "status", "--porcelain", files, "--", ".", *left_out)
    return commit, changes != ""


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


def synchronize(device: Device | None = None) -> None:
    """Wait until `device` has done all that it was told to do. None: whichever GPU this process has
    used."""
    kind = torch.device(device).type if device is not None else None
    if kind == "cuda" or (kind is None and torch.cuda.is_initialized()):
        torch.cuda.synchronize()
    elif kind == "mps" or (kind is None and torch.backends.mps.is_available()):
        torch.mps.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """How long one call of `run` takes, with all that it started on a GPU."""
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


Result = TypeVar("Result")


def turns(
    variants: Mapping[str, Callable[[], Result]],
    repeats: int | Mapping[str, int],
    warmup: int = 1,
) -> dict[str, list[Result]]:
    """Run all variants in turn, `repeats` times each after `warmup` rounds that do not count, and
    return their results. Variants with fewer repeats than others sit out the last rounds.

    Because they take turns, a slow minute of a shared machine affects all variants, not just one.
    Because the order rotates, no variant always follows the same other.
    """
    often = repeats if isinstance(repeats, Mapping) else dict.fromkeys(variants, repeats)
    names, results = list(variants), {name: list[Result]() for name in variants}
    for number in range(warmup + max(often.values())):
        first = number % len(names)  # A B C, B C A, C A B, ...
        for name in names[first:] + names[:first]:
            if number < warmup + often[name]:
                result = variants[name]()
                results[name] += [result] if number >= warmup else []
    return results


# ---- what the machine can do ---------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The best that simple loops got out of this machine: reading memory once, and multiplying
    square matrices.

    The best of many tries, not the median, because nothing may exceed a limit. On a shared machine
    the limits depend on the neighbours, so a benchmark that reports shares of them measures them
    anew (`refresh`).
    """

    device: str
    threads: int
    bandwidth_gb_s: float
    gflops: dict[str, float]  # by dtype: "float32", "bfloat16"


def cache_folder() -> Path:
    """Where this user's programs keep what they can recreate."""
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "staircase"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "staircase"


@torch.inference_mode()
def read_bandwidth(device: Device = "cpu", nbytes: int | None = None, budget: float = 1.0) -> float:
    """GB/s at which all threads read `nbytes` once: the best of several ways to read, each tried
    for `budget` seconds.

    `nbytes` None takes 1 GiB, or 1/16 of the free memory: far more than a cache holds, so that
    memory is measured and not the cache.
    """
    nbytes = nbytes or min(GIB, psutil.virtual_memory().available // 16)
    columns = 4096
    numbers = torch.ones(
        max(1, nbytes // (4 * columns)), columns, device=device
    )  # ones: pages of zeros share one real page
    vector = torch.ones(columns, device=device)
    nbytes = numbers.numel() * 4
    ways: list[Callable[[], object]] = [numbers.sum, numbers.max, lambda: numbers @ vector]
    best = max(_best_rate(nbytes, way, budget) for way in ways)
    if linear.can_pack(torch.device(device), torch.float32):
        part = numbers[: max(1, len(numbers) // 4)]  # packing copies
        packed, row = linear.pack(part), vector[None]
        best = max(
            best,
            _best_rate(part.numel() * 4, lambda: linear.packed_linear(row, packed, None), budget),
        )
    return best / 1e9


@torch.inference_mode()
def matmul_rate(
    device: Device = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] | None = None,
    budget: float = 0.5,
) -> float:
    """GFLOP/s of square matrix products: the best over `sizes`, also with a packed weight if this
    machine can pack. A processor without instructions for `dtype` is faster once it has widened the
    numbers to float32: with AVX2 alone a hundred times, in bfloat16."""
    sizes = sizes or ((1024, 2048) if torch.device(device).type == "cpu" else (4096, 8192))
    best = 0.0
    multiply: Callable[..., torch.Tensor] = torch.matmul
    if dtype.itemsize < 4 and torch.device(device).type == "cpu":
        small = torch.ones(128, 128, dtype=dtype)
        rates = {way: _best_rate(1, partial(way, small, small), 0) for way in (multiply, _widened)}
        multiply = max(rates, key=lambda way: rates[way])
    for size in sizes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        ways: list[Callable[[], object]] = [partial(multiply, a, b)]
        if linear.can_pack(torch.device(device), dtype):
            ways.append(partial(linear.packed_linear, a, linear.pack(b), None))
        best = max(best, *(_best_rate(2 * size**3, way, budget) for way in ways))
    return best / 1e9


def _widened(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def _best_rate(work: float, run: Callable[[], object], budget: float) -> float:
    """The highest work per second over as many runs as fit in `budget` seconds, at least five after
    one to warm up."""
    run()
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget:
        times.append(seconds(run))
    return work / min(times)


# ---- processes -----------------------------------------------------------------------------------


def process(initial: Callable[..., object] | None = None, *arguments: Any) -> Executor:
    """A fresh process that runs what it is given, after `initial(*arguments)`. It ends with this
    one, even if this one is killed."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, _begin, (initial, *arguments))


def _begin(initial: Callable[..., object] | None, *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initial:
        initial(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def peak_so_far(pid: int) -> int:
    """The most memory, in bytes, that a process has had so far; what it has now, if the system
    keeps no peak."""
    if sys.platform == "linux":
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    memory = psutil.Process(pid).memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


# ---- results as data -----------------------------------------------------------------------------


def results_file(stage: str, device: Device = "cpu") -> Path:
    """Where the results of a stage on this machine belong: reports/<machine>/<stage>.json."""
    return REPORTS / slug(machine(device)) / f"{stage}.json"


def command() -> str:
    """The command line of this program, as one would type it in the repository's folder."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write results. Raises ValueError for NaN and infinity, which JSON does not have: a
    measurement that is not a number is a mistake."""
    _write(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load(path: Path, expected: int = SCHEMA) -> dict[str, Any]:
    """What `save` wrote. UserError if the file is absent, damaged, or of another schema."""
    try:
        content = json.loads(read_text(path))
        schema = content.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"The results {path} cannot be read ({error}): run the stage's benchmark."
        ) from None
    if schema != expected:
        raise UserError(
            f"The results {path} have schema {schema}, and this version reads {expected}: run the "
            "benchmark again."
        )
    return content


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing: an interrupted run must not leave half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    half.write_text(text, encoding="utf-8", newline="\n")
    half.replace(path)
