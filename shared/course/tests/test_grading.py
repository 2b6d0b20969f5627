"""Judging a submission: right ones pass, wrong ones fail, and hostile ones get nowhere."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from shared import paths
from shared.course import grading, mine
from shared.course.grading import CANARY, Limits, Verdict
from shared.errors import UserError
from shared.task import Task

STAGE, FILE = "stage04_continuous", "request.py"
TASK = mine.find_task(STAGE, 1)  # Request.tokens
TEST = f"{STAGE}/{TASK.tests[0]}"
REFERENCE = mine.read(paths.ROOT / STAGE / FILE)
SHORT = Limits(seconds=300, memory=2048, disk=32)  # with time enough for a busy machine


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grading") / "trusted"
    grading._copy_project(folder)
    return folder


@pytest.fixture
def judge(trusted: Path, tmp_path: Path) -> Iterator[Any]:
    """judge(source, limits=SHORT): why a file with this source does not solve the task. The trusted
    copy must stay as it is."""
    before = grading._fingerprint(trusted)

    def run(source: str, limits: Limits = SHORT) -> str:
        (tmp_path / FILE).write_bytes(source.encode("utf-8", "surrogateescape"))
        return grading._judge(STAGE, TASK, tmp_path, trusted, limits, trust=True)

    yield run
    assert grading._fingerprint(trusted) == before


def inside(code: str) -> str:
    """The reference with code at the beginning of the task's function."""
    line = "        prompt, answer = self.output.prompt_ids, self.output.token_ids\n"
    assert REFERENCE.count(line) == 1
    return REFERENCE.replace(line, textwrap.indent(code, " " * 8) + "\n" + line)


def above(code: str) -> str:
    """The reference with code that runs when it is imported."""
    return REFERENCE.replace("class State(Enum):", f"{code}\n\n\nclass State(Enum):", 1)


WRONG = REFERENCE + "\n\nRequest.tokens = lambda self, start, count: None\n"

# ---- whole judgements ----


def test_the_reference_passes(judge: Any) -> None:
    assert judge(REFERENCE) == ""


def test_a_grader_that_is_killed_takes_the_judged_process_with_it(tmp_path: Path) -> None:
    """The submission loops, and says so in the only folder that it may write to."""
    loop = "import pathlib\n(pathlib.Path.home() / 'looping').touch()\nwhile True:\n    pass"
    mine.write(tmp_path / FILE, inside(loop))
    words = ["grade", "stage04", "--submission", str(tmp_path), "--seconds", "600", "--trust"]
    grader = psutil.Popen([sys.executable, "-m", "shared.course.exercise", *words], cwd=paths.ROOT)
    try:
        judged: list[psutil.Process] = []
        while not judged or not (Path(judged[0].environ()["HOME"]) / "looping").exists():
            assert grader.poll() is None
            judged = grader.children()
            time.sleep(0.1)
    finally:
        grader.kill()
        grader.wait()
    psutil.wait_procs(judged, timeout=60)
    assert not judged[0].is_running() or judged[0].status() == psutil.STATUS_ZOMBIE


def test_what_could_reach_the_judge_is_not_run(tmp_path: Path, trusted: Path) -> None:
    patch = "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n"
    mine.write(tmp_path / FILE, WRONG + patch)
    why = grading._judge(STAGE, TASK, tmp_path, trusted, SHORT)
    assert "the import of _pytest.reports" in why and "was not run" in why


def test_a_forged_success_is_seen(judge: Any) -> None:
    """The submission tells pytest that everything passes, the canary included."""
    forge = "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n"
    assert judge(WRONG + forge).startswith("A test that cannot pass was reported as passed")


FILL_DISK = """
import tempfile
file = tempfile.TemporaryFile()
while True:
    file.write(bytes(9**6))
"""
FAKE_REPORT = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, b'{"tests": {}}\\n')
    except OSError:
        pass
