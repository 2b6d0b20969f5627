"""The judge: it compares what a submission returns with what the reference returns.

It runs no line of a submission. For a task and some seeds it runs the task's driver (see driver.py)
twice, in two processes: with the submission's file, and with the reference's. Each writes plain
data to a pipe; the judge parses both, with limits, and looks for the first difference. A forged
answer would have to be the right one.

The submission's process works in a copy of the project in which the reference's version of the task
does not exist: its functions are empty, later stages, tests, lessons and wrong solutions are left
out. It sees no expected result. The system contains it: bubblewrap gives it namespaces of its own
for users, processes, mounts and the network, a file system that is read-only but for a scratch
folder of limited size, and no rights. It is killed as a group, and ends with the judge.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import functools
import json
import os
import platform
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import psutil

from .. import paths
from ..errors import UserError
from ..task import Task
from . import mine
from .difference import difference

SEEDS = 20
MOST_OUTPUT = 2000  # characters shown of a submission's output, and of a message
MOST_DATA = 2**26  # bytes of all results of a process
POLL = 0.05  # seconds
LEFT_OUT = (
    *("__pycache__", ".*", "*.ipynb", "*.svg", "*.png", "*.md", "*.json", "*.safetensors"),
    *("tests", "wrong.txt", "right.txt", "figures", "benchmark.py", "stories"),
)
COURSE = ("__init__.py", "difference.py", "driver.py", "mine.py", "stages.py")  # of shared/course
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")  # environment variables
HOMES = ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME")
UNPRIVILEGED = 65534
# Architectures and numbers of: memfd_create, memfd_secret and shmget, which take memory that no
# process is seen to have; ptrace and process_vm_*; keys; bpf, perf, userfaultfd, io_uring.
REFUSED = {
    "x86_64": (0xC000003E, (319, 447, 29, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425)),
    "aarch64": (0xC00000B7, (279, 447, 194, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425)),
}


@dataclass(frozen=True)
class Limits:
    """The limits of one process: seconds, and MiB of memory and of disk."""

    seconds: float = 60.0
    memory: int = 4096
    disk: int = 256


@dataclass(frozen=True)
class Ended:
    """How a process ended. lines: its results, "" in `why` if it ended well, what it printed."""

    lines: list[bytes]
    why: str
    printed: str


@dataclass(frozen=True)
class Extra:
    """A generated task, in addition to those of `stage`: its file is a module by itself.
    reference: the source of a right one."""

    stage: str
    task: Task
    reference: str


class Judge:
    """Judges tasks with seeds that are drawn here; the reference's results are kept.

    confined: False runs processes without bubblewrap, for a container that holds one submission.
    Raises UserError if they cannot be confined.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        confined: bool = True,
        seeds: Sequence[int] | None = None,
    ) -> None:
        if confined and (why := unconfined()):
            raise UserError(
                f"{why}, so a submission could not be contained: install bubblewrap (Linux), or "
                "grade in the container of shared/course/Containerfile, where --unconfined is "
                "enough. For your own code, add --unconfined."
            )
        self.limits, self.confined = limits or Limits(), confined
        drawn = random.SystemRandom()
        self.seeds = list(seeds or (drawn.randrange(2**40) for _ in range(SEEDS)))
        self._expected: dict[tuple[str, int], list[Any]] = {}
        self._home = tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True)
        self._base = functools.cache(self._copied)
        self._lock, self._locks = threading.Lock(), dict[tuple[str, int], threading.Lock]()
        if not confined:
            self._alone(1, 0)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.confined:
            self._alone(0, 1)
        self._home.cleanup()

    def _alone(self, adopts: int, traceable: int) -> None:
        """Whether orphans become children of this process, and whether others may trace it."""
        if sys.platform == "linux":
            prctl = ctypes.CDLL(None).prctl
            prctl(36, adopts), prctl(4, traceable)  # PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE

    def why(self, stage: str, task: Task, source: bytes, extra: Extra | None = None) -> str:
        """Why a file with this source does not solve the task; "" if it does."""
        expected = self.expected(stage, task, extra)
        ended = self._drive(stage, task, source, extra)
        why = verdict(rule_of(stage, task), self.seeds, expected, ended)
        printed = plain(ended.printed)
        return why + (f"\nIt printed:\n{printed}" if why and printed else "")

    def expected(self, stage: str, task: Task, extra: Extra | None = None) -> list[Any]:
        """The reference's results. Raises RuntimeError if it fails: then the driver is wrong."""
        key = stage, task.number
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._expected:
                reference = None if extra is None else extra.reference.encode()
                ended = self._drive(stage, task, reference, extra)
                results = [parsed(line) for line in ended.lines if not is_note(line)]
                data = [result["data"] for result in results if result and "data" in result]
                if ended.why or len(data) != len(self.seeds):
                    raise RuntimeError(
                        f"{stage} task {task.number}: the reference fails: {ended.why} "
                        f"{plain(str(results[-1:]), 500)} {plain(ended.printed)}"
                    )
                self._expected[key] = data
            return self._expected[key]

    def _drive(self, stage: str, task: Task, source: bytes | None, extra: Extra | None) -> Ended:
        """Run the driver with a submission's file, or with the reference."""
        files = {} if source is None else {f"{stage}/{task.file}": source}
        job = {"stage": stage, "task": task.number, "seeds": self.seeds, "alone": True}
        with self._lock:
            base = self._base(stage)
        with self._tree(base, files) as tree:
            if source is not None and extra is None:
                empty_out(tree, stage, task)
            return run(tree, job, self.limits, self.confined)

    def why_together(self, stage: str, task: Task, files: Mapping[str, bytes]) -> str:
        """Why a task's driver returns something else with all these files, by path, than with the
        reference; "" if it does not. What they leave open is the reference's."""
        job = {"stage": stage, "task": task.number, "seeds": self.seeds, "alone": False}
        with self._lock:
            base = self._base(max(files).partition("/")[0])
        with self._tree(base, files) as tree:
            ended = run(tree, job, self.limits, self.confined)
        return verdict(rule_of(stage, task), self.seeds, self.expected(stage, task), ended)

    def measured(self, stage: str, files: Mapping[str, bytes], plan: Mapping[str, Any]) -> Any:
        """What `shared.bench.staircase.work` returns with these files laid over their stages.

        Raises UserError if it returns nothing.
        """
        job = {"measure": stage, "plan": dict(plan), "threads": os.cpu_count(), "alone": False}
        with self._tree(paths.ROOT, files) as tree:
            ended = run(tree, job, self.limits, self.confined)
        answer = parsed(ended.lines[-1]) if ended.lines else None
        if ended.why or not isinstance(answer, dict) or "data" not in answer:
            why = ended.why or plain(str(answer))
            raise UserError(f"The engine failed: {why}\n{plain(ended.printed)}")
        return answer["data"]

    @contextlib.contextmanager
    def _tree(self, base: Path, files: Mapping[str, bytes]) -> Iterator[Path]:
        """A copy of a project, with these files to lay over it."""
        with tempfile.TemporaryDirectory(dir=self._home.name, ignore_cleanup_errors=True) as place:
            tree = Path(place) / "tree"
            if base == paths.ROOT:
                for name in ("shared", *paths.discover()):
                    shutil.copytree(base / name, tree / name)
            else:
                shutil.copytree(base, tree)
            for name, source in files.items():
                path = tree / "mine" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source)
            yield tree

    def _copied(self, stage: str) -> Path:
        """The project up to a stage, without what shows solutions."""
        base = Path(self._home.name) / stage
        copy_project(base, stage)
        compileall.compile_dir(base, quiet=2)
        return base


