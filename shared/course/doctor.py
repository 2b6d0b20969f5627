"""Checks in seconds whether this machine is ready: `python -m shared.course.doctor`.

    ok      as it should be
    note    works; good to know
    WRONG   does not work; the next line says how to fix it

Exit status 0 if nothing is wrong, else 1. It checks the reference only, never a student's copy, so
it is green before the first exercise is done. It changes nothing and uses no network.

It must run where nothing is installed yet, so this module and `paths` import only the standard
library, and each check imports what it needs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..paths import ROOT

PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)  # any newer one works: many machines need another build for their GPU
# Imported, not only looked up.
ENGINE_NEEDS = ("numpy", "torch", "safetensors", "tiktoken", "tqdm", "rich", "psutil")
INSTALL = "python -m pip install -r requirements.txt"
GIB = 2**30
LEAST_MEMORY = 1 * GIB  # for the embedded model
ENOUGH_MEMORY = 4 * GIB  # for tests and benchmarks with the shape of GPT-2 124M
LEAST_DISK, ENOUGH_DISK = 0.1 * GIB, 1 * GIB
PROMPT, TOKENS = "Once upon a time", 40
# Greedy, in float32. The second-best logit is always more than 0.01 behind: hundreds of roundings.
STORY = (
    " there lived a gentle girl. Her name was Mira, and her home was a village under the cliffs. "
    "Mira was not afraid of wet socks, not even a little. One morning Mira set off for"
)
OK, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass(frozen=True)
class Finding:
    """The result of a check: OK, NOTE or WRONG, a line about it, and what to do."""

    state: str
    text: str
    remedy: str = ""


def python() -> Finding:
    """Whether this Python is new enough, and whether it is the project's own."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON:
        needed = ".".join(str(part) for part in PYTHON)
        remedy = f"install Python {needed} or newer, and make .venv again with it"
        return Finding(WRONG, f"{version} is older than {needed}", remedy)
    if sys.prefix == sys.base_prefix:
        return Finding(OK, f"{version}, without a virtual environment")
    return Finding(OK, f"{version}, in {Path(sys.prefix).name}")


def requirements(text: str) -> dict[str, str]:
    """The packages of a requirements.txt with their pinned versions."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)\s*$", text, re.MULTILINE))


def packages(
    pinned: dict[str, str], installed: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """Whether every package has its pinned version. installed: gives a version, or raises."""
    missing, others = [], []
    for name, version in pinned.items():
        try:
            present = installed(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if present.partition("+")[0] != version and name != "torch":  # "+cpu" names a build
            others.append(f"{name} {present} instead of {version}")
    if missing or others:
        wrong = ([f"missing: {', '.join(missing)}"] if missing else []) + others
        return Finding(WRONG, "; ".join(wrong), INSTALL)
    return Finding(OK, f"{len(pinned)} as in requirements.txt")


def libraries() -> Finding:
    """Whether the engine's packages load, and PyTorch is new enough."""
    for name in ENGINE_NEEDS:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a system library is missing
            return Finding(WRONG, f"{name} cannot be imported: {error}", INSTALL)
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Finding(WRONG, f"torch {torch.__version__} is too old", INSTALL)
    return Finding(OK, f"torch {torch.__version__}, {len(ENGINE_NEEDS)} packages load")


def threads() -> Finding:
    """Whether PyTorch uses at most as many threads as it has processors; how they wait."""
    import torch

    from .. import measure, openmp

    count, cpus = torch.get_num_threads(), min(measure.cpus(), _cpu_quota())
    if count > cpus:
        text = f"{count} threads on {_count(cpus)}: they wait for each other"
        return Finding(NOTE, text, f"set OMP_NUM_THREADS={cpus}")
    return Finding(
        OK, f"{count} on {_count(cpus)}; they wait {openmp.choose() or chr(34) + chr(34)}"
    )


def _count(cpus: int) -> str:
    return f"{cpus} processor{'' if cpus == 1 else 's'}"


def _cpu_quota() -> int:
    """The processors that a container may use at a time, which PyTorch ignores."""
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        return sys.maxsize
    return max(1, round(int(quota) / int(period)))


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="utf-8").strip()
    except OSError:  # not on Linux, or not in a container
        return ""


def memory() -> Finding:
    """Whether memory suffices for the embedded model, and for tests with larger ones."""
    import psutil

    most = _cgroup("memory.max")
    free = min(psutil.virtual_memory().available, int(most) if most.isdigit() else sys.maxsize)
    text = f"{free / GIB:.1f} GiB free"
    if free < LEAST_MEMORY:
        least = f"{LEAST_MEMORY / GIB:g} GiB"
        return Finding(WRONG, text, f"close other programs: {least} is the minimum")
    if free < ENOUGH_MEMORY:
        enough = f"{ENOUGH_MEMORY / GIB:g} GiB"
        remedy = f"close other programs before benchmarks and tests with GPT-2 124M: {enough}"
        return Finding(NOTE, f"{text}, enough for the lessons", remedy)
    return Finding(OK, text)


