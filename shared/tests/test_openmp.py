"""How threads wait is settled before PyTorch is loaded, in every package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared import openmp, paths
from shared.course import waiting
from shared.testing import python


def run(code: str, **given: str) -> str:
    """What a new Python prints, with OpenMP's own report of its settings if it loads OpenMP."""
    environ = {name: text for name, text in os.environ.items() if name not in openmp.VARIABLES}
    environ |= {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    return python("-c", code, env=environ, stderr=subprocess.STDOUT, check=True).stdout


@pytest.fixture
def busy() -> Iterator[None]:
    """A machine on which other programs use all processors, until the choice is made."""
    loop = [sys.executable, "-c", "import time\nwhile time.process_time() < 1.5: pass"]
    loops = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]
    yield
    for each in loops:
        each.kill()
        each.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch for Linux brings GNU's OpenMP")
@pytest.mark.usefixtures("busy")
def test_openmp_itself_reports_the_choice():
    # This module of a stage imports PyTorch first of all.
    out = run("import stage01_forward.attention; print(stage01_forward.openmp.choose())")
    assert "GOMP_SPINCOUNT = '0'" in out and "asleep: other programs" in out


EACH = """
import importlib, sys
for name in {names}:
    for known in [known for known in sys.modules if known.startswith(("shared", "stage"))]:
        del sys.modules[known]
    package = importlib.import_module(name)
    print("torch" in sys.modules, package.openmp._choice[:2], name)
"""


def test_every_package_chooses_before_pytorch_is_loaded():
    names = ["shared", *paths.discover()]
    out = run(EACH.format(names=names), OMP_WAIT_POLICY="PASSIVE")
    assert out.splitlines() == [f"False as {name}" for name in names]


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of this kind")
@pytest.mark.parametrize("module", ["reports.tour", "stage04_continuous"])
def test_a_terminal_shows_a_line_before_anything_is_loaded(module):
    own, terminal = os.openpty()
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    done = subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the end of a terminal on Linux
        while text := os.read(own, 65536):
            shown += text
    os.close(own)
    assert done.wait() == 0
    before, _, after = shown.partition(b"[starting ...]")
    assert b" psutil\r" not in before and b" torch\r" not in before and after


def test_only_a_busy_machine_changes_the_environment(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    for used, environ, told in (
        (0.1, {}, "by spinning, the fastest"),
        (None, {}, "by spinning: psutil is missing"),
        (0.9, {"OMP_WAIT_POLICY": "PASSIVE"}, "asleep: other programs used 0.9 processors"),
    ):
        monkeypatch.setattr(openmp, "_choice", "")
        found: dict[str, str] = {}
        for now in (used, 2.0):  # once and for all
            monkeypatch.setattr(openmp, "in_use", lambda now=now: now)
            assert openmp.choose(found).startswith(told) and found == environ


def test_a_choice_of_the_users_stands_and_one_comes_before_pytorch(monkeypatch):
    for given, told in (({"GOMP_SPINCOUNT": "777"}, "GOMP_SPINCOUNT=777"), ({}, "loaded before")):
        monkeypatch.setattr(openmp, "_choice", "")
        found = dict(given)
        assert told in openmp.choose(found) and found == given


@pytest.mark.parametrize(("slow", "status"), [(1.0, 0), (9.0, 1)])
def test_the_cost_of_waiting_is_judged(monkeypatch, capsys, slow, status):
    """With programs that only pretend to compute."""
    code = "import os, sys; print('so', flush=True)\nfor _ in sys.stdin:\n    "
    code += f"print(0.002 if 'GOMP_SPINCOUNT' in os.environ else 0.002 * {slow}, flush=True)"
    monkeypatch.setattr(waiting, "PROGRAM", code)
    monkeypatch.setattr(waiting, "SECONDS", 0.0)
    monkeypatch.setattr(waiting, "MOST", {0: 1.02, 1: 2.0})
    assert waiting.main([]) == status
    alone, beside = capsys.readouterr().out.splitlines()
    share = f"{2 * slow:.2f} ms a token, {slow:.2f} of its share (at most 1.02); spinning 1.00"
    assert alone == f"beside 0 busy programs: {share}; it waits so"
    assert beside.startswith("beside 1 busy programs: ")