def empty_out(tree: Path, stage: str, task: Task) -> None:
    """Take the reference's functions of a task out of a copy of the project, in all forms."""
    path = tree / stage / task.file
    mine.write(path, mine.emptied(mine.read(path), stage, task))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def rule_of(stage: str, task: Task) -> Rule:
    """How the results of a task are compared."""
    rules: Mapping[int, Rule] = getattr(import_module(f"{stage}.drivers"), "RULES", {})
    return rules.get(task.number, difference)


def copy_project(target: Path, last: str) -> None:
    """The code that runs the stages up to `last`: no tests, no lessons, no later stage."""
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    stages = [stage for stage in paths.discover() if stage <= last]
    for name in ("shared", *stages):
        shutil.copytree(paths.ROOT / name, target / name, ignore=ignored)
    for path in (target / "shared" / "course").iterdir():
        if path.name not in COURSE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(target / "shared" / "bench")


# ---- processes ----------------------------------------------------------------------------------


def run(tree: Path, job: Mapping[str, Any], limits: Limits, confined: bool = True) -> Ended:
    """Run driver.py's job in `tree`, and return how it ended."""
    tree = tree.resolve()
    scratch = tree.with_name("scratch")
    words = [sys.executable, "-B", "-m", "shared.course.driver"]
    options: dict[str, Any] = {"cwd": tree}
    if confined:
        confinement = bubblewrap(tree, limits)
        if refused := system_calls():  # a pipe holds them until bubblewrap reads them
            reader, writer = os.pipe()
            os.write(writer, refused)
            os.close(writer)
            confinement += ["--seccomp", str(reader)]
            options["pass_fds"] = [reader]
        words = [*confinement, "--", *words]
        home = "/tmp"
    else:
        scratch.mkdir(exist_ok=True)
        home = str(scratch)
        if other := another_user():
            options |= other
            os.chown(scratch, UNPRIVILEGED, UNPRIVILEGED)
            for folder in (tree.parent, tree.parent.parent):
                folder.chmod(0o755)
    variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    variables |= dict.fromkeys(HOMES, home) | {"USER": "student", "PYTHONUTF8": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = set(psutil.Process().children(recursive=True))
    process = subprocess.Popen(
        words,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=os.name == "posix",
        **options,
    )
    for reader in options.get("pass_fds", ()):
        os.close(reader)
    assert process.stdin and process.stdout and process.stderr
    data, printed = _Pipe(process.stdout, MOST_DATA), _Pipe(process.stderr, 4 * MOST_OUTPUT)
    try:
        # The job comes when it is contained: without a judge it has none, and ends.
        data.first.wait(limits.seconds)
        with contextlib.suppress(OSError):  # it has ended already
            job = {**job, "seconds": limits.seconds, "disk": limits.disk}
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.close()
        why = _watch(process, None if confined else scratch, limits)
    finally:
        _end(process, None if confined else before)
    lines = data.end().splitlines()
    note = next((parsed(line) for line in reversed(lines) if is_note(line)), None)
    if why and isinstance(note, dict) and note["now"]:
        why = f"{plain(str(note['now']), 300)}: {why}"
    return Ended(lines, why, printed.end().decode("utf-8", "replace"))


def bubblewrap(tree: Path, limits: Limits) -> list[str]:
    """The command that confines another one to `tree`, read-only, and a scratch folder."""
    words = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    words += ["--uid", str(UNPRIVILEGED), "--gid", str(UNPRIVILEGED), "--hostname", "staircase"]
    words += ["--new-session", "--die-with-parent"]
    words += ["--size", str(limits.disk * 2**20), "--tmpfs", "/tmp"]  # first: Python may be in it
    places = {"/usr", "/lib", "/lib64", "/bin", sys.prefix, str(Path(sys.executable).parent.parent)}
    places |= {str(Path(place).resolve()) for place in (sys.prefix, sys.base_prefix)}
    project, hidden = str(paths.ROOT), list[str]()
    for place in sorted({*places, project}):
        if place == project:  # where a place holds it, its solutions are hidden; in /tmp, its name
            shown = {*places, "/tmp"}
            hidden += [project] if any(paths.ROOT.is_relative_to(p) for p in shown) else []
            words += [word for place in hidden for word in ("--tmpfs", place)]
        elif os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            words += ["--ro-bind", place, place]
    for place in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", place, place]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--ro-bind", str(tree), "/project", "--chdir", "/project"]
    return [*words, *(w for place in ("/dev", "/", *hidden) for w in ("--remount-ro", place))]


