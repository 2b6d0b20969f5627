"""The judge of hand-ins: the bodies of a task's functions in a clean tree, and the stage's tests.

Each task is judged in a fresh read-only tree of `shared` and the stages up to its own, and in a
fresh process: in a container of Docker or Podman, or under bubblewrap, without a network, with
limits on time, memory, processes and output. Full marks need exactly the tests that the reference
passes, each passed, none skipped; and one more, with a random name, that must fail.

What is aimed at these very checks from inside the process can still forge them: see INSTRUCTORS.md.
"""

from __future__ import annotations

import os
import random
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from shared import paths
from shared.errors import UserError

from . import running, splice, tasks
from .running import INSIDE, Limits, Run
from .tasks import Task

IMAGE = "staircase"  # of Docker or Podman: INSTRUCTORS.md says how to build it
GUEST = 65534  # a user without rights
DISK = 512  # MiB of scratch
LEFT_OUT = shutil.ignore_patterns(*(".*", "__pycache__", "*.md", "*.ipynb", "*.svg", "*.png"))
ROOT_FILES = ("conftest.py", "pyproject.toml")
LEAST, PATIENCE = 60.0, 5.0  # seconds of a run, and times those of the reference


@dataclass(frozen=True)
class Verdict:
    """How a task was judged. why: "" if it passed. notes: what was left behind, and what a reader
    should look at."""

    passed: bool
    why: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Container:
    """How a process is contained: by "bwrap", "docker", "podman", or "" for not at all."""

    program: str
    user: int | None = None

    def command(
        self, tree: Path, cache: Path, limits: Limits, name: str, keep: bool = False
    ) -> list[str]:
        """What runs inside.py over `tree`, which it sees as /tree; its job follows. keep: what it
        compiles goes to `cache`."""
        environment = _environment("/tmp", "/cache" if keep else "/tmp/cache")
        if self.program in ("docker", "podman"):
            return [
                *(self.program, "run", "--rm", "--name", name, "--network", "none", "--read-only"),
                *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
                *("--memory", f"{limits.memory}m", "--pids-limit", str(limits.processes * 16)),
                *("--tmpfs", f"/tmp:exec,size={DISK}m", "--workdir", "/tree", "--user", "1000"),
                *("--volume", f"{tree}:/tree:ro", "--volume", f"{INSIDE}:/inside.py:ro"),
                *("--volume", f"{cache}:/cache:{'rw' if keep else 'ro'}"),
                *(word for pair in environment.items() for word in ("--env", "=".join(pair))),
                *(IMAGE, "python", "/inside.py"),
            ]
        if self.program == "bwrap":
            python = [Path(p).resolve() for p in {sys.prefix, sys.base_prefix}]
            system = [p for p in map(Path, SYSTEM) if p.exists()]
            return [
                *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
                *("--clearenv", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"),
                *("--size", str(DISK << 20), "--tmpfs", "/tmp"),
                *(
                    word
                    for path in [*system, *python]
                    for word in ("--ro-bind", f"{path}", f"{path}")
                ),
                *("--ro-bind", str(tree), "/tree", "--ro-bind", str(INSIDE), "/inside.py"),
                *("--bind" if keep else "--ro-bind", str(cache), "/cache", "--chdir", "/tree"),
                *(word for pair in environment.items() for word in ("--setenv", *pair)),
                *(sys.executable, "/inside.py"),
            ]
        return [sys.executable, str(INSIDE)]

    def stop(self, name: str) -> None:
        if self.program in ("docker", "podman"):
            subprocess.run([self.program, "kill", name], capture_output=True, check=False)


SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
SYSTEM += ("/sys/devices/system/cpu",)


def _environment(home: str, cache: str) -> dict[str, str]:
    """What a judged process knows of the world."""
    names = {"HOME": home, "XDG_CACHE_HOME": cache, "TMPDIR": home, "MPLBACKEND": "agg"}
    names |= {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    names |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    return names | {"TRITON_INTERPRET": "1"}


def container(confined: bool) -> Container:
    """What there is to contain a process. Raises UserError if there is nothing."""
    if not confined:
        return _unconfined()
    for program in ("docker", "podman"):
        if shutil.which(program) and _works([program, "image", "inspect", IMAGE]):
            return Container(program)
    if shutil.which("bwrap"):
        with tempfile.TemporaryDirectory() as folder:
            command = Container("bwrap").command(Path(folder), Path(folder), Limits(), "")
            if _works([*command[:-2], "true"]):
                return Container("bwrap")
    raise UserError(
        f"Nothing here can contain a hand-in: install bubblewrap (Linux), or build the image "
        f"'{IMAGE}' of Docker or Podman as exercises/INSTRUCTORS.md says. --unconfined runs code "
        "that you trust without."
    )


def _unconfined() -> Container:
    """As root, as a user without rights, if Python can be read by one."""
    if sys.platform == "win32" or os.getuid() != 0:
        return Container("")
    if not _works([sys.executable, "-c", "import pytest"], user=GUEST, group=GUEST, cwd="/"):
        raise UserError(
            f"As root, hand-ins run as a user without rights, who cannot read {sys.prefix}: run "
            "this as another user, or with a Python outside of root's home."
        )
    return Container("", GUEST)


def _works(command: list[str], **options: object) -> bool:
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
    try:
        done = run(command, capture_output=True, timeout=60, check=False, **options)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


class Judge:
    """Judges tasks; a context manager, since its trees are temporary.

    seed: of the tests' random inputs; drawn if None. Raises UserError if nothing can contain what
    it runs.
    """

    def __init__(
        self, confined: bool = True, memory: int = Limits.memory, seed: int | None = None
    ) -> None:
        self.container = container(confined)
        self.limits = Limits(memory=memory)
        self.seed = secrets.randbelow(2**31) if seed is None else seed
        self._home = tempfile.TemporaryDirectory(prefix="staircase-", ignore_cleanup_errors=True)
        self.home = Path(self._home.name)
        self.home.chmod(0o755)
        self.cache = self.home / "cache"
        self.cache.mkdir()
        self.cache.chmod(0o777)  # the reference's runs write here, and no hand-in's
        self._expected: dict[str, tuple[frozenset[str], float]] = {}
        self._locks = {stage: threading.Lock() for stage in paths.discover()}

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._home.cleanup()

    def judge(self, task: Task, submitted: str) -> Verdict:
        """Judge one task by its file as it was handed in."""
        reference = (paths.ROOT / task.file).read_text(encoding="utf-8")
        others = {f for t in tasks.read(task.stage) if t.file == task.file for f in t.functions}
        try:
            if splice.same(task.file, reference, submitted, task.functions):
                return Verdict(False, "not done: its functions are the project's, to the letter")
            spliced = splice.splice(
                task.file, reference, submitted, task.functions, others - {*task.functions}
            )
        except splice.Refused as error:
            return Verdict(False, str(error))
        notes = (*spliced.notes, *suspicious(task, submitted))
        return replace(self.suite(task, spliced.source), notes=notes)

    def suite(self, task: Task, source: str) -> Verdict:
        """Run the tests of the task, then the whole suite of its stage, with this for its file."""
        expected, seconds = self.expected(task.stage)
        limits = replace(self.limits, seconds=max(LEAST, PATIENCE * seconds))
        own = [t for t in expected if t.partition("[")[0] in task.tests]
        verdict = None
        for names in (own, expected):
            # The tests that `check` shows come first: most that is wrong ends here.
            run, must_fail = self._run(task, source, limits, names)
            verdict = _verdict(run, frozenset(names), must_fail)
            if not verdict.passed:
                break
        assert verdict is not None
        return verdict

    def expected(self, stage: str) -> tuple[frozenset[str], float]:
        """The tests that the reference passes in such a tree, and how long it takes."""
        with self._locks[stage]:
            if stage not in self._expected:
                task = tasks.read(stage)[0]
                source = (paths.ROOT / task.file).read_text(encoding="utf-8")
                limits = replace(self.limits, seconds=1800.0)
                run, must_fail = self._run(task, source, limits)
                passed = {t for t, (outcome, _) in run.outcomes.items() if outcome == "passed"}
                failed = [x for x in run.failures if x[0] != must_fail and _failed(run, x[0])]
                if run.ended or failed or not passed:
                    why = run.ended or (f"{failed[0][0]}: {failed[0][1]}" if failed else run.output)
                    raise UserError(f"The project's own {stage} fails (seed {self.seed}): {why}")
                self._expected[stage] = frozenset(passed), run.seconds
            return self._expected[stage]

    def _run(
        self, task: Task, source: str, limits: Limits, names: Collection[str] = ()
    ) -> tuple[Run, str]:
        """Run these tests in a fresh tree, or all of the stage, as the reference. Also returns the
        id of the test that must fail."""
        place = Path(tempfile.mkdtemp(dir=self.home))
        tree, name = place / "tree", f"staircase-{secrets.token_hex(8)}"
        try:
            build(tree, task.stage)
            (tree / task.file).write_text(source, encoding="utf-8")
            must_fail = _must_fail(tree, task.stage)
            _read_only(tree)
            place.chmod(0o755)
            files = {test.partition("::")[0] for test in (*names, must_fail)}
            job = {
                "tests": sorted(files) if names else [f"{task.stage}/tests"],
                "only": sorted(names),
                "last": must_fail,
                "seed": self.seed,
                "stop": bool(names),
                "cache": ("/cache" if self.container.program else str(self.cache)) if names else "",
            }
            command = self.container.command(tree, self.cache, limits, name, keep=not names)
            options = self._options(place, tree, limits, keep=not names)
            run = running.run(command, job, limits, lambda: self.container.stop(name), **options)
            return run, must_fail
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _options(self, place: Path, tree: Path, limits: Limits, keep: bool) -> dict[str, object]:
        """Options of Popen: limits, and for a process that nothing contains, a home."""

        def limit() -> None:
            most = limits.memory << 20
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CPU, (int(4 * limits.seconds),) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK << 20,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if self.container.user is not None:
                resource.setrlimit(resource.RLIMIT_NPROC, (1024, 1024))

        options: dict[str, object] = {"preexec_fn": limit}
        if not self.container.program:
            scratch = place / "scratch"
            scratch.mkdir()
            if self.container.user is not None:
                os.chown(scratch, GUEST, GUEST)
                options |= {"user": GUEST, "group": GUEST, "extra_groups": []}
            cache = self.cache if keep else scratch / "cache"
            options |= {"cwd": tree, "env": _environment(str(scratch), str(cache))}
        return options


def build(tree: Path, stage: str) -> None:
    """A clean tree: `shared` and the stages up to this one, with nothing that shows a solution."""
    tree.mkdir()
    for name in ROOT_FILES:
        shutil.copy2(paths.ROOT / name, tree / name)
    for name in ("shared", *(s for s in paths.discover() if s <= stage)):
        shutil.copytree(paths.ROOT / name, tree / name, ignore=LEFT_OUT)


def _must_fail(tree: Path, stage: str) -> str:
    """Write a test that fails, under a random name; its id."""
    word = "".join(random.SystemRandom().choices("abcdefghijklmnopqrstuvwxyz", k=12))
    file = f"{stage}/tests/test_{word[:6]}.py"
    (tree / file).write_text(f"def test_{word}():\n    assert {word!r} == ''\n", encoding="utf-8")
    return f"{file}::test_{word}"


def _read_only(tree: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def _failed(run: Run, test: str) -> bool:
    return run.outcomes[test][0] == "failed"


def _verdict(run: Run, expected: frozenset[str], must_fail: str) -> Verdict:
    """Full marks for exactly the expected tests, each passed, and the one failed that must fail."""
    if run.ended:
        return Verdict(False, run.ended, seconds=run.seconds)
    for test, why in run.failures:
        if test != must_fail:
            return Verdict(False, f"{test.rpartition('::')[2]}: {why}", seconds=run.seconds)
    passed = {test for test, (outcome, _) in run.outcomes.items() if outcome == "passed"}
    if absent := expected - passed:
        return Verdict(False, f"{min(absent)} did not run", seconds=run.seconds)
    if run.outcomes.keys() != expected | {must_fail} or run.status != 1:
        return Verdict(False, "its results are not those of the tests", seconds=run.seconds)
    return Verdict(True, seconds=run.seconds)


def suspicious(task: Task, submitted: str) -> list[str]:
    """Words in the functions that a solution has no need of: for a reader, not for the marks."""
    words = ("sys", "os", "pytest", "inspect", "gc", "open", "__", "eval", "exec", "importlib")
    text = "\n".join(
        filter(None, (splice.segment(task.file, submitted, f) for f in task.functions))
    )
    names = {w for w in words if re.search(rf"\b{w}\b" if w != "__" else r"\b__(?!init__)", text)}
    return [f"to read: it uses {', '.join(sorted(names))}"] if names else []
