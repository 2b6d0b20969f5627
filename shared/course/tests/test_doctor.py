"""The doctor: each fault is found and has a remedy, and a ready machine has none."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from shared import checkpoint, measure
from shared.course import doctor
from shared.course.doctor import NOTE, OK, WRONG

PINNED = {"numpy": "2.4.6", "torch": "2.13.0"}


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """Green before any exercise is done: a machine that runs the tests is ready."""
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert WRONG not in out and re.search(r"^Ready\. \(\d+\.\d s\)\n\Z", out, re.MULTILINE)
    assert re.findall(r"^(?:ok|note) +(\w+) ", out, re.MULTILINE) == list(doctor.checks())
    assert "Once upon a time there lived" in out


def test_one_wrong_line_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = {
        "one": lambda: doctor.Finding(NOTE, "odd", "look"),
        "two": lambda: doctor.Finding(WRONG, "broken", "fix it"),
    }
    monkeypatch.setattr(doctor, "checks", lambda: some)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["note", "one", "odd"],
        ["->", "look"],
        ["WRONG", "two", "broken"],
        ["->", "fix", "it"],
    ]
    assert lines[4].startswith("Not ready: 1 of 2 wrong.")


def test_it_runs_where_nothing_is_installed() -> None:
    """-S leaves out all installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "shared.course.doctor"],
        cwd=doctor.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^WRONG  packages +missing: torch, numpy, ", done.stdout, re.MULTILINE)
    assert re.search(r"^WRONG  model +not checked: ", done.stdout, re.MULTILINE)
    assert done.stdout.count(f"-> {doctor.INSTALL}\n") >= 2


def test_every_pin_is_read() -> None:
    text = (doctor.ROOT / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert [f"{name}=={version}" for name, version in doctor.requirements(text).items()] == lines
    assert doctor.requirements("# torch==1.0\nnumpy==2.4.6\n") == {"numpy": "2.4.6"}


@pytest.mark.parametrize(
    ("installed", "state", "text"),
    [
        ({"numpy": "2.4.6", "torch": "2.13.0"}, OK, "2 as in requirements.txt"),
        ({"numpy": "2.4.6", "torch": "2.14.1+cu130"}, OK, "2 as in requirements.txt"),
        ({"numpy": "2.4.6+local", "torch": "2.13.0"}, OK, "2 as in requirements.txt"),
        ({"numpy": "2.4.5", "torch": "2.13.0"}, WRONG, "numpy 2.4.5 instead of 2.4.6"),
        ({"numpy": "2.4.6"}, WRONG, "missing: torch"),
    ],
)
def test_packages(installed: dict[str, str], state: str, text: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    found = doctor.packages(PINNED, version)
    assert (found.state, found.text, bool(found.remedy)) == (state, text, state == WRONG)


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9, "final", 0))
    found = doctor.python()
    assert (found.state, found.text) == (WRONG, "3.10.9 is older than 3.11")
    assert "make .venv again" in found.remedy


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    found = doctor.libraries()
    assert found.state == WRONG and found.text.startswith("tiktoken cannot be imported")
    assert found.remedy == doctor.INSTALL


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.0", WRONG), ("2.11.0+cu128", OK), ("3.0.1", OK)]
)
def test_an_old_torch(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.libraries().state == state


@pytest.mark.parametrize(
    ("taken", "cpus", "quota", "state"),
    [
        (4, 4, "max 100000", OK),
        (1, 4, "", OK),
        (8, 4, "", NOTE),
        (8, 8, "200000 100000", NOTE),
        (2, 8, "200000 100000", OK),
    ],
)
def test_more_threads_than_processors(
    monkeypatch: pytest.MonkeyPatch, taken: int, cpus: int, quota: str, state: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken)
    monkeypatch.setattr(measure, "cpus", lambda: cpus)
    monkeypatch.setattr(doctor, "_cgroup", lambda name: quota)
    found = doctor.threads()
    assert found.state == state
    if state == NOTE:
        assert found.remedy == f"set OMP_NUM_THREADS={2 if quota else cpus}"


@pytest.mark.parametrize(
    ("available", "most", "state"),
    [
        (8.0, "max", OK),
        (8.0, "", OK),
        (2.0, "max", NOTE),
        (8.0, str(2 * doctor.GIB), NOTE),
        (0.5, "max", WRONG),
    ],
)
def test_memory(monkeypatch: pytest.MonkeyPatch, available: float, most: str, state: str) -> None:
    free = SimpleNamespace(available=int(available * doctor.GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(doctor, "_cgroup", lambda name: most)
    found = doctor.memory()
    assert (found.state, bool(found.remedy)) == (state, state != OK)


@pytest.mark.parametrize(("free", "state"), [(5.0, OK), (0.5, NOTE), (0.01, WRONG)])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, state: str) -> None:
    usage = SimpleNamespace(free=int(free * doctor.GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert doctor.disk(tmp_path).state == state
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    found = doctor.disk(tmp_path / "gone")
    assert found.state == WRONG and "cannot be written" in found.text


@pytest.mark.parametrize(
    ("git", "state", "text"),
    [
        ((None, None), OK, "not a git checkout"),
        (("abcdef1234", False), OK, "as in commit abcdef1"),
        (("abcdef1234", True), NOTE, "differ from commit abcdef1"),
    ],
)
def test_changed_files(
    monkeypatch: pytest.MonkeyPatch, git: tuple[Any, Any], state: str, text: str
) -> None:
    monkeypatch.setattr(measure, "git_state", lambda untracked: git)
    found = doctor.code()
    assert found.state == state and text in found.text


def test_a_gpu_that_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("no kernel image is available\nmore")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    found = doctor.device()
    text = "Some GPU does not compute: no kernel image is available"
    assert (found.state, found.text) == (WRONG, text) and "--device cpu" in found.remedy


def test_no_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.device()
    assert found.state == OK and "none is needed" in found.text


def test_a_machine_that_does_not_answer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", Mock(side_effect=PermissionError(13, "denied")))
    found = doctor.loopback()
    assert found.state == WRONG and "denied" in found.text


def test_a_model_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of four without its attention: another text, but still a text."""
    changed = checkpoint.load("stories")
    changed.tensors["h.1.attn.c_proj.weight"] = torch.zeros(192, 192)
    monkeypatch.setattr(checkpoint, "load", lambda name: changed)
    found = doctor.model()
    assert found.state == WRONG and found.remedy
    assert f"and not with '{doctor.STORY[:60]}" in found.text


def test_a_truncated_model_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint.STORIES, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(checkpoint, "STORIES", folder)
    found = doctor.examine("model", doctor.model)
    assert found.state == WRONG and "model.safetensors is truncated" in found.text and found.remedy


def test_an_error_in_a_check_is_a_finding() -> None:
    found = doctor.examine("odd", Mock(side_effect=ZeroDivisionError("by zero")))
    assert (found.state, found.text) == (WRONG, "ZeroDivisionError: by zero")
    assert "'odd'" in found.remedy


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, status in ((["--help"], 0), (["--hepl"], 2)):
        with pytest.raises(SystemExit) as end:
            doctor.main(argv)
        assert end.value.code == status
    assert "exit status: 0 ready" in capsys.readouterr().out
