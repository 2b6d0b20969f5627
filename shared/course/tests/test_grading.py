"""Judging a submission: right ones pass, wrong ones fail, and hostile ones get nowhere."""

from __future__ import annotations

import json
import os
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
from shared.course import exercise, grading, mine
from shared.course.grading import CANARY, Limits
from shared.course.testing import python
from shared.errors import UserError
from shared.task import Task

STAGE, FILE = "stage04_continuous", "plan.py"
TASK = mine.find_task(STAGE, 1)  # Plan.tokens
TEST = f"{STAGE}/{TASK.tests[0]}"
REFERENCE = mine.read(paths.ROOT / STAGE / FILE)
SHORT = Limits(seconds=300, memory=2048, disk=32)  # with time enough for a busy machine


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grading") / "trusted"
    grading.copy_project(folder)
    return folder


@pytest.fixture
def judge(trusted: Path, tmp_path: Path) -> Iterator[Any]:
    """judge(source, limits=SHORT): why a file with this source does not solve the task. The trusted
    copy must stay as it is."""
    before = grading._fingerprint(trusted)

    def run(source: str, limits: Limits = SHORT, trust: bool = True) -> str:
        (tmp_path / FILE).write_bytes(source.encode("utf-8", "surrogateescape"))
        return grading._judge(STAGE, TASK, tmp_path, trusted, limits, trust=trust)

    yield run
    assert grading._fingerprint(trusted) == before


def inside(code: str) -> str:
    """The reference with code at the beginning of the task's function."""
    line = "        ids: list[int] = []\n"
    assert REFERENCE.count(line) == 1
    return REFERENCE.replace(line, textwrap.indent(code, " " * 8) + "\n" + line)


def above(code: str) -> str:
    """The reference with code that runs when it is imported."""
    return REFERENCE.replace(
        "class Observer(Protocol):", f"{code}\n\n\nclass Observer(Protocol):", 1
    )


WRONG = inside("return [], [], []")


def test_a_grader_that_is_killed_takes_the_judged_process_with_it(tmp_path):
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


def test_what_could_reach_the_judge_is_not_run_and_a_forged_success_is_seen(tmp_path, judge):
    """The submission tells pytest that everything passes, the canary included."""
    assert judge(REFERENCE) == ""
    forge = "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n"
    assert judge(WRONG + forge).startswith("A test that cannot pass was reported as passed")
    why = judge(WRONG + forge, trust=False)
    assert "the import of _pytest.reports" in why and "was not run" in why


FAKE_REPORT = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, b'{"tests": {}}\\n')
    except OSError:
        pass