os._exit(0)
"""
RECORDER = """
import __main__
__main__._Recorder.pytest_runtest_logreport = (
    lambda self, report: self.outcomes.__setitem__(report.nodeid, '')
)
"""
CONNECT = "import socket\nsocket.create_connection(('192.0.2.1', 80), 2)"
SLEEPER = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"
TESTS = f"{STAGE}/tests"
EARLY, NOT_ALL = "Its process ended before the tests did", "not run to their end"
SYNTAX, SLOW = "cannot be imported: SyntaxError", "It took longer than 20 s"
HOSTILE: dict[str, tuple[str, str]] = {
    "empty": (mine.emptied(REFERENCE, STAGE, TASK), "stage04 task 1: "),
    "wrong": (WRONG, "1 of 1 tests failed"),
    "skips": (inside("import pytest\npytest.skip('no')"), "skipped"),
    "prints": (inside("while True:\n    print('x' * 1000)"), SLOW),
    "loops": (inside("while True:\n    pass"), SLOW),
    "sys.exit": (inside("import sys\nsys.exit(0)"), "SystemExit"),
    "sys.exit at import": (above("import sys\nsys.exit(0)"), "cannot be imported: SystemExit"),
    "os._exit": (inside("import os\nos._exit(0)"), EARLY),
    "os._exit at import": (above("import os\nos._exit(0)"), EARLY),
    "interrupts": (inside("raise KeyboardInterrupt"), NOT_ALL),
    "pytest.exit": (inside("import pytest\npytest.exit('bye', 0)"), NOT_ALL),
    "memory": (inside("self.kept = [bytearray(2**26) for _ in range(400)]"), "MiB of memory"),
    "disk": (inside(FILL_DISK), "MiB to disk"),
    "forks": (inside("import os\nwhile True:\n    os.fork()"), "may not do this: os.fork"),
    "network": (inside(CONNECT), "may not use the network"),
    "edits tests": (above(f"open('{TESTS}/test_request.py', 'w')"), "may not write to"),
    "deletes tests": (above(f"import shutil\nshutil.rmtree('{TESTS}')"), "may not change"),
    "kills": (above("import os\nos.kill(os.getppid(), 9)"), "may not do this: os.kill"),
    "writes a report": (inside(FAKE_REPORT), EARLY),
    "takes over the recorder": (WRONG + RECORDER, "A test that cannot pass was reported as passed"),
    "not Python": ("def (:", SYNTAX),
    "nested": ("x = " + "(" * 5000, SYNTAX),
    "null": ("x = 1\0", SYNTAX),
    "not UTF-8": ("x = '\udcff'", SYNTAX),
    "threads that stay": (above(SLEEPER), ""),
    "exit handlers": (above("import atexit, time\natexit.register(time.sleep, 1000)"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_submission_gets_nowhere(kind: str, judge: Any) -> None:
    source, words = HOSTILE[kind]
    why = judge(source, Limits(seconds=20 if words == SLOW else 120, memory=2048, disk=32))
    assert words in why and bool(why) == bool(words)


# ---- the process and its limits: another child in place of ours ----


@pytest.fixture
def child(tmp_path: Path) -> Any:
    """child(code, limits): how a process ended that runs `code` in place of the judge, its report,
    and its output."""

    def run(code: str, limits: Limits = SHORT) -> tuple[str, bytes, str]:
        project, scratch = tmp_path / "project", tmp_path / "scratch"
        course = project / "shared" / "course"
        course.mkdir(parents=True)
        scratch.mkdir()
        for folder in (course, course.parent):
            (folder / "__init__.py").touch()
        (course / "grading.py").write_text(code, encoding="utf-8")
        return grading._run({"scratch": str(scratch), "word": "secret"}, project, scratch, limits)

    return run


def test_a_process_gets_its_job_and_no_secrets(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "a secret token")
    shown = "print(json.dumps([sys.stdin.readline(), dict(os.environ)]))"
    code = f"{shown}; print('noise', file=sys.stderr); sys.exit(3)"
    ended, report, output = child(f"import json, os, sys; {code}")
    assert "exit status 3" in ended and output.strip() == "noise"
    job, environment = json.loads(report)
    assert json.loads(job)["word"] == "secret"
    assert "a secret token" not in environment.values()
    assert Path(environment["HOME"]).name == "scratch"


@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        ("while True: pass", Limits(seconds=1), "longer than 1 s"),
        ("while True: print('x' * 10000)", Limits(seconds=1), "longer than 1 s"),
        ("while True: sys.stderr.write('x' * 10000)", Limits(seconds=1), "longer than 1 s"),
        (
            "x = [b'1' * 2**20 for _ in range(300)]; time.sleep(60)",
            Limits(memory=200),
            "200 MiB of memory",
        ),
        (
            "open('../scratch/x', 'wb').write(b'1' * 2**24); time.sleep(60)",
            Limits(disk=8),
            "8 MiB to disk",
        ),
    ],
    ids=["loops", "prints", "prints errors", "memory", "disk"],
)
def test_a_process_ends_at_its_limits(code: str, limits: Limits, words: str, child: Any) -> None:
    ended, report, output = child(f"import sys, time\n{code}", limits)
    assert words in ended
    assert len(report) <= grading.MOST_REPORT and len(output) <= 4 * grading.MOST_OUTPUT


def test_children_and_orphans_end_with_the_process(child: Any) -> None:
    """A child, which holds the pipes open, and an orphan whose parent has ended."""
    sleep = "[sys.executable, '-c', 'import time; time.sleep(100)']"
    orphan = f"import subprocess, sys; print(subprocess.Popen({sleep}, stdout=-3, stderr=-3).pid)"
    code = f"""
