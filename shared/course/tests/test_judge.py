"""The judge: what it compares, what contains a submission, and that no cheat gets a point."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shared import paths
from shared.course import driver, judge, mine, wrong
from shared.course.judge import Ended, Judge, Limits
from shared.errors import UserError

WITH_TASKS = [s for s in paths.discover() if (paths.ROOT / s / "drivers.py").is_file()]
STAGE, FILE = "stage04_continuous", "plan.py"
TASK = mine.find_task(STAGE, 1)  # Plan.tokens
REFERENCE = mine.read(paths.ROOT / STAGE / FILE)
EMPTY = mine.emptied(REFERENCE, STAGE, TASK)


def entries(file: str) -> dict[str, str]:
    text = mine.read(Path(__file__).with_name(file))
    return dict(entry.split("\n", 1) for entry in text.removeprefix("### ").split("\n### "))


CHEATS = entries("cheats.txt")
contained = pytest.mark.usefixtures("contained")


@pytest.fixture(scope="module")
def two_seeds() -> Iterator[Judge]:
    with Judge(Limits(seconds=40, memory=1500, disk=64), seeds=[3, 4]) as made:
        yield made


@contained
def test_the_reference_passes_and_nothing_else_that_is_in_the_file(two_seeds):
    assert two_seeds.why(STAGE, TASK, REFERENCE.encode()) == ""
    assert "NotImplementedError" in two_seeds.why(STAGE, TASK, EMPTY.encode())
    first = wrong.applied(REFERENCE, STAGE, wrong.read(STAGE)[0])
    (line,) = two_seeds.why(STAGE, TASK, first.encode()).splitlines()
    assert re.match(r"seed 3: Plan.tokens of .* is .*, not ", line), line
    # Another task of the file may be wrong, or not Python's business.
    why = two_seeds.why(STAGE, TASK, b"def (:")
    assert "SyntaxError" in why and "plan.py" in why


@contained
def test_a_crash_in_c_names_its_call(two_seeds):
    stage, task = "stage09_kernels", mine.find_task("stage09_kernels", 3)
    reference = mine.read(paths.ROOT / stage / task.file)
    assert two_seeds.why(stage, task, reference.encode()) == ""
    body = ["import ctypes", "ctypes.string_at(0)"]
    why = two_seeds.why(stage, task, mine.emptied(reference, stage, task, body).encode())
    assert re.fullmatch(r"product of \(\d, \d\) and .*: Its process crashed \(SIGSEGV\)\.", why)


@contained
def test_a_forged_count_gains_nothing(two_seeds):
    """The result itself depends on which loads of a tile it comes from."""
    stage, task = "stage09_kernels", mine.find_task("stage09_kernels", 3)
    reference = mine.read(paths.ROOT / stage / task.file)
    body = ["x.loads, weights.loads = most_loads(*x.shape, weights.shape[1])"]
    body += ["return x._numbers @ weights._numbers"]
    source = mine.emptied(reference, stage, task, body).encode()
    assert "seed 3: product of" in two_seeds.why(stage, task, source)


QUICK = ("all processes", "a daemon that would write later", "results of its own, and the end")


def judged(made: Judge, code: str) -> str:
    """Why an empty solution with this code is wrong. Nothing that it starts may be left."""
    why = made.why(STAGE, TASK, f"{EMPTY}\n\n{code}\n".encode())
    assert left_of(made._home.name) == []
    assert len(why) < 5000 and all(letter.isprintable() or letter in "\n\t" for letter in why)
    return why


def left_of(home: str) -> list[psutil.Process]:
    """Processes that work in a folder: by bubblewrap, which holds what it contains, or without."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and (home in " ".join(process.cmdline()) or process.cwd().startswith(home)):
                left.append(process)
    return left


@contained
@pytest.mark.parametrize("name", QUICK)
def test_a_cheat_gets_nothing(name, two_seeds):
    assert judged(two_seeds, CHEATS[name])


@contained
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHEATS.keys() - set(QUICK)))
def test_each_cheat_gets_nothing(name, two_seeds):
    assert judged(two_seeds, CHEATS[name])


