"""Judging a submission: each task in its own process, in its own copy of the project.

A submission is a program by an unknown author. It may print without end, loop, exit, use up memory,
edit the tests, or write a report of its own. So the parent runs none of it, and keeps control of
the project, the tests and the clock. It takes from the submission only the one file that a task is
about. Every process

- works in a fresh copy of the project, with few environment variables, its own home folder, and no
  secrets;
- runs only a file that gate.py has read and found harmless;
- may write only to a scratch folder, start no process but a C compiler that writes there, signal no
  process, and connect only to this machine (a Python audit hook);
- has limits for time, memory, output and disk, and is killed with all its children when it reaches
  one; it also ends with the parent, however that ends;
- must report that the tests passed and that the canary, a test that cannot pass, did not; the
  report needs a secret word that the process got before it loaded the submission. Without a
  complete report the task fails.

The submission shares a process with the tests, because they call its functions and look at its
objects. Code that got past the gate could therefore find the word in memory, or make pytest pass
all tests but the canary: see "Hostile submissions" in INSTRUCTORS.md for what to do about it. All
copies are made from one copy taken at the start, and grading stops if that has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from .. import paths
from ..errors import UserError
from . import gate, mine

CANARY = "canary_test.py::test_that_cannot_pass"
CANARY_CODE = "def test_that_cannot_pass():\n    assert [1] == [2]\n"
MOST_BYTES = 2**20  # of a submitted file
MOST_OUTPUT = 2000  # characters shown of a submission's output, and of a report's messages
MOST_REPORT = 2**20
POLL = 0.1  # seconds
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.ipynb", "*.svg")
# Variables that a process needs to start. All others, such as tokens and keys, stay out.
KEPT = (
    "PATH",
    "SYSTEMROOT",
    "SYSTEMDRIVE",
    "WINDIR",
    "COMSPEC",
    "PATHEXT",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
)
COMPILERS = ("cc", "gcc", "clang")
# Options that a compiler may get; any other word must be a path in the scratch folder.
FLAG = r"-(O\d|std=\w+|fPIC|shared|W[\w-]+|m[\w=-]+|D\w+(=\w+)?|o|lm)|--version"
MARK = "STAIRCASE_GRADING"  # a variable that marks all processes of a task, orphans too


@dataclass(frozen=True)
class Limits:
    """The limits of one task: seconds, and MiB of memory and of disk."""

    seconds: float = 120.0
    memory: int = 4096
    disk: int = 256


@dataclass(frozen=True)
class Verdict:
    """The result of one task. why: "" if it passed, else the reason, for the student."""

    stage: str
    task: mine.Task
    passed: bool
    why: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{mine.label(self.stage, self.task)}: {self.task.title}"

    @property
    def points(self) -> int:
        """All of a task's points or none: half a function is no function."""
        return self.task.points if self.passed else 0


@dataclass(frozen=True)
class Extra:
    """A generated task, in addition to those of `stage`. Its file is a module by itself.

    source: the file that the student began with. tests: the source of the task's one test file.
    """

    stage: str
    task: mine.Task
    source: str
    tests: str


# ---- the parent ----


def grade(
    chosen: Sequence[str],
    submission: Path,
    limits: Limits | None = None,
    trust: bool = False,
    extra: Extra | None = None,
) -> Iterator[Verdict]:
    """Judge all tasks of some stages, one after another.

    submission: a folder of stages, like mine/, or the folder with the files of the one chosen
        stage. trust: run what the gate refuses, too. extra: one more task. Raises UserError if
        there is nothing to grade, or if a submission has changed the tests.
    """
    if not submission.is_dir():
        raise UserError(f"There is no folder {submission}: name the submission's, such as mine.")
    folders = {stage: submitted(submission, stage, alone=len(chosen) == 1) for stage in chosen}
    if not any(folders.values()):
        raise UserError(
            f"{submission} holds nothing of {', '.join(chosen)}: it needs a folder for each stage "
            "with its files, as `python -m shared.course.exercise start` makes it."
        )
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        trusted = Path(temporary).resolve() / "trusted"
        copy_project(trusted)
        if extra is not None:
            mine.write(trusted / extra.stage / extra.task.tests[0], extra.tests)
        before = _fingerprint(trusted)
        for stage, folder in folders.items():
            extras = [extra.task] if extra is not None and extra.stage == stage else []
            for task in (*mine.tasks(stage), *extras):
                started = time.monotonic()
                options = folder, trusted, limits or Limits(), trust
                why = _judge(stage, task, *options, extra if task in extras else None)
                if _fingerprint(trusted) != before:
                    raise UserError(
                        f"The tests have changed while {mine.label(stage, task)} was judged, so no "
                        "result is valid: read the submission, and grade it in a container."
                    )
                yield Verdict(stage, task, not why, why, time.monotonic() - started)