import subprocess, sys
print(subprocess.Popen({sleep}).pid)
print(subprocess.check_output([sys.executable, "-c", {orphan!r}], text=True))
"""
    started = time.monotonic()
    _, report, _ = child(code)
    pids = [int(word) for word in report.split()]
    assert len(pids) == 2 and time.monotonic() - started < 90
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_folder_is_measured_while_it_changes(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(bytes(1000))
    with pytest.MonkeyPatch.context() as patch:
        walked: list[Any] = [(str(tmp_path), [], ["kept", "gone"])]
        patch.setattr(os, "walk", lambda folder: walked)
        assert grading._size(tmp_path) == 1000


# ---- what a submission may do ----

GUARDED = """
import importlib, json, os, pathlib, shutil, socket, subprocess, sys, tempfile, threading
from shared.course import grading
scratch, outside = sys.argv[1:]
inside, other = pathlib.Path(scratch), pathlib.Path(outside)
tempfile.tempdir = scratch
handle = os.open(scratch, os.O_RDONLY) if os.name == "posix" else None
server = socket.create_server(("127.0.0.1", 0))
sys.addaudithook(grading._guard(scratch))

def may(name, act):
    try:
        act()
        print(json.dumps([name, True]))
    except PermissionError as error:
        assert "a submission may not" in str(error), error
        print(json.dumps([name, False]))