@contained
@pytest.mark.slow
def test_what_the_gate_once_refused_gets_nothing(two_seeds):
    for line in mine.read(Path(__file__).with_name("hostile.txt")).splitlines():
        code = line.replace(r"\n", "\n")
        assert judged(
            two_seeds,
            f"import math, torch\ntry:\n{textwrap.indent(code, '    ')}\nexcept Exception: pass",
        )


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_each_task_has_a_driver_that_returns_the_same_for_a_seed(stage):
    """In this process: a change of the reference must not break its own grading."""
    drivers = importlib.import_module(f"{stage}.drivers").DRIVERS
    assert drivers.keys() >= {task.number for task in mine.tasks(stage)}
    for task in mine.tasks(stage):
        runs = []
        for _ in range(2):
            torch.manual_seed(1), random.seed(1)
            runs.append(driver.plain(drivers[task.number](random.Random(1))))
        # Stand-ins that lack what the reference reads fail all solutions alike.
        assert "AttributeError" not in json.dumps(runs[0], allow_nan=False), task.title
        assert judge.rule_of(stage, task)(*runs) == "", task.title


@contained
@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_the_reference_passes_with_fifty_seeds(stage):
    seeds = [random.SystemRandom().randrange(2**40) for _ in range(50)]
    with Judge(Limits(seconds=300), seeds=seeds) as made:
        for task in mine.tasks(stage):
            source = mine.read(paths.ROOT / stage / task.file)
            assert made.why(stage, task, source.encode()) == ""
            assert made.why(stage, task, mine.emptied(source, stage, task).encode())


@contained
@pytest.mark.slow
@pytest.mark.parametrize("stage", WITH_TASKS)
def test_wrong_solutions_get_nothing_and_right_ones_all(stage):
    """Those of wrong.txt and of right.txt, each in place of its task."""
    with Judge() as made:
        for file in ("wrong.txt", "right.txt"):
            for solution in wrong.read(stage, file):
                reference = mine.read(paths.ROOT / stage / solution.task.file)
                source = wrong.applied(reference, stage, solution).encode()
                why = made.why(stage, solution.task, source)
                assert bool(why) == (file == "wrong.txt"), f"{solution.name}: {why}"


@pytest.mark.parametrize("stage", WITH_TASKS)
def test_solutions_of_several_designs_are_judged(stage):
    assert len(wrong.designs(stage)) >= 6
    assert len(wrong.designs(stage, "right.txt")) >= 3


LOOK = """
import json, os, pathlib, socket
tried = {}
for name in ("/project/x", "/x", "/dev/shm/x", "/usr/x", "/tmp/x", "ROOT/x"):
    try:
        open(name, "w").close()
        tried[name] = True
    except OSError:
        tried[name] = False
tried["home"] = os.environ["HOME"]
tried["variables"] = sorted(os.environ)
tried["root"] = os.path.exists("ROOT/shared") or os.path.exists("ROOT/.git")
tried["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
tried["uid"] = os.getuid()
tried["rights"] = [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")]
tried["interfaces"] = [name for _, name in socket.if_nameindex()]
tried["solutions"] = [str(p) for p in pathlib.Path(".").rglob("*") if p.name in
    ("wrong.txt", "right.txt", "tests", "README.md", "museum", "stage05_paged")]
raise ValueError(json.dumps(tried))
"""


@contained
def test_what_a_submission_sees(two_seeds, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "a secret token")
    seen = json.loads(seen_by(two_seeds, LOOK.replace("ROOT", str(paths.ROOT))))
    writable = {name for name, may in seen.items() if may is True}
    assert writable == {"/tmp/x"} and seen["home"] == "/tmp"
    assert "GITHUB_TOKEN" not in seen["variables"] and seen["root"] is False
    assert seen["processes"] <= 4 and seen["uid"] == 65534 and int(seen["rights"][0], 16) == 0
    assert seen["interfaces"] == ["lo"] and seen["solutions"] == []


