"""What the doctor says of a machine that is ready, and of one that is not."""

from __future__ import annotations

import importlib.metadata

from shared import doctor


def test_a_machine_is_ready_or_told_what_to_do(monkeypatch, capsys):
    assert doctor.main() == 0 and capsys.readouterr().out.endswith("Ready.\n")
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: name[:1] + version(name))
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "numpy is n" in out and doctor.INSTALL in out and out.endswith("Not ready.\n")