os._exit(0)
"""
SLEEPER = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"
TESTS = f"{STAGE}/tests"
EARLY, NOT_ALL = "Its process ended before the tests did", "not run to their end"
SYNTAX, SLOW = "cannot be imported: SyntaxError", "It took longer than 20 s"
HOSTILE: dict[str, tuple[str, str]] = {
    "empty": (mine.emptied(REFERENCE, STAGE, TASK), "stage04 task 1: "),
    "wrong": (WRONG, "1 of 1 tests failed"),
    "skips": (inside("import pytest\npytest.skip('no')"), "skipped"),
    "loops": (inside("while True:\n    pass"), SLOW),
    "sys.exit": (inside("import sys\nsys.exit(0)"), "SystemExit"),
    "sys.exit at import": (above("import sys\nsys.exit(0)"), "cannot be imported: SystemExit"),
    "os._exit": (inside("import os\nos._exit(0)"), EARLY),
    "os._exit at import": (above("import os\nos._exit(0)"), EARLY),
    "interrupts": (inside("raise KeyboardInterrupt"), NOT_ALL),
    "pytest.exit": (inside("import pytest\npytest.exit('bye', 0)"), NOT_ALL),
    "edits tests": (above(f"open('{TESTS}/test_request.py', 'w')"), "may not write to"),
    "writes a report": (inside(FAKE_REPORT), EARLY),
    "not Python": ("def (:", SYNTAX),
    "nested": ("x = " + "(" * 5000, SYNTAX),
    "not UTF-8": ("x = '\udcff'", SYNTAX),
    "threads that stay": (above(SLEEPER), ""),
    "exit handlers": (above("import atexit, time\natexit.register(time.sleep, 1000)"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_submission_gets_nowhere(kind, judge):
    source, words = HOSTILE[kind]
    why = judge(source, Limits(seconds=20 if words == SLOW else 120, memory=2048, disk=32))
    assert words in why and bool(why) == bool(words)


@pytest.fixture
def child(tmp_path: Path) -> Any:
    """child(code, limits): how a process ended that runs `code` in place of the judge, its report,
    and its output."""

    def run(code: str, limits: Limits = SHORT) -> tuple[str, bytes, str]:
        scratch, course = tmp_path / "scratch", tmp_path / "shared" / "course"
        for folder in (scratch, course):
            folder.mkdir(parents=True)
        mine.write(course / "grading.py", code)
        job = {"scratch": str(scratch), "word": "secret"}
        return grading.run_job(job, tmp_path, scratch, limits)

    return run


def test_a_process_gets_its_job_and_no_secrets(child, monkeypatch):
    monkeypatch.setenv("GITHUB_TOKEN", "a secret token")
    shown = "print(json.dumps([sys.stdin.readline(), dict(os.environ)]))"
    code = f"{shown}; print('noise', file=sys.stderr); sys.exit(3)"
    ended, report, output = child(f"import json, os, sys; {code}")
    assert "exit status 3" in ended and output.strip() == "noise"
    job, environment = json.loads(report)
    assert json.loads(job)["word"] == "secret"
    assert "a secret token" not in environment.values()
    assert Path(environment["HOME"]).name == "scratch"


LIMITED: dict[str, tuple[str, Limits, str]] = {
    "loops": ("while True: pass", Limits(seconds=1), "longer than 1 s"),
    "prints": ("while True: print('x' * 10000)", Limits(seconds=1), "longer than 1 s"),
    "errs": ("while True: sys.stderr.write('x' * 10000)", Limits(seconds=1), "longer than 1 s"),
    "memory": ("x = b'1' * 2**28; time.sleep(60)", Limits(memory=200), "200 MiB of memory"),
    "disk": ("open('scratch/x', 'wb').write(b'1' * 2**24); time.sleep(60)", Limits(disk=8), "8 M"),
}


@pytest.mark.parametrize("kind", LIMITED)
def test_a_process_ends_at_its_limits(kind, child):
    code, limits, words = LIMITED[kind]
    ended, report, output = child(f"import sys, time\n{code}", limits)
    assert words in ended
    assert len(report) <= grading.MOST_REPORT and len(output) <= 4 * grading.MOST_OUTPUT


def test_children_and_orphans_end_with_the_process(child):
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


def test_a_folder_is_measured_while_it_changes(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(bytes(1000))
    monkeypatch.setattr(os, "walk", lambda folder: [(str(tmp_path), [], ["kept", "gone"])])
    assert grading._size(tmp_path) == 1000


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
may("+ rename", lambda: (inside / "a.txt").rename(inside / "b.txt"))
may("+ remove", lambda: (inside / "b.txt").unlink())
may("+ folders", lambda: shutil.rmtree(tempfile.mkdtemp()))
may("+ a temporary file", lambda: tempfile.TemporaryFile().close())
may("+ devnull", lambda: open(os.devnull, "w").close())
may("+ read", lambda: (other / "kept.txt").read_text())
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
for cc in filter(None, [shutil.which("cc")]):
    (inside / "a.c").write_text("int a;")
    command = [cc, "-O3", "-fPIC", "-shared", str(inside / "a.c"), "-o"]
    may("+ a compiler", lambda: subprocess.run([*command, str(inside / "a.so")], check=True))
    may("- a compiler that writes", lambda: subprocess.Popen([*command, str(other / "a.so")]))
    may("- its other flags", lambda: subprocess.Popen([*command, str(inside / "b"), "-wrapper"]))
    may("- its files of flags", lambda: subprocess.Popen([cc, f"@{inside / 'a.c'}"]))
if os.name == "posix":
    (inside / "c.txt").write_text("c")
    may("+ remove by handle", lambda: os.remove("c.txt", dir_fd=handle))
    may("- a way out by handle", lambda: os.remove(f"../{other.name}/kept.txt", dir_fd=handle))
    may("- a path with a handle", lambda: os.remove(str(other / "kept.txt"), dir_fd=handle))
    may("- a handle", lambda: os.open(other, os.O_RDONLY))
    may("- a fork", lambda: os.fork())
    may("- a link", lambda: os.symlink(other, other / "link"))
"""


def test_a_submission_writes_to_its_scratch_folder_and_reaches_nothing_else(tmp_path):
    folders = tmp_path / "scratch", tmp_path / "outside"
    for folder in folders:
        folder.mkdir()
    (kept := folders[1] / "kept.txt").write_text("kept", encoding="utf-8")
    done = python("-c", GUARDED, *folders)
    tried = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(tried) >= 30, done.stderr
    assert [name for name, may in tried if may != name.startswith("+")] == []
    assert list(folders[1].iterdir()) == [kept] and kept.read_text(encoding="utf-8") == "kept"


GOOD = {TEST: "", CANARY: "assert [1] == [2]"}


def test_only_a_whole_report_counts_and_shown_text_is_harmless():
    noise = "\x1b]0;title\x07\0" + "noise " * 5000
    reports: list[tuple[dict[str, Any] | None, str]] = [
        ({"tests": GOOD}, ""),
        ({"tests": {f"{TEST}[{n}]": "" for n in range(3)} | {CANARY: "x"}}, ""),
        (None, "It ended."),
        *((broken, NOT_ALL) for broken in ({}, {"tests": None}, {"tests": {TEST: ""}})),
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
    ]
    for report, words in reports:
        why = grading._verdict(STAGE, TASK, "It ended.", report, "")
        assert words in why and bool(why) == bool(words)
        why = grading._verdict(STAGE, TASK, "It ended.", report, noise)
        assert len(why) < 3000 and all(letter.isprintable() or letter == "\n" for letter in why)