def submitted(submission: Path, stage: str, alone: bool) -> Path | None:
    """The folder of a submission that holds a stage's files."""
    places = [submission / stage, submission / "mine" / stage, *([submission] if alone else [])]
    wanted, root = mine.files(stage), submission.resolve()
    for place in places:  # a link must not lead to the reference
        if place.resolve().is_relative_to(root) and any(
            (place / name).is_file() for name in wanted
        ):
            return place
    return None


def _judge(
    stage: str,
    task: mine.Task,
    folder: Path | None,
    trusted: Path,
    limits: Limits,
    trust: bool = False,
    extra: Extra | None = None,
) -> str:
    """Why the task is not solved; "" if it is."""
    path = None if folder is None else folder / task.file
    if folder is None or path is None or not path.is_file():
        return f"There is no {task.file} in the submission."
    if path.resolve() != folder.resolve() / task.file or path.stat().st_size > MOST_BYTES:
        return f"{task.file} is a link, or larger than {MOST_BYTES // 1024} KiB."
    try:
        source = path.read_bytes()
    except OSError as error:
        return f"{task.file} cannot be read: {error.strerror}."
    reference = None if extra is None else extra.source
    if not trust and (why := gate.refused(source, stage, task.file, reference)):
        return why
    with tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True) as temporary:
        base = Path(temporary).resolve()
        project, scratch, copy = base / "project", base / "scratch", base / "submission"
        shutil.copytree(trusted, project)
        for folder in (scratch, copy):
            folder.mkdir()
        (copy / path.name).write_bytes(source)
        word = secrets.token_hex(16)
        job = {
            "word": word,
            "stage": stage,
            "task": task.number if extra is None else None,
            "file": path.name,
            "tests": [f"{stage}/{test}" for test in task.tests],
            "folder": str(copy),
            "scratch": str(scratch),
            "seconds": limits.seconds,
        }
        ended, report, output = run_job(job, project, scratch, limits)
        return _verdict(stage, task, ended, read_report(report, word), output)


def copy_project(target: Path) -> None:
    """A copy of all code, with the canary."""
    target.mkdir()
    for name in ("shared", *paths.discover()):
        shutil.copytree(paths.ROOT / name, target / name, ignore=LEFT_OUT)
    shutil.copy(paths.ROOT / "pyproject.toml", target)
    (target / CANARY.partition("::")[0]).write_text(CANARY_CODE, encoding="utf-8")


