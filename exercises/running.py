"""Run tests in a process of its own, contained and within limits, and read what it reports."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared import paths
from shared.errors import UserError

INSIDE = Path(__file__).with_name("inside.py")
IMAGE = "staircase"  # of Docker or Podman: INSTRUCTORS.md says how to build it
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
SYSTEM += ("/sys/devices/system/cpu", *map(os.path.realpath, {sys.prefix, sys.base_prefix}))
MEMORY, SCRATCH, RESULTS = 4 << 30, 512 << 20, 4 << 20  # bytes
PROCESSES = 64  # at a time
AVAILABLE = {  # what contains a process -> a command that succeeds if it is there
    "docker": ["image", "inspect", IMAGE],
    "podman": ["image", "inspect", IMAGE],
    "bwrap": ["--unshare-all", "--ro-bind", "/", "/", "true"],
}


@dataclass
class Run:
    """outcomes: by test id, ("passed", "") or ("failed", "[1][1] is 6, not 0").

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


def here(tests: Iterable[str]) -> Run:
    """Run tests on one's own code, and print why those fail that do. What they print themselves
    goes to the terminal, too."""
    run = start(inside({"tests": [*tests]}), paths.ROOT, 300.0, None)
    for test, why in run.failures.items():
        print(f"  {test.rpartition('::')[2]}: {why}")
    print(end=f"  {run.ended}\n" if run.ended else "")
    return run


def inside(job: dict[str, Any], python: str = sys.executable, file: str = "") -> list[str]:
    """The command that runs a job of inside.py."""
    return [python, file or str(INSIDE), json.dumps(job)]


def container() -> str:
    """What there is to contain a process, of AVAILABLE. Raises UserError if there is nothing."""
    for program, words in AVAILABLE.items():
        if shutil.which(program):
            done = subprocess.run([program, *words], capture_output=True)
            if done.returncode == 0:
                return program
    raise UserError(
        "Nothing here can contain a hand-in: install bubblewrap (Linux), or build the image "
        f"'{IMAGE}' of Docker or Podman as exercises/INSTRUCTORS.md says. --unconfined runs code "
        "that you trust without."
    )


def prefix(program: str, name: str, tree: Path, cache: Path, keep: bool) -> list[str]:
    """What runs a command with `tree` as /tree and inside.py: no network, files that are only read
    (but the cache, with `keep`), scratch in memory."""
    read = {str(tree): "/tree", str(INSIDE): "/inside.py"}
    if program == "bwrap":
        words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
        words += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        words += ["--size", str(SCRATCH), "--tmpfs", "/tmp"]
        for path, place in ({path: path for path in SYSTEM if os.path.exists(path)} | read).items():
            words += ["--ro-bind", path, place]
        return [*words, "--bind" if keep else "--ro-bind", str(cache), "/cache", "--chdir", "/tree"]
    words = [program, "run", "--rm", "--name", name, "--network", "none", "--read-only"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534"]
    words += ["--memory", str(MEMORY), "--pids-limit", str(PROCESSES * 16)]
    words += ["--tmpfs", f"/tmp:exec,size={SCRATCH}", "--workdir", "/tree"]
    mounts = [f"{path}:{place}:ro" for path, place in read.items()]
    for mount in (*mounts, f"{cache}:/cache:{'rw' if keep else 'ro'}"):
        words += ["--volume", mount]
    return [*words, IMAGE]


def contained(
    program: str, job: dict[str, Any], tree: Path, cache: Path, seconds: float, keep: bool
) -> Run:
    """Run a job of inside.py over a clean tree. program: of `container`; "" for none. keep: what
    it compiles goes to `cache`, and what it prints to the terminal; else it begins with a copy of
    the cache."""
    name = f"staircase-{secrets.token_hex(8)}"
    python = "python" if program in ("docker", "podman") else sys.executable
    command, file, scratch, compiled = [], str(INSIDE), str(tree.parent), str(cache)
    if program:
        file, scratch, compiled = "/inside.py", "/tmp", "/cache"
        command = prefix(program, name, tree, cache, keep)
    variables = {"HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8", "MPLBACKEND": "agg"}
    variables |= {"XDG_CACHE_HOME": compiled if keep else f"{scratch}/cache"}
    variables |= {"PATH": os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    variables |= {"OMP_NUM_THREADS": "2"}
    job = {**job, "memory": MEMORY, "cache": "" if keep else compiled}
    command += ["env", "-i", *map("=".join, variables.items()), *inside(job, python, file)]
    try:
        return start(command, tree, seconds, None if keep else subprocess.DEVNULL)
    finally:
        if program in ("docker", "podman"):
            subprocess.run([program, "kill", name], capture_output=True)


def start(command: list[str], cwd: Path, seconds: float, printed: int | None) -> Run:
    """Start what runs inside.py, and read its lines when it ends or exceeds a limit. printed: where
    to what it prints goes; None: to the terminal."""
    started, run = time.monotonic(), Run()
    with tempfile.TemporaryFile() as results:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": results, "stderr": printed}
        process = subprocess.Popen(command, cwd=cwd, start_new_session=True, **pipes)
        watched = psutil.Process(process.pid)
        try:
            while process.poll() is None and not run.ended:
                time.sleep(0.05)
                run.ended = _exceeded(watched)
                if time.monotonic() - started > seconds:
                    run.ended = f"it took more than {seconds:.0f} s: an endless loop?"
                elif os.fstat(results.fileno()).st_size > RESULTS:
                    run.ended = "it forges results"
        finally:
            for child in _family(watched):
                with suppress(psutil.Error):
                    child.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        results.seek(0)
        for line in results.read(RESULTS).decode(errors="replace").splitlines():
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


def _family(process: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants, also those in sessions of their own."""
    with suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _exceeded(process: psutil.Process) -> str:
    """Which limit this process and its descendants exceed; "" if none."""
    memory, family = 0, _family(process)
    for member in family:
        with suppress(psutil.Error):
            memory += member.memory_info().rss
    if len(family) > PROCESSES:
        return f"it started more than {PROCESSES} processes"
    return f"it took more than {MEMORY >> 20} MiB of memory" if memory > MEMORY else ""