def test_a_report_needs_the_word_and_comes_once():
    good = b'w0rd {"tests": {}}\n'
    assert grading.read_report(b"noise\n" + good, "w0rd") == {"tests": {}}
    for data in (b"", b"noise", good[5:], good + good, b"w0rd [1]\n", b"w0rd {", b"word {}"):
        assert grading.read_report(data, "w0rd") is None


@pytest.mark.parametrize("place", [STAGE, f"mine/{STAGE}", "."])
def test_a_submission_is_found_and_its_tests_must_not_change(place, tmp_path, monkeypatch):
    for folder, words in ((tmp_path / "none", "no folder"), (tmp_path, "holds nothing of stage04")):
        pytest.raises(UserError, list, grading.grade([STAGE], folder)).match(words)
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    mine.write(folder / FILE, REFERENCE)
    judged = []

    def judge(stage: str, task: Task, folder: Path, trusted: Path, *rest: Any) -> str:
        judged.append(folder)
        if task.number == 3:
            (trusted / stage / "tests" / "test_request.py").write_text("", encoding="utf-8")
        return "" if task.number == 1 else "1 of 1 tests failed"

    monkeypatch.setattr(grading, "_judge", judge)
    verdicts = grading.grade([STAGE], tmp_path)
    first, second = next(verdicts), next(verdicts)
    assert (first.passed, first.points, second.passed, second.points) == (True, 5, False, 0)
    pytest.raises(UserError, next, verdicts).match("no result is valid")
    assert judged == [folder] * 3


def test_a_file_that_is_missing_too_large_or_a_link_is_no_solution(tmp_path, trusted, monkeypatch):
    def judge() -> str:
        return grading._judge(STAGE, TASK, tmp_path, trusted, SHORT)

    assert f"no {FILE}" in judge()
    mine.write(tmp_path / FILE, "#" * (grading.MOST_BYTES + 1))
    assert "larger than" in judge()
    (tmp_path / FILE).unlink()
    try:
        (tmp_path / FILE).symlink_to(paths.ROOT / STAGE / FILE)
        (tmp_path / STAGE).symlink_to(paths.ROOT / STAGE, target_is_directory=True)
    except OSError:
        pytest.skip("this system makes no links")
    assert "is a link" in judge()
    (tmp_path / FILE).unlink()
    pytest.raises(UserError, list, grading.grade([STAGE], tmp_path)).match("holds nothing")
    mine.write(tmp_path / FILE, REFERENCE)
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "denied")))
    assert "cannot be read: denied" in judge()


WHY = "wrong:\n<&> and why"


def test_results_for_gradescope_and_as_junit_xml(home, tmp_path, monkeypatch, capsys):
    """Of two stages; the judge is replaced: the first task of each is right."""
    for stage in ("stage02_kv_cache", STAGE):
        mine.start(stage)
    monkeypatch.setattr(grading, "_judge", lambda _, task, *rest: WHY if task.number > 1 else "")
    files = tmp_path / "results.json", tmp_path / "results.xml"
    exercise.main(["grade", "--out", str(files[0]), "--junit", str(files[1])])
    one, two, *rest = mine.tasks("stage02_kv_cache")
    name, score = f"stage02 task 2: {two.title}", one.points + TASK.points
    shown = capsys.readouterr().out
    assert f"{one.points:3} of {one.points:3}  stage02 task 1" in shown
    assert f"  0 of {two.points:3}  {name}" in shown and f"{score:3} of 200  all" in shown

    results = json.loads(files[0].read_text(encoding="utf-8"))
    assert (results["score"], results["stdout_visibility"]) == (score, "hidden")
    assert type(results["execution_time"]) is int
    tests = {test["number"]: test for test in results["tests"]}
    failed = {"name": name, "score": 0, "max_score": two.points, "status": "failed"}
    assert tests["2.2"] == failed | {"output": WHY, "visibility": "visible", "number": "2.2"}
    passed = {"score": TASK.points, "status": "passed", "output": "All tests passed."}
    assert tests["4.1"] == tests["4.1"] | passed

    suites = ET.parse(files[1]).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["stage02_kv_cache", STAGE]
    counts = suites[0].get("tests"), suites[0].get("failures")
    assert counts == (str(2 + len(rest)), str(1 + len(rest)))
    case = suites[0].findall("testcase")[1]
    (failure,) = case.iter("failure")
    assert (case.get("name"), failure.get("message"), failure.text) == (name, "wrong:", WHY)
    points = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert points == {"points": "0", "max_points": str(two.points)}