def _fingerprint(project: Path) -> str:
    """A digest of all code, tests included."""
    digest = hashlib.sha256((project / "pyproject.toml").read_bytes())
    for path in sorted(project.rglob("*.py")):
        digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    place = str(scratch)
    homes = dict.fromkeys(
        (
            "HOME",
            "USERPROFILE",
            "TMPDIR",
            "TEMP",
            "TMP",
            "MPLCONFIGDIR",
            "XDG_CACHE_HOME",
            "HF_HOME",
        ),
        place,
    )
    return {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        **homes,
        **dict.fromkeys(("USER", "LOGNAME", "USERNAME"), "student"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "HF_HUB_OFFLINE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUTF8": "1",
        MARK: mark,
    }


class _Pipe:
    """Reads a pipe to its end and keeps the first `most` bytes, so that endless output neither
    fills our memory nor blocks the writer."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.kept = bytearray()
        self._stream, self._most = stream, most
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while chunk := self._stream.read1(65536):  # type: ignore[attr-defined]
                self.kept += chunk[: self._most - len(self.kept)]

    def end(self) -> bytes:
        """The bytes kept. Does not wait for an orphan that holds the pipe open."""
        self._thread.join(2)
        return bytes(self.kept)


def run_job(
    job: dict[str, Any], project: Path, scratch: Path, limits: Limits, module: str = __name__
) -> tuple[str, bytes, str]:
    """Run a job with `python -m module`; returns how it ended, its report, and its output."""
    mark = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", module],
        cwd=project,
        env=_environment(scratch, mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=sys.platform != "win32",
    )
    assert process.stdin and process.stdout and process.stderr
    report, output = _Pipe(process.stdout, MOST_REPORT), _Pipe(process.stderr, 4 * MOST_OUTPUT)
    tree: dict[int, psutil.Process] = {}
    try:
        with contextlib.suppress(OSError):  # it has ended already: see its exit status
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()  # it stays open: its closing tells the child that we have ended
        ended = _watch(process, scratch, limits, tree)
    finally:
        _end(process, tree, mark)
    return ended, report.end(), output.end().decode("utf-8", "replace")


def _watch(
    process: subprocess.Popen[bytes], scratch: Path, limits: Limits, tree: dict[int, psutil.Process]
) -> str:
    """Wait until the process has ended or reached a limit; returns how it ended. All processes that
    it starts are added to `tree`."""
    deadline = time.monotonic() + limits.seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"It took longer than {limits.seconds:g} s: is there a loop that does not end?"
        memory, written = 0, _size(scratch)
        try:
            for known in (parent := psutil.Process(process.pid), *parent.children(recursive=True)):
                tree[known.pid] = known
                memory += known.memory_info().rss
                if hasattr(known, "io_counters"):  # not on macOS; it includes unnamed files
                    written = max(written, known.io_counters().write_bytes)
        except psutil.Error:  # one has just ended
            pass
        if memory > limits.memory * 2**20:
            return f"It took more than {limits.memory:,} MiB of memory."
        if written > limits.disk * 2**20:
            return f"It wrote more than {limits.disk:,} MiB to disk."
        time.sleep(POLL)
    return (
        f"Its process ended before the tests did (exit status {process.returncode}): "
        "does something exit?"
    )


def _size(folder: Path) -> int:
    """Bytes in a folder that is in use; files and folders that vanish meanwhile count as
    nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _end(process: subprocess.Popen[bytes], tree: dict[int, psutil.Process], mark: str) -> None:
    """Kill a process and all that it has started, orphans included."""
    process.kill()
    for _ in range(20):
        marked = [other for other in psutil.process_iter() if _variable(other) == mark]
        others = [other for other in (*tree.values(), *marked) if other.pid != process.pid]
        alive = [other for other in others if other.is_running()]
        if not alive:
            break
        for other in alive:
            with contextlib.suppress(psutil.Error):
                other.kill()
        psutil.wait_procs(alive, timeout=0.5)
    process.wait()
    if process.stdin:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _variable(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # gone, or another user's
        return None


def read_report(data: bytes, word: str) -> dict[str, Any] | None:
    """The report, if there is exactly one with the right word."""
    lines = [line for line in data.splitlines() if line.startswith(word.encode())]
    try:
        report = json.loads(lines[0][len(word) :]) if len(lines) == 1 else None
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def _verdict(
    stage: str, task: mine.Task, ended: str, report: dict[str, Any] | None, output: str
) -> str:
    """Why the task is not solved; "" if it is. The report is untrusted: check all of it."""
    printed = f"\n\nIt printed:\n{plain(output)}" if output.strip() else ""
    if report is None:
        return ended + printed
    if "error" in report:
        return plain(str(report["error"]), MOST_OUTPUT) + printed
    tests = report.get("tests")
    outcomes = (
        {str(name): str(why) for name, why in tests.items()} if isinstance(tests, dict) else {}
    )
    if CANARY not in outcomes:
        return "The tests were not run to their end." + printed
    if not outcomes.pop(CANARY):
        return "A test that cannot pass was reported as passed: the report is void." + printed
    missing = [
        test for test in task.tests if not any(_is_of(name, f"{stage}/{test}") for name in outcomes)
    ]
    if missing:
        return f"Not all tests were run: {', '.join(missing)} is missing." + printed
    failed = {name: why for name, why in outcomes.items() if why}
    if not failed:
        return ""
    tests_failed: dict[str, list[str]] = {}  # whatever their cases
    for name, why in failed.items():
        test = plain(name.partition("/")[2].partition("[")[0], 300)
        tests_failed.setdefault(test, []).append(plain(why.strip().partition("\n")[0], 300))
    shown = [
        f"{test} - {first}" + (f" (and {len(rest)} more cases)" if rest else "")
        for test, (first, *rest) in list(tests_failed.items())[:10]
    ]
    return f"{len(failed)} of {len(outcomes)} tests failed:\n" + "\n".join(shown) + printed


def _is_of(name: str, test: str) -> bool:
    return name.partition("[")[0] == test or name.startswith(f"{test}::")


def plain(text: str, most: int = MOST_OUTPUT) -> str:
    """Text that is safe to show: without control characters, at most `most` characters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = "".join(letter for letter in text if letter in "\n\t" or letter.isprintable()).strip()
    return text if len(text) <= most else f"{text[:most]} ..."


# ---- results ----


def gradescope(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The content of Gradescope's /autograder/results/results.json."""
    verdicts = list(verdicts)
    return {
        "score": sum(verdict.points for verdict in verdicts),
        "execution_time": round(sum(verdict.seconds for verdict in verdicts)),
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": verdict.name,
                "number": f"{int(verdict.stage[5:7])}.{verdict.task.number}",
                "score": verdict.points,
                "max_score": verdict.task.points,
                "status": "passed" if verdict.passed else "failed",
                "output": verdict.why or "All tests passed.",
                "visibility": "visible",
            }
            for verdict in verdicts
        ],
    }


