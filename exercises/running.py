"""Run tests in a process of its own, contained and within limits, and read what it reports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared import paths
from shared.errors import UserError

INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
LEFT_OUT = shutil.ignore_patterns(*(".*", "__pycache__", "*.md", "*.ipynb", "*.svg", "*.png"))
MEMORY, SCRATCH, RESULTS = 4 << 30, 512 << 20, 4 << 20  # bytes
PROCESSES = 64  # at a time
ENVIRONMENT = "PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 MPLBACKEND=agg LANG=C.UTF-8"
ENVIRONMENT += " TRITON_INTERPRET=1 OMP_NUM_THREADS=1"
LIMITED = 'ulimit -f 524288 && exec "$0" "$@"'  # 256 MiB a file, in halves of a KiB
IMAGE = "staircase"  # of Docker and Podman: INSTRUCTORS.md says how to build it
# What comes before a command that runs in {tree}: no network, no file that can be written but in
# scratch memory.
DOCKER = """ run --rm --network none --read-only --cap-drop ALL --security-opt no-new-privileges
    --user 65534 --memory {memory} --pids-limit 1024 --tmpfs /tmp:exec,size={scratch}
    --volume {tree}:/tree:ro --workdir /tree staircase timeout -s KILL {seconds}"""
BWRAP = """bwrap --unshare-all --die-with-parent --new-session --cap-drop ALL --proc /proc
    --dev /dev --size {scratch} --tmpfs /tmp --ro-bind {tree} /tree --chdir /tree"""
SYSTEM = "/usr /bin /lib /lib32 /lib64 /etc/alternatives /etc/ld.so.cache /sys/devices/system/cpu"
for path in (*SYSTEM.split(), sys.prefix, sys.base_prefix):
    BWRAP += f" --ro-bind-try {path} {path}"
CONTAINERS = {  # a command that succeeds where there is one -> what comes before a command in it
    f"docker image inspect {IMAGE}": f"docker{DOCKER}",
    f"podman image inspect {IMAGE}": f"podman{DOCKER}",
    "bwrap --unshare-all --ro-bind / / true": BWRAP,
}


@dataclass
class Run:
    """outcomes: by test id, "passed", "failed" or "skipped". reasons: "[1][1] is 6, not 0".

    ended: why the process came to no end of its own; "" if it did.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> dict[str, str]:
        """Why tests did not pass, by their ids."""
        return {test: self.reasons[test] for test, o in self.outcomes.items() if o != "passed"}

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and not self.failures and not self.ended


def here(tests: list[str]) -> Run:
    """Run tests on one's own code, and print why those fail that do. What they print themselves
    goes to the terminal, too."""
    run = start([sys.executable, "-c", INSIDE, "{}", *tests], paths.ROOT, 300.0, shown=True)
    for test, why in run.failures.items():
        print(f"  {test.rpartition('::')[2]}: {why}")
    if run.ended:
        print(f"  {run.ended}")
    return run


def container() -> str:
    """What there is to contain a process, of CONTAINERS. Raises UserError if there is nothing."""
    for test, command in CONTAINERS.items():
        with suppress(FileNotFoundError):
            if subprocess.run(test.split(), capture_output=True).returncode == 0:
                return command
    raise UserError(
        "Nothing here can contain a hand-in: install bubblewrap (Linux), or build the image that "
        "exercises/INSTRUCTORS.md describes. --unconfined runs code that you trust without."
    )


def contained(
    container: str, tests: list[str], changed: dict[str, str], seconds: float, **options: Any
) -> Run:
    """Run tests in a tree of `shared` and the stages, without history and lessons, and in an
    environment that is always the same.

    container: of `container`; "" for none. changed: texts of files that are others in the tree.
    options: of the Reporter in inside.py.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        for name in ("shared", *paths.discover()):  # of all stages, some come by name
            shutil.copytree(paths.ROOT / name, tree / name, ignore=LEFT_OUT)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy2(paths.ROOT / name, tree / name)
        for file, text in changed.items():
            (tree / file).write_text(text, encoding="utf-8")
        places = {"tree": tree, "seconds": seconds, "memory": MEMORY, "scratch": SCRATCH}
        words = [word.format(**places) for word in container.split()]
        home, scratch = ("/tmp", "/tmp") if container else (Path.home(), folder)
        words += ["env", "-i", f"HOME={home}", f"TMPDIR={scratch}", *ENVIRONMENT.split()]
        words += [f"PATH={os.environ.get('PATH')}:/usr/local/bin:/usr/bin:/bin"]
        python = "python" if IMAGE in words else sys.executable
        words += ["sh", "-c", LIMITED, python, "-c", INSIDE, json.dumps(options), *tests]
        return start(words, tree, seconds)


def start(command: list[str], cwd: Path, seconds: float, shown: bool = False) -> Run:
    """Start what runs inside.py, and read its lines when it ends or exceeds a limit. shown: what it
    prints goes to the terminal."""
    run = Run()
    with tempfile.TemporaryFile() as results:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": results}
        pipes["stderr"] = None if shown else subprocess.DEVNULL
        process = psutil.Popen(command, cwd=cwd, start_new_session=True, **pipes)
        try:
            while process.poll() is None and not run.ended:
                time.sleep(0.05)
                run.ended = _exceeded(process, seconds)
        finally:
            with suppress(OSError):  # it has ended, with all that it started
                getattr(os, "killpg", os.kill)(process.pid, 9)
            process.wait()
        results.seek(0)
        for line in results.read(RESULTS).decode(errors="replace").splitlines():
            with suppress(ValueError, TypeError):  # not from inside.py
                test, outcome, why = json.loads(line)
                run.outcomes[str(test)], run.reasons[str(test)] = str(outcome), str(why)
    run.seconds = time.time() - process.create_time()
    if not run.ended and process.returncode not in range(6):  # pytest's own
        run.ended = f"its process ended with status {process.returncode} before its tests did"
    return run


def _exceeded(process: psutil.Process, seconds: float) -> str:
    """Which limit this process and its descendants exceed; "" if none."""
    if time.time() - process.create_time() > seconds:
        return f"it took more than {seconds:.0f} s: an endless loop?"
    with suppress(psutil.Error):  # some have just ended
        family = [process, *process.children(recursive=True)]
        if len(family) > PROCESSES:
            return f"it started more than {PROCESSES} processes"
        if sum(member.memory_info().rss for member in family) > MEMORY:
            return f"it took more than {MEMORY >> 20} MiB of memory"
    return ""