may("+ write", lambda: (inside / "a.txt").write_text("a"))
may("+ append", lambda: open(inside / "a.txt", "a").close())
may("+ rename", lambda: (inside / "a.txt").rename(inside / "b.txt"))
may("+ remove", lambda: (inside / "b.txt").unlink())
may("+ folders", lambda: shutil.rmtree(tempfile.mkdtemp()))
may("+ a temporary file", lambda: tempfile.TemporaryFile().close())
may("+ devnull", lambda: open(os.devnull, "w").close())
may("+ read", lambda: (other / "kept.txt").read_text())
may("+ list", lambda: os.listdir(other))
may("+ import", lambda: importlib.import_module("wave"))
may("+ a thread", lambda: threading.Thread(target=print).start())
may("+ itself", lambda: socket.create_connection(server.getsockname()).close())
may("- write", lambda: (other / "new.txt").write_text("a"))
may("- write by a way around", lambda: (inside / ".." / other.name / "new.txt").write_text("a"))
may("- write bytes", lambda: open(os.fsencode(other / "kept.txt"), "wb"))
may("- update", lambda: open(other / "kept.txt", "r+"))
may("- os.open", lambda: os.open(other / "kept.txt", os.O_WRONLY))
may("- remove", lambda: (other / "kept.txt").unlink())
may("- rename into", lambda: os.rename(other / "kept.txt", inside / "kept.txt"))
may("- rename out of", lambda: os.rename(inside, other / "scratch"))
may("- make a folder", lambda: (other / "folder").mkdir())
may("- remove a tree", lambda: shutil.rmtree(other))
may("- mode", lambda: os.chmod(other / "kept.txt", 0))
may("- a process", lambda: subprocess.Popen([sys.executable, "-c", "0"]))
may("- a shell", lambda: os.system("true"))
may("- another program", lambda: os.execv(sys.executable, [sys.executable]))
may("- a signal", lambda: os.kill(os.getpid(), 0))
may("- a name", lambda: socket.getaddrinfo("example.org", 80))
may("- an address", lambda: socket.create_connection(("192.0.2.1", 80), 1))
may("- a packet", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 80)))
may("- all interfaces", lambda: socket.socket().bind(("0.0.0.0", 0)))
if os.name == "posix":
    (inside / "c.txt").write_text("c")
    may("+ remove by handle", lambda: os.remove("c.txt", dir_fd=handle))
    may("- a way out by handle", lambda: os.remove(f"../{other.name}/kept.txt", dir_fd=handle))
    may("- a path with a handle", lambda: os.remove(str(other / "kept.txt"), dir_fd=handle))
    may("- a handle", lambda: os.open(other, os.O_RDONLY))
    may("- a fork", lambda: os.fork())
    may("- a link", lambda: os.symlink(other, other / "link"))