def junit(verdicts: Iterable[Verdict]) -> str:
    """JUnit XML: a suite for each stage, a case for each task, its points as a property."""
    root, by_stage = ET.Element("testsuites"), dict[str, list[Verdict]]()
    for verdict in verdicts:
        by_stage.setdefault(verdict.stage, []).append(verdict)
    for stage, judged in by_stage.items():
        counts = {
            "tests": str(len(judged)),
            "failures": str(sum(not verdict.passed for verdict in judged)),
            "errors": "0",
            "skipped": "0",
            "time": f"{sum(verdict.seconds for verdict in judged):.1f}",
        }
        suite = ET.SubElement(root, "testsuite", {"name": stage, **counts})
        for verdict in judged:
            seconds, points = f"{verdict.seconds:.1f}", (verdict.points, verdict.task.points)
            case = ET.SubElement(
                suite, "testcase", classname=stage, name=verdict.name, time=seconds
            )
            properties = ET.SubElement(case, "properties")
            for name, value in zip(("points", "max_points"), points, strict=True):
                ET.SubElement(properties, "property", name=name, value=str(value))
            if not verdict.passed:
                first = verdict.why.partition("\n")[0]
                ET.SubElement(case, "failure", message=first).text = verdict.why
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


# ---- the child: `python -m shared.course.grading` in the copy, with its job on standard input ----