def system_calls() -> bytes:
    """A filter for seccomp: the calls of REFUSED fail, as those of another architecture do; b""
    for an unknown machine."""
    if platform.machine() not in REFUSED:
        return b""
    architecture, numbers = REFUSED[platform.machine()]
    last = len(numbers) + 1  # steps from the first comparison to the refusal
    steps = [(0x20, 0, 0, 4), (0x15, 0, last + 2, architecture), (0x20, 0, 0, 0)]
    steps += [(0x35, last, 0, 0x40000000)]  # x32
    steps += [(0x15, last - 1 - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allowed; EPERM
    return b"".join(struct.pack("HBBI", *step) for step in steps)


@functools.cache
def another_user() -> dict[str, Any]:
    """Options for a process of another user, who can neither signal the grader nor write its files;
    {} if the grader is not root, or a root that may not change its user."""
    options: dict[str, Any] = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []}
    if os.name != "posix" or os.geteuid() != 0:
        return {}
    try:
        subprocess.run(["true"], check=True, **options)
    except OSError:
        return {}
    return options


@functools.cache
def unconfined() -> str:
    """Why bubblewrap cannot confine a process here; "" if it can."""
    if shutil.which("bwrap") is None:
        return "There is no bubblewrap (bwrap) on this machine"
    with tempfile.TemporaryDirectory(prefix="staircase-") as folder:
        words = [*bubblewrap(Path(folder), Limits()), "--", sys.executable, "-c", ""]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        return f"bubblewrap does not work on this machine ({plain(done.stderr, 200)})"
    return ""


class _Pipe:
    """Reads a pipe to its end and keeps the first `most` bytes, so that endless output neither
    fills our memory nor blocks the writer."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.kept = bytearray()
        self.first = threading.Event()  # there are bytes, or the end
        self._stream, self._most = stream, most
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while chunk := self._stream.read1(65536):  # type: ignore[attr-defined]
                self.kept += chunk[: self._most - len(self.kept)]
                self.first.set()
        self.first.set()

    def end(self) -> bytes:
        """The bytes kept. Does not wait for an orphan that holds the pipe open."""
        self._thread.join(2)
        return bytes(self.kept)


def _watch(process: subprocess.Popen[bytes], scratch: Path | None, limits: Limits) -> str:
    """Wait until the process has ended or reached a limit; returns why it did not end well."""
    deadline = time.monotonic() + limits.seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
            break
        if time.monotonic() > deadline:
            return f"It took longer than {limits.seconds:g} s: is there a loop that does not end?"
        memory = 0
        with contextlib.suppress(psutil.Error):  # one has just ended
            for known in psutil.Process(process.pid).children(recursive=True):
                memory += known.memory_info().rss
            memory += psutil.Process(process.pid).memory_info().rss
        if memory > limits.memory * 2**20:
            return f"It took more than {limits.memory:,} MiB of memory."
        if scratch is not None and _size(scratch) > limits.disk * 2**20:
            return f"It wrote more than {limits.disk:,} MiB to disk."
    status = process.returncode
    if not status:
        return ""
    if status > 128:  # as bubblewrap and shells report a signal
        status = 128 - status
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"Its process crashed ({signal.Signals(-status).name})."
    return f"Its process ended too early (exit status {status}): does something exit?"


def _size(folder: Path) -> int:
    """Bytes in a folder that is in use; what vanishes meanwhile counts as nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _end(process: subprocess.Popen[bytes], before: set[psutil.Process] | None) -> None:
    """Kill a process and all that it has started. With bubblewrap its first process takes all
    others along; without, orphans are children of this process: `before` are those of others."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for _ in range(20):
        alive = [child for child in children if child.is_running()]
        if before is not None:
            alive += set(psutil.Process().children(recursive=True)) - before - set(alive)
        if not alive:
            break
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(alive, timeout=0.5)


# ---- results ------------------------------------------------------------------------------------


Rule = Callable[[Any, Any], str]  # (expected, result) -> the difference that matters, or ""


def is_note(line: bytes) -> bool:
    return line.startswith(b'{"now": ')


def parsed(line: bytes) -> Any:
    """The value of a line of JSON, or None for what is not JSON, is nested too deep, or is NaN."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    try:
        return json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def verdict(rule: Rule, seeds: Sequence[int], expected: Sequence[Any], ended: Ended) -> str:
    """Why results are not the reference's; "" if they are. They are untrusted: check all."""
    lines = [line for line in ended.lines if not is_note(line)]
    for seed, right, line in zip(seeds, expected, lines, strict=False):
        result = parsed(line)
        if not isinstance(result, dict) or len(result) != 1:
            return f"seed {seed}: what came back is not a result."
        if "raised" in result:
            return f"seed {seed}: {plain(str(result['raised']), 600)}"
        try:
            why = rule(right, result.get("data"))
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
            why = "what came back is not a result."
        except RecursionError:  # lists in lists that could be parsed, and just not be shown
            why = "what came back is nested too deep."
        if why:
            return f"seed {seed}: {plain(why, 600)}"
    if ended.why:
        return ended.why
    if len(lines) != len(seeds):
        return f"There are {len(lines)} results for {len(seeds)} seeds."
    return ""


def plain(text: str, most: int = MOST_OUTPUT) -> str:
    """Text that is safe to show: without control characters, at most `most` characters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = "".join(letter for letter in text if letter in "\n\t" or letter.isprintable()).strip()
    return text if len(text) <= most else f"{text[:most]} ..."