"""


def test_a_submission_writes_to_its_scratch_folder_and_reaches_nothing_else(tmp_path: Path) -> None:
    folders = tmp_path / "scratch", tmp_path / "outside"
    for folder in folders:
        folder.mkdir()
    (kept := folders[1] / "kept.txt").write_text("kept", encoding="utf-8")
    arguments = [sys.executable, "-c", GUARDED, *map(str, folders)]
    done = subprocess.run(arguments, cwd=paths.ROOT, capture_output=True, text=True, timeout=300)
    tried = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(tried) >= 30, done.stderr
    assert [name for name, may in tried if may != name.startswith("+")] == []
    assert list(folders[1].iterdir()) == [kept] and kept.read_text(encoding="utf-8") == "kept"


# ---- verdicts from reports ----


GOOD = {TEST: "", CANARY: "assert [1] == [2]"}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"tests": GOOD}, ""),
        ({"tests": {f"{TEST}[{n}]": "" for n in range(3)} | {CANARY: "x"}}, ""),
        (None, "It ended."),
        ({}, "not run to their end"),
        ({"tests": None}, "not run to their end"),
        ({"tests": {TEST: ""}}, "not run to their end"),
        ({"tests": {f"{TEST}_more": "", CANARY: "x"}}, "Not all tests were run"),
        ({"tests": GOOD | {CANARY: ""}}, "cannot pass was reported as passed"),
        ({"tests": GOOD | {TEST: "AssertionError"}}, "1 of 1 tests failed"),
        ({"tests": GOOD | {f"{TEST}[2]": "skipped"}}, "1 of 2 tests failed"),
        (
            {"tests": {f"{TEST}[{n}]": f"{n} < 3\nmore" for n in (1, 2)} | {CANARY: "x"}},
            f"2 of 2 tests failed:\n{TEST.partition('/')[2]} - 1 < 3 (and 1 more cases)",
        ),
        ({"tests": GOOD, "error": "no import"}, "no import"),
        ({"tests": {TEST: "\x1b[31m" + "long " * 1000, CANARY: "x"}}, "1 of 1 tests failed"),
    ],
)
def test_only_a_whole_report_counts_and_shown_text_is_harmless(
    report: dict[str, Any] | None, words: str
) -> None:
    why = grading._verdict(STAGE, TASK, "It ended.", report, "")
    assert words in why and bool(why) == bool(words)
    why = grading._verdict(STAGE, TASK, "It ended.", report, "\x1b]0;title\x07\0" + "noise " * 5000)
    assert len(why) < 3000 and all(letter.isprintable() or letter == "\n" for letter in why)


def test_a_report_needs_the_word_and_comes_once() -> None:
    good = b'w0rd {"tests": {}}\n'
    assert grading._read_report(b"noise\n" + good, "w0rd") == {"tests": {}}
    for data in (b"", b"noise", good[5:], good + good, b"w0rd [1]\n", b"w0rd {", b"word {}"):
        assert grading._read_report(data, "w0rd") is None


# ---- a submission as a whole ----


@pytest.mark.parametrize("place", [STAGE, f"mine/{STAGE}", "."])
def test_a_submission_is_found_in_three_shapes_and_its_tests_must_not_change(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, missing in (
        ("no folder", tmp_path / "none"),
        ("holds nothing of stage04", tmp_path),
    ):
        with pytest.raises(UserError, match=words):
            list(grading.grade([STAGE], missing))
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    mine.write(folder / FILE, REFERENCE)
    judged: list[Path | None] = []

    def judge(stage: str, task: Task, folder: Path, trusted: Path, *rest: Any) -> str:
        judged.append(folder)
        if task.number == 3:
            (trusted / stage / "tests" / "test_request.py").write_text("", encoding="utf-8")
        return "" if task.number == 1 else "1 of 1 tests failed"

    monkeypatch.setattr(grading, "_judge", judge)
    verdicts = grading.grade([STAGE], tmp_path)
    results = [
        (each.task.number, each.passed, each.points) for each in itertools.islice(verdicts, 2)
    ]
    assert results == [(1, True, TASK.points), (2, False, 0)]
    with pytest.raises(UserError, match="no result is valid"):
        next(verdicts)
    assert judged == [folder] * 3


def test_a_file_that_is_missing_too_large_or_a_link_is_no_solution(
    tmp_path: Path, trusted: Path
) -> None:
    def judge() -> str:
        return grading._judge(STAGE, TASK, tmp_path, trusted, SHORT)

    assert "no request.py" in judge()
    mine.write(tmp_path / FILE, "#" * (grading.MOST_BYTES + 1))
    assert "larger than" in judge()
    mine.write(tmp_path / FILE, REFERENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "denied")))
        assert "cannot be read: denied" in judge()
    (tmp_path / FILE).unlink()
    try:
        (tmp_path / FILE).symlink_to(paths.ROOT / STAGE / FILE)
        (tmp_path / STAGE).symlink_to(paths.ROOT / STAGE, target_is_directory=True)
    except OSError:
        pytest.skip("this system makes no links")
    assert "is a link" in judge()
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match="holds nothing"):
        list(grading.grade([STAGE], tmp_path))


OTHER = mine.find_task("stage02_kv_cache", 1)
WHY = "wrong:\n<&> and why"
VERDICTS = [
    Verdict(STAGE, TASK, True, "", 1.25),
    Verdict("stage02_kv_cache", OTHER, False, WHY, 2.0),
]


def test_results_for_gradescope() -> None:
    results = json.loads(json.dumps(grading.gradescope(VERDICTS)))
    assert (results["score"], results["execution_time"]) == (TASK.points, 3)
    assert results["stdout_visibility"] == "hidden"
    assert [tuple(test.values()) for test in results["tests"]] == [
        (f"stage04 task 1: {TASK.title}", "4.1", 5, 5, "passed", "All tests passed.", "visible"),
        (f"stage02 task 1: {OTHER.title}", "2.1", 0, 20, "failed", WHY, "visible"),
    ]
    keys = ("name", "number", "score", "max_score", "status", "output", "visibility")
    assert tuple(results["tests"][0]) == keys


def test_results_as_junit_xml() -> None:
    root = ET.fromstring(grading.junit(VERDICTS).encode("utf-8"))
    suites = root.findall("testsuite")
    counts = [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in suites]
    assert counts == [(STAGE, "1", "0"), ("stage02_kv_cache", "1", "1")]
    case = suites[1].find("testcase")
    assert case is not None and case.get("name") == f"stage02 task 1: {OTHER.title}"
    failure = case.find("failure")
    assert failure is not None and (failure.get("message"), failure.text) == ("wrong:", WHY)
    points = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert points == {"points": "0", "max_points": "20"}
