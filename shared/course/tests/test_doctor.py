"""The doctor: each fault is found and has a remedy, and a ready machine has none."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from shared import checkpoint
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


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def threads(taken: int, cpus: int, quota: str = "") -> dict[str, Any]:
    names = ("torch.get_num_threads", "shared.measure.cpus", "shared.course.doctor._cgroup")
    return dict(zip(names, map(always, (taken, cpus, quota)), strict=True))


def memory(free: float, most: str = "") -> dict[str, Any]:
    found = SimpleNamespace(available=int(free * doctor.GIB))
    return {"psutil.virtual_memory": always(found), "shared.course.doctor._cgroup": always(most)}


def disk(free: float) -> dict[str, Any]:
    return {"shutil.disk_usage": always(SimpleNamespace(free=int(free * doctor.GIB)))}


def git(*state: Any) -> dict[str, Any]:
    """state: commit and difference; without the latter, only untracked files differ."""
    return {"shared.measure.git_state": lambda untracked: (*state, untracked)[:2]}


MISSING = {"shared.course.doctor.ENGINE_NEEDS": ["torch", "missing"]}
DENIED = Mock(side_effect=PermissionError(13, "denied"))
BROKEN_GPU = {
    "torch.cuda.is_available": always(True),
    "torch.cuda.get_device_name": always("Some GPU"),
    "torch.ones": Mock(side_effect=RuntimeError("no kernel image\nmore")),
}


@pytest.mark.parametrize(
    ("check", "machine", "state", "text", "remedy"),
    [
        ("python", {"sys.version_info": (3, 10, 9, "final")}, WRONG, "3.10.9 is older", ".venv"),
        ("libraries", MISSING, WRONG, "missing cannot be imported", doctor.INSTALL),
        ("libraries", {"torch.__version__": "2.10.0"}, WRONG, "torch 2.10.0", doctor.INSTALL),
        ("libraries", {"torch.__version__": "2.11.0+cu128"}, OK, "torch 2.11.0", ""),
        ("libraries", {"torch.__version__": "3.0.1"}, OK, "torch 3.0.1", ""),
        ("threads", threads(4, 4, "max 100000"), OK, "4 on 4 processors; they wait ", ""),
        ("threads", threads(1, 4), OK, "1 on 4 processors; they wait ", ""),
        ("threads", threads(8, 4), NOTE, "8 threads on 4 processors", "OMP_NUM_THREADS=4"),
        ("threads", threads(8, 8, "200000 100000"), NOTE, "on 2 processors", "THREADS=2"),
        ("threads", threads(2, 8, "200000 100000"), OK, "2 on 2 processors", ""),
        ("memory", memory(8, "max"), OK, "8.0 GiB", ""),
        ("memory", memory(8), OK, "8.0 GiB", ""),
        ("memory", memory(2, "max"), NOTE, "2.0 GiB", "close"),
        ("memory", memory(8, str(2 * doctor.GIB)), NOTE, "2.0 GiB", "close"),
        ("memory", memory(0.5, "max"), WRONG, "0.5 GiB", "close"),
        ("disk", disk(5), OK, "5.0 GiB", ""),
        ("disk", disk(0.5), NOTE, "0.5 GiB", "GPT-2"),
        ("disk", disk(0.01), WRONG, "0.0 GiB", "make room"),
        ("disk", {"tempfile.TemporaryFile": DENIED}, WRONG, "cannot be written (denied)", "move"),
        ("code", git(None, None), OK, "not a git checkout", ""),
        ("code", git("abcdef1234", False), OK, "as in commit abcdef1", ""),
        ("code", git("abcdef1234", True), NOTE, "differ from commit abcdef1", "git status"),
        ("code", git("abcdef1234"), OK, "as in commit abcdef1", ""),  # untracked files only
        ("device", BROKEN_GPU, WRONG, "Some GPU does not compute: no kernel image", "--device cpu"),
        ("device", {"torch.cuda.is_available": always(False)}, OK, "none is needed", ""),
        ("loopback", {"socket.create_server": DENIED}, WRONG, "denied", "allow"),
    ],
)
def test_a_machine_and_what_is_found(
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    machine: dict[str, Any],
    state: str,
    text: str,
    remedy: str,
) -> None:
    for name, value in machine.items():
        monkeypatch.setattr(name, value)
    found = doctor.checks()[check]()
    assert found.state == state and text in found.text and "\n" not in found.text
    assert remedy in found.remedy and bool(found.remedy) == (state != OK)


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