def disk(root: Path = ROOT) -> Finding:
    """Whether the project's folder can be written, and has room."""
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        text = f"{root} cannot be written ({error.strerror})"
        return Finding(WRONG, text, "move the project to a folder of your own")
    free = shutil.disk_usage(root).free
    text = f"{free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding(WRONG, text, "make room: exercises and benchmarks write here")
    if free < ENOUGH_DISK:
        enough = f"{ENOUGH_DISK / GIB:g} GiB"
        return Finding(NOTE, text, f"free {enough} for GPT-2's weights, if you want them")
    return Finding(OK, text)


def code() -> Finding:
    """Whether the files are those of the commit: a changed reference makes tests fail."""
    from .. import measure

    commit, changed = measure.git_state(untracked=False)
    if commit is None:
        return Finding(OK, "not a git checkout, so nothing to compare with")
    if changed:
        remedy = "git status shows which, and git checkout restores them"
        return Finding(NOTE, f"some files differ from commit {commit[:7]}", remedy)
    return Finding(OK, f"as in commit {commit[:7]}")


def device() -> Finding:
    """The device that will compute, and whether it does."""
    import torch

    from .. import measure

    if not torch.cuda.is_available():
        apple = "; an Apple GPU for --device mps" if torch.backends.mps.is_available() else ""
        return Finding(OK, f"{measure.processor()}; no CUDA, and none is needed{apple}")
    name = torch.cuda.get_device_name()
    try:
        torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        remedy = "give every command --device cpu, or install the PyTorch that fits your driver"
        return Finding(WRONG, f"{name} does not compute: {first}", remedy)
    return Finding(OK, f"{name}, the default of every command; --device cpu for another")


def loopback() -> Finding:
    """Whether programs here can talk to each other: from stage 06 on they do, over HTTP."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            pass
    except OSError as error:
        remedy = "allow connections to 127.0.0.1: stages 06 and 07 need them"
        return Finding(WRONG, f"127.0.0.1 does not answer ({error})", remedy)
    return Finding(OK, "127.0.0.1 answers; no other network is needed")


def model() -> Finding:
    """Whether the embedded model generates the right tokens."""
    from .. import checkpoint
    from ..tokenizer import load_tokenizer
    from . import stages

    loaded = checkpoint.load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    engine = stages.oracle(stages.load_model(loaded))
    sampling = stages.sampling_params()(max_tokens=TOKENS)
    (output,) = engine.generate([tokenizer.encode(PROMPT)], sampling)
    story = tokenizer.decode(output.token_ids)
    if story != STORY:
        remedy = "git status: restore stage01_forward and shared, or clone again"
        text = f"'{PROMPT}' continues with '{story[:60]}...' and not with '{STORY[:60]}...'"
        return Finding(WRONG, text, remedy)
    first = STORY.partition(".")[0]
    return Finding(OK, f"'{PROMPT}{first}. ...', the right {TOKENS} tokens")


def checks() -> dict[str, Callable[[], Finding]]:
    """All checks by name. The first one that is wrong explains those after it."""
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return {
        "python": python,
        "packages": lambda: packages(requirements(pinned)),
        "libraries": libraries,
        "threads": threads,
        "memory": memory,
        "disk": disk,
        "code": code,
        "device": device,
        "loopback": loopback,
        "model": model,
    }


def examine(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; an error is a finding, too."""
    from ..errors import UserError

    try:
        return check()
    except ImportError as error:
        return Finding(WRONG, f"not checked: {error}", INSTALL)
    except UserError as error:
        return Finding(WRONG, str(error), "git status: restore the files, or clone again")
    except Exception as error:
        remedy = f"report this, with all lines above: the check '{name}' failed"
        return Finding(WRONG, f"{type(error).__name__}: {error}", remedy)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(  # cli.Parser needs PyTorch, which may be missing
        prog="python -m shared.course.doctor",
        description="Checks whether this machine is ready for the course, and says what to fix.",
        epilog="exit status: 0 ready, 1 something is wrong",
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    started = time.perf_counter()
    findings = []
    for name, check in checks().items():
        finding = examine(name, check)
        findings.append(finding)
        print(f"{finding.state:<6} {name:<10} {finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':<17} -> {finding.remedy}", flush=True)
    wrong = sum(finding.state == WRONG for finding in findings)
    seconds = time.perf_counter() - started
    verdict = f"Not ready: {wrong} of {len(findings)} wrong." if wrong else "Ready."
    print(f"{verdict} ({seconds:.1f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # printing must not fail where pipes are not UTF-8
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