def seen_by(made: Judge, code: str) -> str:
    """The text of the ValueError that `code` raises in a contained process."""
    with made._tree(made._base(STAGE), {f"{STAGE}/{FILE}": f"{code}\n".encode()}) as tree:
        job = {"stage": STAGE, "tasks": [1], "seeds": [1], "alone": True}
        ended = judge.run(tree, job, made.limits)
    *_, line = ended.lines
    monkey = judge.parsed(line)["raised"]
    return monkey.removeprefix("ValueError: ").rpartition(" (plan.py")[0]


CALLS = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
failed = [libc.syscall(number, 0, 0, 0, 0, 0) for number in NUMBERS]
raise ValueError(json.dumps([os.strerror(ctypes.get_errno()), failed, os.getpid() > 0]))
"""


@contained
@pytest.mark.skipif(not judge.system_calls(), reason="the numbers are not known here")
def test_some_system_calls_are_refused(two_seeds):
    _, numbers, _ = judge.REFUSED[platform.machine()]
    seen = json.loads(seen_by(two_seeds, CALLS.replace("NUMBERS", str(list(numbers)))))
    assert seen == ["Operation not permitted", [-1] * len(numbers), True]


HOARD = """
import ctypes, json, resource, socket
libc = ctypes.CDLL(None)
calls = [libc.semget(0, 32000, 0o600), libc.msgget(0, 0o600), libc.shmget(0, 4096, 0o600)]
pair = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, socket.SO_REUSEADDR):
    try:
        pair[0].setsockopt(socket.SOL_SOCKET, option, 2**22)
        calls.append(0)
    except OSError:
        calls.append(-1)
limits = resource.getrlimit(resource.RLIMIT_NPROC) + resource.getrlimit(resource.RLIMIT_NOFILE)
raise ValueError(json.dumps([calls, limits]))
"""


@contained
@pytest.mark.skipif(not judge.system_calls(), reason="the numbers are not known here")
def test_no_memory_outside_of_processes(two_seeds):
    """Semaphores, messages and sockets hold gigabytes that are no process's: the system would end
    the grader instead."""
    calls, (processes, _, files, _) = json.loads(seen_by(two_seeds, HOARD))
    assert calls == [-1, -1, -1, -1, -1, 0]
    assert processes * files * 212992 < 2 * 2**30  # bytes that a socket holds without options


@contained
@pytest.mark.parametrize("root", [Path("/usr/share"), Path(sys.prefix, "lib")])
def test_a_project_inside_of_what_is_shown_is_hidden(tmp_path, root, monkeypatch):
    """As in a container that keeps it in /usr/src, or beside the modules of Python."""
    monkeypatch.setattr(paths, "ROOT", root)
    words = [*judge.bubblewrap(tmp_path, Limits()), "--", "/bin/ls", str(root)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


ENDLESS = """
from shared.course import judge, mine
stage = "stage04_continuous"
with judge.Judge(judge.Limits(seconds=600), seeds=[1]) as made:
    made._drive(stage, mine.find_task(stage, 1), b"while True: pass", None)
