"""The judge: it compares what a submission returns with what the reference returns.

It runs no line of a submission. For a task and some seeds it runs the task's driver (see driver.py)
twice, in two processes: with the submission's file, and with the reference's. Each writes plain
data to a pipe; the judge parses both, with limits, and looks for the first difference. A forged
answer would have to be the right one.

The submission's process works in a copy of the project in which the reference's version of the task
does not exist: its functions are empty, and so are those elsewhere that compute the same (TWINS of
a stage's drivers.py); all other modules are there in compiled form alone; later stages, tests,
lessons and wrong solutions are left out. It sees no expected result. The system contains it:
bubblewrap gives it namespaces of its own for users, processes, mounts and the network, a file
system that is read-only but for a scratch folder of limited size, and no rights. It is killed as a
group, and ends with the judge.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
MOST_LINE = 2**20  # bytes of a result: parsed, a hostile one takes 25 times as many
MOST_DATA = 2**25  # bytes of all results of a process
POLL = 0.2  # seconds: to look at all processes of the machine takes 4 ms
WAIT = 4  # times its limit of processor time that a process may take: machines are shared
LEFT_OUT = (
    *("__pycache__", ".*", "*.ipynb", "*.svg", "*.png", "*.md", "*.json", "*.safetensors"),
    *("tests", "wrong.txt", "right.txt", "figures", "benchmark.py", "stories", "*.c", "*.h"),
)
# What is not there in compiled form alone; the last two are started as programs.
SOURCES = "__init__.py", "tasks.py", "trial.py", "template_process.py"
COURSE = ("__init__.py", "difference.py", "driver.py", "mine.py", "stages.py")  # of shared/course
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")  # environment variables
HOMES = ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME")
UNPRIVILEGED = 65534
# Architectures and numbers of: memfd_create, memfd_secret, shmget, semget and msgget, which take
# memory that no process is seen to have; ptrace and process_vm_*; keys; bpf, perf, userfaultfd,
# io_uring. And that of setsockopt, for options of which a socket holds megabytes.
_X86 = (319, 447, 29, 64, 68, 101, 310, 311, 248, 249, 250, 321, 298, 323, 425)
_ARM = (279, 447, 194, 190, 186, 117, 270, 271, 217, 218, 219, 280, 241, 282, 425)
REFUSED = {"x86_64": (0xC000003E, _X86, 54), "aarch64": (0xC00000B7, _ARM, 208)}
BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE


@dataclass(frozen=True)
class Limits:
    """The limits of one process: seconds of processor time, and MiB of memory and of disk."""

    seconds: float = 60.0
    memory: int = 4096
    disk: int = 256


@dataclass(frozen=True)
class Ended:
    """How a process ended. lines: its results without notes, "" in `why` if it ended well, what it
    printed."""

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
        self._expected: dict[tuple[str, Any], list[Any]] = {}
        self._home = tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True)
        self._base = functools.cache(self._copied)
        self.stopped = threading.Event()  # then processes end, whatever they do
        self._lock, self._locks = threading.Lock(), dict[tuple[str, Any], threading.Lock]()
        if not confined:
            self._alone(1, 0)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
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
        key = stage, drivers_of(stage).DRIVERS[task.number]  # some tasks share one
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._expected:
                reference = None if extra is None else extra.reference.encode()
                ended = self._drive(stage, task, reference, extra)
                self._expected[key] = self._right(stage, task, ended)
            return self._expected[key]

    def _right(self, stage: str, task: Task, ended: Ended) -> list[Any]:
        """What the reference has returned."""
        results = [parsed(line) for line in ended.lines]
        data = [result["data"] for result in results if result and "data" in result]
        if ended.why or len(data) != len(self.seeds):
            raise RuntimeError(
                f"{stage} task {task.number}: the reference fails: {ended.why} "
                f"{plain(str(results[-1:]), 500)} {plain(ended.printed)}"
            )
        return data

    def _drive(self, stage: str, task: Task, source: bytes | None, extra: Extra | None) -> Ended:
        """Run the driver with a submission's file, or with the reference."""
        files = {} if source is None else {f"{stage}/{task.file}": source}
        with self._lock:
            base = self._base(stage)
        with self._tree(base, files) as tree:
            if source is not None and extra is None:
                empty_out(tree, stage, task)
            return self._run(tree, stage, [task], alone=True)

    def _run(self, tree: Path, stage: str, tasks: Sequence[Task], alone: bool) -> Ended:
        numbers = [task.number for task in tasks]
        job = {"stage": stage, "tasks": numbers, "seeds": self.seeds, "alone": alone}
        return run(tree, job, self.limits, self.confined, self.stopped)

    def why_together(self, stage: str, files: Mapping[str, bytes]) -> list[str]:
        """For each task of a stage, why its driver returns something else with all these files, by
        path, than with the reference; "" if it does not. What they leave open is the reference's.
        """
        tasks = mine.tasks(stage)
        base = self._base(max(files).partition("/")[0])
        with ThreadPoolExecutor(2 if self.confined else 1) as pool:
            sides = [pool.submit(self._together, base, stage, laid) for laid in ({}, files)]
            try:
                references, submitted = (side.result() for side in sides)
            except BaseException:  # Ctrl-C
                self.stopped.set()
                raise
        return [
            verdict(rule_of(stage, task), self.seeds, self._right(stage, task, reference), ended)
            for task, reference, ended in zip(tasks, references, submitted, strict=True)
        ]

    def _together(self, base: Path, stage: str, files: Mapping[str, bytes]) -> list[Ended]:
        """How each task of a stage ended: all in one process, which loads PyTorch once. If it ends
        in a task, another one goes on with the next. A driver that tasks share runs once."""
        drivers = drivers_of(stage).DRIVERS
        firsts = {drivers[task.number]: task for task in reversed(mine.tasks(stage))}
        tasks, count = [*reversed(firsts.values())], len(self.seeds)
        parts: list[Ended] = []
        while rest := tasks[len(parts) :]:
            with self._tree(base, files) as tree:
                for name, source in files.items():
                    hide_solved(tree, name, source)
                ended = self._run(tree, stage, rest, alone=False)
            whole = min(len(ended.lines) // count, len(rest) - 1)
            starts = range(0, whole * count, count)
            parts += [Ended(ended.lines[start : start + count], "", "") for start in starts]
            parts.append(Ended(ended.lines[whole * count :], ended.why, ended.printed))
        by_driver = dict(zip((drivers[task.number] for task in tasks), parts, strict=True))
        return [by_driver[drivers[task.number]] for task in mine.tasks(stage)]

    def measured(self, stage: str, files: Mapping[str, bytes], plan: Mapping[str, Any]) -> Any:
        """What `reports.staircase.work` returns with these files laid over their stages.

        Raises UserError if it returns nothing.
        """
        threads = os.cpu_count() or 1
        limits = replace(self.limits, seconds=threads * self.limits.seconds)
        job = {"measure": stage, "plan": dict(plan), "threads": threads, "alone": False}
        with self._tree(paths.ROOT, files) as tree:
            ended = run(tree, job, limits, self.confined)
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
        for path in base.rglob("*.py"):
            compile_alone(path, base)
        return base


def compile_alone(path: Path, tree: Path) -> None:
    """Put the compiled form of a module in the place of its source, which may hold solutions."""
    compileall.compile_file(path, quiet=2, legacy=True, stripdir=str(tree))
    if path.name not in SOURCES:
        path.unlink()


def empty_out(tree: Path, stage: str, task: Task) -> None:
    """Take the reference's functions of a task, and their twins, out of a copy of the project. The
    source of the task's file is in it then: what else is in there comes from it."""
    path = tree / stage / task.file
    source = mine.read(path if path.is_file() else paths.ROOT / stage / task.file)
    mine.write(path, mine.emptied(source, stage, task))
    path.with_suffix(".pyc").unlink(missing_ok=True)
    for name, functions in twins_of(stage, task).items():
        source = mine.read(paths.ROOT / name)
        mine.write(tree / name, mine.emptied(source, stage, replace(task, functions=functions)))
        compile_alone(tree / name, tree)


def hide_solved(tree: Path, name: str, source: bytes) -> None:
    """Empty the reference's functions of all tasks that a submission's file does not leave open."""
    stage, _, file = name.partition("/")
    mine.write(tree / name, mine.read(paths.ROOT / name))
    for task in mine.tasks(stage):
        if task.file == file and not mine.is_open(source.decode("utf-8-sig"), stage, task):
            empty_out(tree, stage, task)


def twins_of(stage: str, task: Task) -> Mapping[str, tuple[str, ...]]:
    """Functions, by path, that compute what the task's do: a submission could call them."""
    twins: Mapping[int, Any] = getattr(drivers_of(stage), "TWINS", {})
    return twins.get(task.number, {})


def drivers_of(stage: str) -> Any:
    """The module with a stage's drivers: see driver.py."""
    return import_module(f"{stage}.drivers")


def rule_of(stage: str, task: Task) -> Rule:
    """How the results of a task are compared."""
    rules: Mapping[int, Rule] = getattr(drivers_of(stage), "RULES", {})
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


def run(
    tree: Path,
    job: Mapping[str, Any],
    limits: Limits,
    confined: bool = True,
    stopped: threading.Event | None = None,
) -> Ended:
    """Run driver.py's job in `tree`, at most until `stopped`, and return how it ended."""
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
        data.first.wait(WAIT * limits.seconds)
        with contextlib.suppress(OSError):  # it has ended already
            job = {**job, "seconds": limits.seconds, "disk": limits.disk}
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.close()
        why = _watch(process, None if confined else scratch, limits, stopped)
    finally:
        _end(process, None if confined else before)
    lines = data.end().splitlines()
    note = next((parsed(line) for line in reversed(lines) if is_note(line)), None)
    if why and isinstance(note, dict) and note["now"]:
        why = f"{plain(str(note['now']), 300)}: {why}"
    results = [line for line in lines if not is_note(line)]
    return Ended(results, why, printed.end().decode("utf-8", "replace"))


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
    architecture, numbers, setsockopt = REFUSED[platform.machine()]
    allow, refuse = -2, -1  # the places, from the end, of the last two steps
    load, equal, at_least = 0x20, 0x15, 0x35  # at_least and equal jump to the second or the third
    steps = [(load, 0, 0, 4), (equal, 0, refuse, architecture), (load, 0, 0, 0)]
    steps += [(at_least, refuse, 0, 0x40000000)]  # x32
    steps += [(equal, refuse, 0, number) for number in numbers]
    steps += [(equal, 0, allow, setsockopt), (load, 0, 0, 32)]  # its third argument
    steps += [(equal, refuse, 0, option) for option in BUFFERS]
    steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allowed; EPERM
    packed = b""
    for here, (code, then, otherwise, number) in enumerate(steps, 1):
        jumps = (place and place + len(steps) - here for place in (then, otherwise))
        packed += struct.pack("HBBI", code, *jumps, number)
    return packed


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


def _watch(
    process: subprocess.Popen[bytes],
    scratch: Path | None,
    limits: Limits,
    stopped: threading.Event | None = None,
) -> str:
    """Wait until the process has ended or reached a limit; returns why it did not end well. Its
    seconds are of processor time, so that what else the machine does costs it nothing."""
    deadline = time.monotonic() + WAIT * limits.seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
            break
        if stopped is not None and stopped.is_set():
            return "Grading was interrupted."
        if time.monotonic() > deadline:
            return f"It has not ended after {WAIT * limits.seconds:g} s: what does it wait for?"
        memory = seconds = 0.0
        with contextlib.suppress(psutil.Error):  # one has just ended
            root = psutil.Process(process.pid)
            for known in [*root.children(recursive=True), root]:
                memory += known.memory_info().rss
                seconds += sum(known.cpu_times()[:4])  # and of those that it has waited for
        if seconds > limits.seconds:
            return f"It took more than {limits.seconds:g} s of processor time: an endless loop?"
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
    """The value of a line of JSON, or None for what is not JSON, is too long, is nested too deep,
    or is NaN."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    try:
        return None if len(line) > MOST_LINE else json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def verdict(rule: Rule, seeds: Sequence[int], expected: Sequence[Any], ended: Ended) -> str:
    """Why results are not the reference's; "" if they are. They are untrusted: check all."""
    for seed, right, line in zip(seeds, expected, ended.lines, strict=False):
        result = parsed(line)
        if not isinstance(result, dict) or len(result) != 1:
            return f"seed {seed}: what came back is not a result, or too long."
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
    if len(ended.lines) != len(seeds):
        return f"There are {len(ended.lines)} results for {len(seeds)} seeds."
    return ""


def plain(text: str, most: int = MOST_OUTPUT) -> str:
    """Text that is safe to show: without control characters, at most `most` characters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = "".join(letter for letter in text if letter in "\n\t" or letter.isprintable()).strip()
    return text if len(text) <= most else f"{text[:most]} ..."
