"""How threads wait is settled before PyTorch is loaded, and only a busy machine changes it."""

from __future__ import annotations

import os
from pathlib import Path

from shared import openmp, paths
from shared.testing import python


def test_only_a_busy_machine_changes_the_environment(monkeypatch):
    for minute, now, policy in ((0.1, 9, ""), (2.0, 1, ""), (2.0, 3, "PASSIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda minute=minute: (minute, 0, 0))
        monkeypatch.setattr(Path, "read_text", lambda self, now=now: f"0 0 0 {now}/99 1")
        assert openmp.choose() == policy
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert openmp.choose() == "ACTIVE"


def test_every_package_chooses_before_pytorch_is_loaded():
    code = "import importlib, sys\n"
    code += f"for name in {['shared', *paths.discover()]}:\n    importlib.import_module(name)\n"
    assert python("-c", code + "print('torch' in sys.modules)", check=True).stdout == "False\n"