"""


@contained
@pytest.mark.parametrize("spent,delay", [(0.0, 1), (4.0, 0)])
def test_a_grader_that_is_killed_takes_the_judged_process_with_it(tmp_path, spent, delay):
    """Killed before the process is contained, and while the submission runs."""
    slow = tmp_path / "bwrap"
    slow.write_text(f'#!/bin/sh\nsleep {delay}\nexec {shutil.which("bwrap")} "$@"\n')
    slow.chmod(0o700)
    places = {"TMPDIR": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    grader = psutil.Popen([sys.executable, "-c", ENDLESS], cwd=paths.ROOT, env=os.environ | places)
    judged: list[psutil.Process] = []
    try:
        while not [process for process in judged if process_time(process) >= spent]:
            assert grader.poll() is None
            children = grader.children(recursive=True)
            judged = [child for child in children if "shared.course.driver" in words_of(child)]
            time.sleep(0.01)
        time.sleep(delay / 2)
    finally:
        grader.kill()
        grader.wait()
    deadline = time.monotonic() + 60
    while left := left_of(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def process_time(process: psutil.Process) -> float:
    try:
        return float(process.cpu_times().user)
    except psutil.Error:
        return 0.0


def words_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_a_difference_is_one_line():
    tensor = {"dtype": "float64", "shape": [2, 2], "values": [1.0, 2.0, 3.0, 4.0]}
    right: list[Any] = [
        {"call": "f(3)", "a": [1, 2], "t": tensor},
        {"call": "g", "b": 0.5, "c": None},
    ]

    def changed(**new: Any) -> list[Any]:
        return [
            {**right[0], **{k: v for k, v in new.items() if k in "at"}},
            {**right[1], **{k: v for k, v in new.items() if k not in "at"}},
        ]

    for result, words in (
        (right, ""),
        (changed(call="other words"), ""),
        (changed(a=[1, 3]), "f(3): [0].a[1] is 3, not 2"),
        (changed(a=[1]), "f(3): the length of [0].a is 1, not 2"),
        (changed(a=[1, True]), "is true, not 2"),
        (changed(b=0.5 + 1e-7), ""),
        (changed(b=0.51), "g: [1].b is 0.51, not 0.5"),
        (changed(b="nan"), 'is "nan", not 0.5'),
        (changed(t={**tensor, "values": [1.0, 2.0, 3.0, 4.0 + 1e-10]}), ""),
        (
            changed(t={**tensor, "values": [1.0, 2.0, 3.1, 4.0]}),
            "f(3): element [1, 0] is 3.1, not 3",
        ),
        (changed(t={**tensor, "shape": [4]}), "the shape is [4], not [2, 2]"),
        (changed(t={**tensor, "values": 7}), "not"),
        (changed(t=None), "is null, not"),
        (changed(d=1), 'g: what [1] has is ["b", "c", "call", "d"], not ["b", "c", "call"]'),
        (None, "is null, not"),
        (right[:1], "the length of the result is 1, not 2"),
    ):
        why = judge.difference(right, result)
        assert words in why and bool(why) == bool(words), (why, words)


def test_results_are_parsed_with_limits():
    for data in (b"", b"noise", b"{", b"[NaN]", b"[Infinity]", b"[" * 99999, b"1" * 9999, b"\xff"):
        assert judge.parsed(data) is None
    good = b'{"data": [1]}'
    for lines, why, words in (
        ([good], "", ""),
        ([], "It crashed.", "It crashed."),
        ([], "", "0 results for 1"),
        ([good, good], "", "2 results for 1"),
        ([b"noise"], "", "not a result"),
        ([b'{"data": [1], "more": 1}'], "", "not a result"),
        ([b'{"data": [2]}'], "", "seed 5: [0] is 2, not 1"),
        ([b'{"raised": "KeyError: \\u001b[31m1"}'], "", "seed 5: KeyError: 1"),
    ):
        found = judge.verdict(judge.difference, [5], [[1]], Ended(lines, why, ""))
        assert words in found and bool(found) == bool(words)

    assert judge.parsed(b"[" + b"[]," * 10**7 + b"0]") is None  # 600 MB of lists
    for depth in range(sys.getrecursionlimit()):  # some can be parsed, and not be shown
        nested = b'{"data": [' + b"[" * depth + b"]" * depth + b"]}"
        assert judge.verdict(judge.difference, [5], [[1]], Ended([nested], "", ""))

    def strange(expected: object, result: object) -> str:
        raise TypeError("it is no list")

    assert "not a result" in judge.verdict(strange, [5], [[1]], Ended([good], "", ""))


ENDLESS_LOOP = "It took more than 1 s of processor time: an endless loop?"


@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("time.sleep(1.5)", ""),
        ("time.sleep(60)", "It has not ended after 4 s: what does it wait for?"),
        ("while True: pass", ENDLESS_LOOP),
        ("os.fork()\nos.fork()\nwhile True: pass", ENDLESS_LOOP),
    ],
)
def test_a_task_has_seconds_of_processor_time(code, why):
    """On a machine that is busy with other work, right solutions stay right."""
    with subprocess.Popen([sys.executable, "-c", f"import os, time\n{code}"]) as process:
        assert judge._watch(process, None, Limits(seconds=1)) == why
        judge._end(process, None)


class Played(Judge):
    """A judge of two seeds whose processes end as in `ends`: results, and why they are no more."""

    def __init__(self, *ends: tuple[int, str]) -> None:
        self.seeds, self.confined, self.limits = [1, 2], True, Limits()
        self.ends, self.runs = list(ends), list[list[int]]()

    @contextlib.contextmanager
    def _tree(self, base: Path, files: Any) -> Iterator[Path]:
        yield base

    def _run(self, tree: object, stage: str, tasks: Any, alone: bool) -> Ended:
        self.runs.append([task.number for task in tasks])
        results, why = self.ends.pop(0)
        return Ended([b"{}"] * results, why, "")


def test_tasks_that_share_a_process_go_on_behind_a_crash():
    """Stage 04 has tasks 1 to 6: the process ends in 2, and the next one behind 4."""
    numbers = [task.number for task in mine.tasks(STAGE)]
    whole = 2 * len(numbers)
    made = Played((3, "It crashed."), (4, ""), (whole - 10, ""))
    parts = made._together(Path(), STAGE, {})
    assert made.runs == [numbers, numbers[2:], numbers[5:]]
    counts = [(len(part.lines), part.why) for part in parts]
    assert counts == [(2, ""), (1, "It crashed."), (2, ""), (2, ""), (0, "")] + [
        (2, "") for _ in numbers[5:]
    ]
    made = Played((whole + 1, "It crashed."))
    *others, last = made._together(Path(), STAGE, {})
    assert {len(part.lines) for part in others} == {2} and len(made.runs) == 1
    assert (len(last.lines), last.why) == (3, "It crashed.")


def test_a_driver_that_tasks_share_runs_once():
    """Stage 05's tasks 5 and 6 have one: it takes longer than all others together."""
    made = Played((10, ""))
    parts = made._together(Path(), "stage05_paged", {})
    assert made.runs == [[1, 2, 3, 4, 5]] and len(parts) == 6 and parts[4] is parts[5]


