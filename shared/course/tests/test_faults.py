"""The lists of planted faults are valid, and the command tells what tests see from what they do
not."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest

from shared import paths
from shared.course import faults

CODE = "def double(x):\n    return x + x\n\n\ndef wait():\n    return False\n"
TEST = """
import time

from stage01_toy import code

def test_double():
    assert code.double(2) == 4

def test_wait():
    while code.wait():
        time.sleep(0.1)
"""
PROJECT = """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "-p xdist.plugin"
"""
FAULTS = (  # what, old, new
    ("a wrong sum", "x + x", "x + x + 1"),
    ("a square", "x + x", "x * x"),
    ("an endless loop", "return False", "return True"),
)
FILE, IDS = "stage01_toy/code.py", ["stage01_toy/tests/test_code.py::test_double"]


def test_the_lists_of_all_stages_are_valid():
    several = [fault for stage in ("shared", *paths.discover()) for fault in faults.read(stage)]
    assert list(faults.problems(several)) == []
    assert {fault.stage for fault in several} == {"shared", *paths.discover()}
    in_c = [fault for fault in several if fault.file.endswith((".c", ".h"))]
    assert len(several) >= 200 and len(in_c) >= 60


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A project of one stage, in place of this one."""
    tests = tmp_path / "stage01_toy" / "tests"
    tests.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tests.parent / "__init__.py").touch()
    (tests.parent / "code.py").write_text(CODE)
    (tests / "test_code.py").write_text(TEST)
    entries: list[dict[str, Any]] = []
    for what, old, new in FAULTS:
        entries.append({"what": what, "file": FILE, "old": old, "new": new, "tests": IDS})
    del entries[2]["tests"]
    (tests / "faults.json").write_text(json.dumps(entries))
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of the start
    monkeypatch.setattr(faults, "SECONDS", 10.0)  # on a busy machine it takes some
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tests / "faults.json"
    for number, handler in before.items():
        signal.signal(number, handler)


def test_killed_survived_and_hanging(toy, capsys):
    before = {path: path.read_bytes() for path in paths.ROOT.rglob("*") if path.is_file()}
    assert faults.main(["stage01_toy", "--jobs", "2"]) == 1
    lines = capsys.readouterr().out
    assert "killed" in lines and ": stage01_toy: a wrong sum" in lines
    assert "3 faults, 0 in C: 2 killed, 1 survived" in lines
    assert {path: path.read_bytes() for path in paths.ROOT.rglob("*") if path.is_file()} == before


def test_a_reason_excuses_and_a_failing_test_is_refused(toy, capsys):
    entries = json.loads(toy.read_text())
    entries[1]["reason"] = "2 * 2 is 2 + 2"
    toy.write_text(json.dumps(entries))
    assert faults.main(["--only", "square"]) == 0
    assert "1 survived with a reason" in capsys.readouterr().out
    (toy.parent / "test_code.py").write_text(TEST.replace("== 4", "== 5"))
    assert faults.main(["--only", "square"]) == 1
    assert "fail without a fault" in capsys.readouterr().err


def test_stale_faults_are_named(toy, capsys):
    entries = json.loads(toy.read_text())
    entries[0]["old"] = "x - x"
    entries[1]["tests"] = ["stage01_toy/tests/test_code.py::test_other"]
    entries[2]["what"] = entries[1]["what"]
    toy.write_text(json.dumps(entries))
    assert faults.main([]) == 1
    words = capsys.readouterr().err
    assert "a wrong sum: its old text occurs 0 times in stage01_toy/code.py" in words
    assert "there is no test stage01_toy/tests/test_code.py::test_other" in words
    assert "two faults: a square" in words


def test_what_the_tests_start_ends_with_them(toy):
    """Even if the tests themselves have ended."""
    mark = f"left by {toy}"
    (toy.parent / "test_code.py").write_text(
        "import subprocess, sys\n\ndef test_double():\n    sleep = 'import time; time.sleep(99)'\n"
        f"    subprocess.Popen([sys.executable, '-c', sleep, {mark!r}])\n"
    )

    def left() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if mark in command(process)]

    assert faults.main(["--only", "square"]) == 1  # it survives
    psutil.wait_procs(left(), timeout=5)  # a killed process needs a moment
    assert not left()


def command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_an_error_ends_the_run(toy):
    """It waited for ever for the fault that had failed."""
    (toy.parent / "test_code.py").write_text(
        "import pathlib, shutil\n\ndef test_double():\n"
        "    shutil.rmtree(pathlib.Path(__file__).parents[1])\n"
    )
    with pytest.raises(FileNotFoundError):
        faults.main(["--only", "square"])
