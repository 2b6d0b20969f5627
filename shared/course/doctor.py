"""Is this machine ready? `python -m shared.course.doctor` says so in a few seconds, and what to do
about each line that is not.

    ok      as it should be
    note    works, and is worth knowing
    WRONG   will not work until it is mended; the next line says how

Exit status 0 if nothing is wrong, else 1. It looks at the reference only, never at a student's
copy: it is green before the first exercise is done. Nothing is changed, and no network is used.

It has to speak where nothing is installed yet, so this module and `paths` import the standard
library alone, and each check imports what it looks at.
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
OLDEST_TORCH = (2, 11)  # any from here on will do: many need a build of their own, for their GPU
ENGINE_NEEDS = (
    "numpy",
    "torch",
    "safetensors",
    "tiktoken",
    "tqdm",
    "rich",
    "psutil",
)  # imported, not only looked up
INSTALL = "python -m pip install -r requirements.txt"
GIB = 2**30
LEAST_MEMORY, ENOUGH_MEMORY = (
    1 * GIB,
    4 * GIB,
)  # for the embedded model; for tests and benchmarks with the shape of GPT-2 124M
LEAST_DISK, ENOUGH_DISK = 0.1 * GIB, 1 * GIB
PROMPT, TOKENS = "Once upon a time", 40
# Greedy, in float32. At each token the second best is more than 0.01 behind, hundreds of times what
# rounding can change.
STORY = (
    " there lived a gentle girl. Her name was Mira, and her home was a village under the cliffs. "
    "Mira was not afraid of wet socks, not even a little. One morning Mira set off for"
)
OK, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass(frozen=True)
class Finding:
    """What one check found: OK, NOTE or WRONG, a line on it, and what to do about it."""

    state: str
    text: str
    remedy: str = ""


def python() -> Finding:
    """Is this Python new enough, and is it one of the project's own?"""
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON:
        needed = ".".join(str(part) for part in PYTHON)
        return Finding(
            WRONG,
            f"{version} is older than {needed}",
            f"install Python {needed} or newer, and make .venv anew with it",
        )
    if sys.prefix == sys.base_prefix:
        return Finding(OK, f"{version}, without a virtual environment")
    return Finding(OK, f"{version}, in {Path(sys.prefix).name}")


def requirements(text: str) -> dict[str, str]:
    """The packages of a requirements.txt with the version that each is pinned to."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)\s*$", text, re.MULTILINE))


def packages(
    pinned: dict[str, str], installed: Callable[[str], str] = importlib.metadata.version
) -> Finding:
    """Is every package there, at the version that was tested? `installed` gives a package's
    version, or raises."""
    missing, others = [], []
    for name, version in pinned.items():
        try:
            found = installed(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if found.partition("+")[0] != version and name != "torch":  # "+cpu" names a build
            others.append(f"{name} {found} instead of {version}")
    if missing or others:
        wrong = ([f"missing: {', '.join(missing)}"] if missing else []) + others
        return Finding(WRONG, "; ".join(wrong), INSTALL)
    return Finding(OK, f"{len(pinned)} as in requirements.txt")


def libraries() -> Finding:
    """Can what the engine needs be loaded, and is PyTorch new enough?"""
    for name in ENGINE_NEEDS:
        try:
            importlib.import_module(name)
        except (
            ImportError,
            OSError,
        ) as error:  # OSError: a library of the system's that the package needs is not there
            return Finding(WRONG, f"{name} cannot be imported: {error}", INSTALL)
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Finding(WRONG, f"torch {torch.__version__} is too old", INSTALL)
    return Finding(OK, f"torch {torch.__version__}, {len(ENGINE_NEEDS)} packages load")


def threads() -> Finding:
    """How many threads does PyTorch take, and may it use as many processors?"""
    import torch

    from .. import measure

    taken, there = torch.get_num_threads(), min(measure.cpus(), _cpu_quota())
    if taken > there:
        return Finding(
            NOTE,
            f"{taken} threads on {_count(there)}: they wait for each other",
            f"set OMP_NUM_THREADS={there}",
        )
    return Finding(OK, f"{taken} on {_count(there)}")


def _count(cpus: int) -> str:
    return f"{cpus} processor{'' if cpus == 1 else 's'}"


def _cpu_quota() -> int:
    """The processors that a container may use at a time, which PyTorch does not ask for."""
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return (
        max(1, round(int(quota) / int(period)))
        if quota.isdigit() and period.isdigit()
        else sys.maxsize
    )


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="utf-8").strip()
    except OSError:  # not on Linux, or not in a container
        return ""


def memory() -> Finding:
    """Is there enough memory for the model, and for the tests with larger ones?"""
    import psutil

    most = _cgroup("memory.max")
    free = min(psutil.virtual_memory().available, int(most) if most.isdigit() else sys.maxsize)
    text = f"{free / GIB:.1f} GiB free"
    if free < LEAST_MEMORY:
        return Finding(
            WRONG, text, f"close other programs: {LEAST_MEMORY / GIB:g} GiB is the least"
        )
    if free < ENOUGH_MEMORY:
        remedy = (
            "close other programs before benchmarks and tests with GPT-2 124M: "
            f"they want {ENOUGH_MEMORY / GIB:g} GiB"
        )
        return Finding(NOTE, f"{text}, enough for the lessons", remedy)
    return Finding(OK, text)


def disk(root: Path = ROOT) -> Finding:
    """May the project's folder be written, and is there room?"""
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        return Finding(
            WRONG,
            f"{root} cannot be written ({error.strerror})",
            "move the project to a folder of your own",
        )
    free = shutil.disk_usage(root).free
    text = f"{free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding(
            WRONG,
            text,
            "make room: your copies of the exercises and the results of benchmarks are written "
            "here",
        )
    if free < ENOUGH_DISK:
        return Finding(
            NOTE,
            text,
            f"GPT-2's own weights would want {ENOUGH_DISK / GIB:g} GiB; the embedded model is "
            "here already",
        )
    return Finding(OK, text)