@contained
def test_the_capstone_shows_no_reference_of_what_is_written():
    """A file that runs the reference's from the disk gets nothing there, either."""
    body = [f'code = open("/project/{STAGE}/{FILE}").read()', "exec(code, globals())"]
    body += ["return globals()['Plan'].tokens(self)"]
    source = mine.emptied(REFERENCE, STAGE, TASK, body).encode()
    with Judge(seeds=[3]) as made:
        first, *_ = made.why_together(STAGE, {f"{STAGE}/{FILE}": source})
    assert "NotImplementedError" in first


def test_a_measured_process_has_the_seconds_for_each_of_its_threads(monkeypatch):
    seen = []

    def run(tree: object, job: Any, limits: Limits, confined: bool) -> Ended:
        seen.append(limits.seconds / job["threads"])
        return Ended([b'{"data": 7}'], "", "")

    monkeypatch.setattr(judge, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert Played().measured(STAGE, {}, {}) == 7 and seen == [60]


def test_without_bubblewrap_grading_asks_for_a_container(monkeypatch):
    monkeypatch.setattr(judge, "unconfined", lambda: "There is no bubblewrap (bwrap) here")
    with pytest.raises(UserError, match=r"no bubblewrap.*Containerfile.*--unconfined"):
        Judge()
    Judge(confined=False).__exit__()


@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
def test_outside_of_bubblewrap_orphans_end_too():
    """`grade --unconfined` in a process of its own, which adopts orphans. If root runs this test,
    the judged process belongs to another user, who may not reach this Python."""
    code = f"""
import sys
from shared.course import judge, mine
from shared.course.tests import test_judge as here
judge.UNPRIVILEGED = {os.getuid()}
with judge.Judge(judge.Limits(seconds=60), confined=False, seeds=[1]) as made:
    print(made.why(here.STAGE, here.TASK, here.REFERENCE.encode()) == "")
    print(here.judged(made, here.CHEATS["a daemon that would write later"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("True\nseed 1: "), done
