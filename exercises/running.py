"""Run tests in a process of its own, contained and within limits, and read what it reports.

A container is Docker's or Podman's, or bubblewrap's: no network, a tree that is only read, scratch
in memory, and an environment that is the same for all of them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared.errors import UserError

INSIDE = Path(__file__).with_name("inside.py")
IMAGE = "staircase"  # of Docker or Podman: INSTRUCTORS.md says how to build it
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
SYSTEM += ("/sys/devices/system/cpu", *map(os.path.realpath, {sys.prefix, sys.base_prefix}))
MEMORY, SCRATCH, RESULTS = 4 << 30, 512 << 20, 4 << 20  # bytes
PROCESSES = 64  # at a time


@dataclass
class Run:
    """outcomes: by test id, ("passed", "") or ("failed", "row 1, column 1 is 6, not 0").

    ended: why the process came to no end of its own; "" if it did.
    """

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    status: int | None = None
    ended: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> dict[str, str]:
        """Why tests did not pass, by their ids."""
        return {test: why for test, (outcome, why) in self.outcomes.items() if outcome != "passed"}

    @property
    def passed(self) -> bool:
        return self.status == 0 and bool(self.outcomes) and not self.failures


def here(tests: Iterable[str], root: Path) -> Run:
    """Run tests on one's own code in the tree `root`, and print why those fail that do. What they
    print themselves goes to the terminal, too."""
    run = start([sys.executable, str(INSIDE), json.dumps({"tests": [*tests]})], root)
    for test, why in run.failures.items():
        print(f"  {test.rpartition('::')[2]}: {why}")
    if run.ended:
        print(f"  {run.ended}")
    return run


def container(confined: bool) -> str:
    """What there is to contain a process: "docker", "podman", "bwrap"; "" if none is wanted.
    Raises UserError if there is nothing."""
    for program, *words in (
        ("docker", "image", "inspect", IMAGE),
        ("podman", "image", "inspect", IMAGE),
        ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"),
    ):
        if confined and shutil.which(program):
            done = subprocess.run([program, *words], capture_output=True, check=False)
            if done.returncode == 0:
                return program
    if not confined:
        return ""
    raise UserError(
        "Nothing here can contain a hand-in: install bubblewrap (Linux), or build the image "
        f"'{IMAGE}' of Docker or Podman as exercises/INSTRUCTORS.md says. --unconfined runs code "
        "that you trust without."
    )


def contained(
    program: str, job: dict[str, Any], tree: Path, cache: Path, seconds: float, keep: bool
) -> Run:
    """Run a job of inside.py over a clean tree. program: of `container`. keep: what it compiles
    goes to `cache`, and what it prints to the terminal; else it begins with a copy of the cache."""
    name = f"staircase-{secrets.token_hex(8)}"
    python, inside, scratch, compiled = sys.executable, "/inside.py", "/tmp", "/cache"
    read = {str(tree): "/tree", str(INSIDE): inside}
    if program in ("docker", "podman"):
        python = "python"
        command = [program, "run", "--rm", "--name", name, "--network", "none", "--read-only"]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534"]
        command += ["--memory", str(MEMORY), "--pids-limit", str(PROCESSES * 16)]
        command += ["--tmpfs", f"/tmp:exec,size={SCRATCH}", "--workdir", "/tree"]
        mounts = [f"{path}:{place}:ro" for path, place in read.items()]
        mounts += [f"{cache}:{compiled}:{'rw' if keep else 'ro'}"]
        command += [word for mount in mounts for word in ("--volume", mount)] + [IMAGE]
    elif program == "bwrap":
        command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
        command += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        command += ["--size", str(SCRATCH), "--tmpfs", "/tmp", "--chdir", "/tree"]
        for path, place in ({path: path for path in SYSTEM if os.path.exists(path)} | read).items():
            command += ["--ro-bind", path, place]
        command += ["--bind" if keep else "--ro-bind", str(cache), compiled]
    else:
        command, inside, scratch, compiled = [], str(INSIDE), str(tree.parent), str(cache)
    variables = {"HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8", "MPLBACKEND": "agg"}
    variables |= {"XDG_CACHE_HOME": compiled if keep else f"{scratch}/cache"}
    variables |= {"PATH": os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    variables |= {"OMP_NUM_THREADS": "2"}
    job = {**job, "memory": MEMORY, "cache": "" if keep else compiled}
    command += ["env", "-i", *map("=".join, variables.items()), python, inside, json.dumps(job)]
    try:
        return start(command, None if program else tree, seconds, quiet=not keep)
    finally:
        if program in ("docker", "podman"):
            subprocess.run([program, "kill", name], capture_output=True, check=False)


def start(command: list[str], cwd: Path | None, seconds: float = 300.0, quiet: bool = False) -> Run:
    """Start what runs inside.py, and read its lines until it ends or exceeds a limit. quiet: what
    it prints is lost."""
    started, run, results = time.monotonic(), Run(), b""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        start_new_session=True,
    )
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    watched = psutil.Process(process.pid)
    try:
        while process.poll() is None and not run.ended:
            time.sleep(0.05)
            results += process.stdout.read() or b""
            run.ended = _exceeded(watched)
            if time.monotonic() - started > seconds:
                run.ended = f"it took more than {seconds:.0f} s: an endless loop?"
            elif len(results) > RESULTS:
                run.ended = "it forges results"
    finally:
        with suppress(psutil.Error):  # some may be in sessions of their own
            for child in watched.children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results += process.stdout.read() or b""
    process.stdout.close()
    for line in results.decode(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if "status" in entry:
                run.status = entry["status"]
            else:
                run.outcomes[str(entry["id"])] = str(entry["outcome"]), str(entry["why"])
    run.seconds = time.monotonic() - started
    if not run.ended and run.status is None:
        run.ended = f"its process ended with status {process.returncode} before its tests did"
    return run


def _exceeded(process: psutil.Process) -> str:
    """Which limit this process and its descendants exceed; "" if none."""
    memory, family = 0, [process]
    with suppress(psutil.Error):
        family += process.children(recursive=True)
    for member in family:
        with suppress(psutil.Error):
            memory += member.memory_info().rss
    if len(family) > PROCESSES:
        return f"it started more than {PROCESSES} processes"
    return f"it took more than {MEMORY >> 20} MiB of memory" if memory > MEMORY else ""