class _Recorder:
    """A pytest plugin that keeps how each test ended: "" for passed, else the reason."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_sessionstart(self) -> None:
        """Finding the smallest failing example takes minutes; here any one will do."""
        from hypothesis import settings

        settings.load_profile("any")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcomes[report.nodeid] = (
                str(getattr(crash, "message", None) or report.longreprtext)[:MOST_OUTPUT]
                or "failed"
            )
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = str(report.longreprtext)[-MOST_OUTPUT:] or "failed"


def run_tests(tests: Sequence[str]) -> dict[str, str]:
    """How each test ended: "" for passed, else the reason."""
    import pytest

    recorder = _Recorder()
    plugins = "-p no:cacheprovider -p no:terminal -p xdist.plugin"
    pytest.main(["--capture=no", *plugins.split(), "-n", "0", *tests], plugins=[recorder])
    return recorder.outcomes


Job = dict[str, Any]


def child(prepare: Callable[[Job], None], run: Callable[[Job], dict[str, Any]]) -> None:
    """The process of a job: `prepare` has more rights than the submission; `run` has not, and
    returns the report."""
    job = json.loads(sys.stdin.buffer.readline())
    _end_with_parent(job["seconds"])
    # From here on, standard output is the submission's, and the report has its own descriptor.
    private = os.dup(1)
    os.dup2(2, 1)
    write, leave, word = os.write, os._exit, job["word"].encode()
    del job["word"]

    # First everything that needs more rights than the submission has.
    for name in ("pytest", "torch"):
        importlib.import_module(name)
    prepare(job)
    sys.addaudithook(_guard(job["scratch"]))
    line = word + json.dumps(run(job)).encode() + b"\n"
    while line:
        line = line[write(private, line) :]
    leave(0)  # without waiting for threads and exit handlers of the submission


def _prepare(job: Job) -> None:
    if job["task"] is None:
        sys.path.insert(0, job["folder"])
    else:
        only = frozenset([job["task"]])
        mine.overlay(job["stage"], Path(job["folder"]), [job["file"]], only)


def _tests(job: Job) -> dict[str, Any]:
    package = "" if job["task"] is None else f"{job['stage']}."
    try:
        importlib.import_module(package + job["file"].removesuffix(".py"))
    except BaseException as error:  # it may raise anything, SystemExit too
        return {"error": f"{job['file']} cannot be imported: {type(error).__name__}: {error}"}
    return {"tests": run_tests([*job["tests"], CANARY])}


def _end_with_parent(seconds: float) -> None:
    """End this process once the parent has: standard input is a pipe from it, which then closes.

    Code that never releases the interpreter would keep the thread from noticing. So Linux is asked
    for a signal, and POSIX systems for a limit on processor time.
    """
    leash, leave = os.dup(0), os._exit
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def watch() -> None:
        while os.read(leash, 1):
            pass
        leave(1)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if sys.platform != "win32":
        import resource

        most = int(seconds * (os.cpu_count() or 1)) + 60
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _guard(scratch: str) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook for `sys.addaudithook`, which cannot be removed again: it raises PermissionError for
    everything that a submission may not do."""
    # Local names: the submission could replace the module's.
    realpath, isabs, isdir = os.path.realpath, os.path.isabs, os.path.isdir
    fsdecode, devnull, separator, flag = os.fsdecode, os.devnull, os.sep, re.compile(FLAG).fullmatch
    compilers = frozenset(filter(None, map(shutil.which, COMPILERS)))
    inside = realpath(scratch) + separator
    writing = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
    forbidden = {
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.exec",
        "os.system",
        "os.startfile",
        "os.startfile/2",
        "subprocess.Popen",
        "pty.spawn",
        "os.kill",
        "os.killpg",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "ftplib.connect",
    }
    # By event: the arguments that are paths to change, each with that of its open folder, if any.
    changes: dict[str, tuple[tuple[int, int | None], ...]] = {
        "os.remove": ((0, 1),),
        "os.rmdir": ((0, 1),),
        "os.mkdir": ((0, 2),),
        "os.rename": ((0, 2), (1, 3)),
        "os.link": ((0, 2), (1, 3)),
        "os.symlink": ((1, 2),),
        "os.truncate": ((0, None),),
        "os.chmod": ((0, 2),),
        "os.chown": ((0, 3),),
        "os.utime": ((0, 3),),
        "os.setxattr": ((0, None),),
        "shutil.rmtree": ((0, None),),
        "sqlite3.connect": ((0, None),),
    }
    loopback = {"127.0.0.1", "::1", "localhost", None}

    def outside(path: Any, folder: int = -1) -> bool:
        if not isinstance(path, (str, bytes)) and not hasattr(path, "__fspath__"):
            return False  # a file that is open already
        name = fsdecode(path)
        if folder != -1:  # a name in an open folder, and only folders inside can be opened
            return isabs(name) or ".." in name.replace("\\", "/").split("/")
        return name != devnull and not (realpath(name) + separator).startswith(inside)

    def compiles(program: Any, words: Any) -> bool:
        """Whether this starts a C compiler that writes only to the scratch folder."""
        compiler = program in compilers and isinstance(words, list) and words[0] == program
        return compiler and not any(outside(word) for word in words[1:] if not flag(word))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            changing = (
                any(letter in mode for letter in "wax+")
                if isinstance(mode, str)
                else bool((flags or 0) & writing)
            )
            # os.open of a folder: its descriptor could be used to change files.
            handle = mode is None and not isinstance(path, int) and isdir(path)
            if (changing or handle) and outside(path):
                raise PermissionError(f"a submission may not write to {path}")
        elif event == "subprocess.Popen" and compiles(*arguments[:2]):
            pass
        elif event in forbidden:
            raise PermissionError(f"a submission may not do this: {event}")
        elif event in changes:
            for place, folder in changes[event]:
                where = -1 if folder is None or len(arguments) <= folder else arguments[folder]
                if outside(arguments[place], where if isinstance(where, int) else -1):
                    raise PermissionError(f"a submission may not change {arguments[place]}")
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
            address = arguments[1]
            if isinstance(address, tuple) and address[0] not in loopback:
                raise PermissionError("a submission may not use the network")
        elif event == "socket.getaddrinfo" and arguments[0] not in loopback:
            raise PermissionError("a submission may not use the network")

    return hook


if __name__ == "__main__":
    child(_prepare, _tests)
