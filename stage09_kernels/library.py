"""C files, compiled once by the machine's compiler and loaded with ctypes.

The name of a library in the cache folder contains a hash of everything that its bytes depend on:
source, flags, compiler, and the instructions of this processor. So a library made for another
processor is never loaded. It is written under a temporary name and then renamed: two processes that
compile at once merely do the work twice, and a compiler that is killed leaves nothing behind.

Nothing of PyTorch is compiled in. Kernels use its thread pool through one exported C function,
`torch_parallel_for`, whose address they take as an argument. So there is one pool, and
`torch.set_num_threads` applies to kernels too.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.measure import cache_folder
from shared.paths import ROOT

from .backend import NoKernels

log = logging.getLogger(__name__)
PERMISSION = ROOT / "stage09_kernels" / "fast" / "permission.c"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-Wno-psabi")
WIDE = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512"
WIDE_NEEDS = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx2", "fma3")
TILES = "-mamx-tile -mamx-bf16 -mamx-int8"
BF16, BF16_NEEDS = f"{WIDE} -mavx512vnni -mavx512bf16", (*WIDE_NEEDS, "avx512_vnni", "avx512_bf16")
LEVELS = {  # by level: flags that turn its instructions on, and what the processor must have
    "amx": (f"{BF16} {TILES}", (*BF16_NEEDS, "amx_tile", "amx_bf16", "amx_int8")),
    "avx512_bf16": (BF16, BF16_NEEDS),
    "avx512_vnni": (f"{WIDE} -mavx512vnni", (*WIDE_NEEDS, "avx512_vnni")),
    "avx512": (WIDE, WIDE_NEEDS),
    "avx2": ("-mavx2 -mfma -mf16c", ("avx2", "fma3", "f16c")),
    "plain": ("", ()),
}
SECONDS = 120  # to compile one file
LINE = 64  # bytes of a cache line

if sys.platform != "win32":  # a forked child lacks the pool's threads, and would wait
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def capabilities() -> dict[str, Any]:
    """What PyTorch reports about this processor; empty in versions that cannot tell."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def levels() -> list[str]:
    """The levels of instructions that this processor supports, the best first. On ARM that is
    "plain", which includes NEON."""
    can = capabilities()
    has = [level for level, (_, needed) in LEVELS.items() if all(can.get(n) for n in needed)]
    return has if "amx" not in has or may_use_tiles() else has[1:]


@cache
def may_use_tiles() -> bool:
    """Whether the system lets this process use tiles, which it is asked once. If not, the log says
    why."""
    try:
        answer = load(PERMISSION, level="amx").permission()
        reason = ("", "the processor has a flag and no tiles", "the system refuses")[answer]
    except NoKernels as error:  # so on Windows and macOS
        reason = str(error)
    if reason:
        log.warning("The kernels run without tiles (AMX): %s.", reason.rstrip("."))
    return not reason


def compiler() -> list[str]:
    """The compiler's command: that in $CC, or the first that is installed; empty without one."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"], posix=os.name == "posix")
    return [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))][:1]


@cache
def load(source: Path, defines: tuple[str, ...] = (), level: str = "") -> ctypes.CDLL:
    """The library of a C file. level: one of `levels()`, the best if empty.

    Raises NoKernels if no compiler can build it.
    """
    instructions, command = LEVELS[level or levels()[0]][0].split(), compiler()
    flags = [*FLAGS, *instructions, *(f"-D{define}" for define in defines)]
    if not command:
        raise NoKernels(
            "No C compiler was found (cc, gcc, clang): install one, or set CC to its command."
        )
    try:
        return ctypes.CDLL(str(_built(source, flags, command)))
    except (OSError, subprocess.SubprocessError) as error:
        printed = str(getattr(error, "stderr", None) or "").splitlines()
        reason = next((line for line in printed if "error" in line.lower()), error)
        raise NoKernels(
            f"{source.name} cannot be compiled ({shlex.join(command)}: {reason})."
        ) from None


def _built(source: Path, flags: Sequence[str], compiler: Sequence[str]) -> Path:
    """The compiled file. Raises OSError or SubprocessError."""
    can = sorted(name for name, has in capabilities().items() if has is True)
    texts = _included(source, {}).values()
    parts = [source.name, *texts, *flags, *compiler, _version(tuple(compiler)), *can]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    suffix = ".dll" if sys.platform == "win32" else ".so"
    folder = cache_folder() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}-{key}{suffix}"
    if not path.exists():
        handle, name = tempfile.mkstemp(suffix=suffix, prefix="building-", dir=folder)
        os.close(handle)
        try:
            libraries = [] if sys.platform == "win32" else ["-lm"]
            command = [*compiler, *flags, str(source), "-o", name, *libraries]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _included(file: Path, texts: dict[Path, str]) -> dict[Path, str]:
    """`texts`, and those of a C file and of all that it includes."""
    if file.exists() and file not in texts:
        texts[file] = file.read_text(encoding="utf-8")
        for name in re.findall(r'^#include "(.+)"', texts[file], re.MULTILINE):
            _included((file.parent / name).resolve(), texts)
    return texts


@cache
def _version(compiler: tuple[str, ...]) -> str:
    shown = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True, timeout=SECONDS
    )
    return shown.stdout


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that begin with a cache line. The system clears their pages when they are first
    written: to clear a cache of gigabytes at once would take most of the time of a start. And NumPy
    asks Linux for pages of 2 MiB: a processor looks up the address of each page that it reads."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + LINE, np.uint8))
    start = -memory.data_ptr() % LINE
    return memory[start : start + size].view(dtype).view(*shape)


def call(kernel: Any, *arguments: Any) -> None:
    """Run a kernel on PyTorch's threads; integers are passed as 64 bits. Raises RuntimeError if it
    fails."""
    words = (ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments)
    if failed := kernel(*words, parallel_for()):
        reason = "no memory" if failed < 0 else f"torch_parallel_for returned {failed}"
        raise RuntimeError(f"a kernel failed: {reason}")


@cache
def parallel_for() -> ctypes.c_void_p:
    """The address of PyTorch's parallel loop."""
    folder = Path(torch.__file__).parent / "lib"
    name = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(
        sys.platform, "libtorch_cpu.so"
    )
    return ctypes.cast(ctypes.CDLL(str(folder / name)).torch_parallel_for, ctypes.c_void_p)
