"""The doctor: each fault is found and has a remedy, and a ready machine has none."""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from shared import checkpoint
from shared.course import doctor
from shared.course.doctor import NOTE, OK, WRONG
from shared.errors import UserError
from shared.testing import python


def test_this_machine_is_ready(capsys):
    """Green before any exercise is done: a machine that runs the tests is ready."""
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert WRONG not in out and re.search(r"^Ready\. \(\d+\.\d s\)\n\Z", out, re.MULTILINE)
    assert re.findall(r"^(?:ok|note) +(\w+) ", out, re.MULTILINE) == list(doctor.checks())
    assert "Once upon a time there lived" in out


def test_one_wrong_line_is_exit_status_1(monkeypatch, capsys):
    odd, broken = doctor.Finding(NOTE, "odd", "look"), doctor.Finding(WRONG, "broken", "fix it")
    monkeypatch.setattr(doctor, "checks", lambda: {"one": lambda: odd, "two": lambda: broken})
    assert doctor.main([]) == 1
    words = " ".join(capsys.readouterr().out.split())
    lines = "note one odd -> look WRONG two broken -> fix it Not ready: 1 of 2 wrong. ("
    assert words.startswith(lines)


def test_it_runs_where_nothing_is_installed():
    """-S leaves out all installed packages."""
    done = python("-S", "-m", "shared.course.doctor")
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^WRONG  packages +missing: torch, numpy, ", done.stdout, re.MULTILINE)
    assert re.search(r"^WRONG  model +not checked: ", done.stdout, re.MULTILINE)
    assert done.stdout.count(f"-> {doctor.INSTALL}\n") >= 2


def test_packages_are_those_of_requirements_txt():
    text = (doctor.ROOT / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert [f"{name}=={version}" for name, version in doctor.requirements(text).items()] == lines
    pinned = doctor.requirements("# rich==1.0\nnumpy==2.4.6\ntorch==2.13.0\n")

    def found(**installed: str) -> doctor.Finding:
        def version(name: str) -> str:
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        return doctor.packages(pinned, version)

    for torch_version in ("2.13.0", "2.14.1+cu130"):
        right = doctor.Finding(OK, "2 as in requirements.txt")
        assert found(numpy="2.4.6+local", torch=torch_version) == right
    wrong = "missing: torch; numpy 2.4.5 instead of 2.4.6"
    assert found(numpy="2.4.5") == doctor.Finding(WRONG, wrong, doctor.INSTALL)


def always(value: Any) -> Mock:
    return Mock(return_value=value)


CGROUP = "shared.course.doctor._cgroup"


def threads(taken: int, cpus: int, quota: str = "") -> dict[str, Any]:
    found = {"torch.get_num_threads": always(taken), "shared.measure.cpus": always(cpus)}
    return found | {CGROUP: always(quota)}


def memory(free: float, most: str = "") -> dict[str, Any]:
    found = SimpleNamespace(available=int(free * doctor.GIB))
    return {"psutil.virtual_memory": always(found), CGROUP: always(most)}


def disk(free: float) -> dict[str, Any]:
    return {"shutil.disk_usage": always(SimpleNamespace(free=int(free * doctor.GIB)))}


def git(*state: Any) -> dict[str, Any]:
    """state: commit and difference; without the latter, only untracked files differ."""
    return {"shared.measure.git_state": lambda untracked: (*state, untracked)[:2]}


MISSING = {"shared.course.doctor.ENGINE_NEEDS": ["torch", "missing"]}
DENIED = Mock(side_effect=PermissionError(13, "denied"))
BROKEN = Mock(side_effect=RuntimeError("no kernel image\nmore"))
BROKEN_GPU = {"torch.cuda.is_available": always(True), "torch.ones": BROKEN}
BROKEN_GPU["torch.cuda.get_device_name"] = always("Some GPU")


def test_a_machine_and_what_is_found(monkeypatch):
    for check, machine, state, text, remedy in (
        ("python", {"sys.version_info": (3, 10, 9, "final")}, WRONG, "3.10.9 is older", ".venv"),
        ("libraries", MISSING, WRONG, "missing cannot be imported", doctor.INSTALL),
        ("libraries", {"torch.__version__": "2.10.0"}, WRONG, "torch 2.10.0", doctor.INSTALL),
        ("libraries", {"torch.__version__": "2.11.0+cu128"}, OK, "torch 2.11.0", ""),
        ("libraries", {"torch.__version__": "3.0.1"}, OK, "torch 3.0.1", ""),
        ("threads", threads(4, 4, "max 100000"), OK, "4 on 4 processors; they wait ", ""),
        ("threads", threads(8, 4), NOTE, "8 threads on 4 processors", "OMP_NUM_THREADS=4"),
        ("threads", threads(8, 8, "200000 100000"), NOTE, "on 2 processors", "THREADS=2"),
        ("threads", threads(2, 8, "200000 100000"), OK, "2 on 2 processors", ""),
        ("memory", memory(8, "max"), OK, "8.0 GiB", ""),
        ("memory", memory(8, str(2 * doctor.GIB)), NOTE, "2.0 GiB", "close"),
        ("memory", memory(0.5, "max"), WRONG, "0.5 GiB", "close"),
        ("disk", disk(5), OK, "5.0 GiB", ""),
        ("disk", disk(0.5), NOTE, "0.5 GiB", "GPT-2"),
        ("disk", disk(0.01), WRONG, "0.0 GiB", "make room"),
        ("disk", {"tempfile.TemporaryFile": DENIED}, WRONG, "cannot be written (denied)", "move"),
        ("code", git(None, None), OK, "not a git checkout", ""),
        ("code", git("abcdef1234", True), NOTE, "differ from commit abcdef1", "git status"),
        ("code", git("abcdef1234"), OK, "as in commit abcdef1", ""),  # untracked files only
        ("device", BROKEN_GPU, WRONG, "Some GPU does not compute: no kernel image", "--device cpu"),
        ("device", {"torch.cuda.is_available": always(False)}, OK, "none is needed", ""),
        ("loopback", {"socket.create_server": DENIED}, WRONG, "denied", "allow"),
    ):
        with monkeypatch.context() as patch:
            for name, value in machine.items():
                patch.setattr(name, value)
            found = doctor.checks()[check]()
        assert found.state == state and text in found.text and "\n" not in found.text
        assert remedy in found.remedy and bool(found.remedy) == (state != OK)


def test_a_model_with_other_weights(monkeypatch):
    """One layer of four without its attention: another text, but still a text."""
    changed = checkpoint.load("stories")
    changed.tensors["h.1.attn.c_proj.weight"] = torch.zeros(192, 192)
    monkeypatch.setattr(checkpoint, "load", lambda name: changed)
    found = doctor.model()
    assert found.state == WRONG and found.remedy
    assert f"and not with '{doctor.STORY[:60]}" in found.text


def test_an_error_in_a_check_is_a_finding():
    for error, text, remedy in (
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero", "'odd'"),
        (UserError("model.safetensors is truncated."), "model.safetensors is truncated.", "git"),
    ):
        found = doctor.examine("odd", Mock(side_effect=error))
        assert (found.state, found.text) == (WRONG, text) and remedy in found.remedy