def code() -> Finding:
    """Are the files those of the commit? A changed reference is why tests fail that passed
    yesterday."""
    from .. import measure

    commit, changed = measure.git_state()
    if commit is None:
        return Finding(OK, "not a git checkout, so nothing to compare with")
    if changed:
        return Finding(
            NOTE,
            f"some files differ from commit {commit[:7]}",
            "git status shows which, and git checkout puts them back",
        )
    return Finding(OK, f"as in commit {commit[:7]}")


def device() -> Finding:
    """What will compute, and does it?"""
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
    return Finding(OK, f"{name}, which every command takes unless it is given --device cpu")


def loopback() -> Finding:
    """Can a program here talk to another one? From stage 06 on they do, over HTTP."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            pass
    except OSError as error:
        return Finding(
            WRONG,
            f"127.0.0.1 does not answer ({error})",
            "allow connections to 127.0.0.1: stages 06 and 07 need them",
        )
    return Finding(OK, "127.0.0.1 answers; no other network is needed")


def model() -> Finding:
    """Does the embedded model say what it must?"""
    from .. import checkpoint
    from ..tokenizer import load_tokenizer
    from . import stages

    loaded = checkpoint.load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    engine = stages.oracle(stages.load_model(loaded))
    output = engine.generate(
        [tokenizer.encode(PROMPT)], stages.sampling_params()(max_tokens=TOKENS)
    )[0]
    said = tokenizer.decode(output.token_ids)
    if said != STORY:
        remedy = "git status: put stage01_forward and shared back as they were, or clone again"
        return Finding(
            WRONG,
            f"'{PROMPT}' goes on with '{said[:60]}...' and not with '{STORY[:60]}...'",
            remedy,
        )
    first = STORY.partition(".")[0]
    return Finding(OK, f"'{PROMPT}{first}. ...', the right {TOKENS} tokens")


def checks() -> dict[str, Callable[[], Finding]]:
    """All checks by name, in an order in which the first that is wrong explains those after it."""
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
    """Run a check; whatever it raises is what it found."""
    from ..errors import UserError

    try:
        return check()
    except ImportError as error:
        return Finding(WRONG, f"not looked at: {error}", INSTALL)
    except UserError as error:  # which says what to do about it
        return Finding(
            WRONG, str(error), "git status: put the files back as they were, or clone again"
        )
    except Exception as error:  # a doctor must not fall over what it finds
        return Finding(
            WRONG,
            f"{type(error).__name__}: {error}",
            f"report this, with all lines above: the check '{name}' failed",
        )


def main(argv: Sequence[str] | None = None) -> int:
    # and not cli.Parser: it needs PyTorch, which may be what is missing
    parser = argparse.ArgumentParser(
        prog="python -m shared.course.doctor",
        description="Says whether this machine is ready for the course, and what to do about "
        "what is not.",
        epilog="exit status: 0 ready, 1 something is wrong",
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    started = time.perf_counter()
    found = []
    for name, check in checks().items():
        finding = examine(name, check)
        found.append(finding)
        print(f"{finding.state:<6} {name:<10} {finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':<17} -> {finding.remedy}", flush=True)
    wrong = sum(each.state == WRONG for each in found)
    seconds = time.perf_counter() - started
    verdict = f"Not ready: {wrong} of {len(found)} wrong." if wrong else "Ready."
    print(f"{verdict} ({seconds:.1f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    if hasattr(
        sys.stdout, "reconfigure"
    ):  # an error's words must not fail to print where the system's pipes are not UTF-8
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
