"""Fixtures of the course's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.course import judge, mine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the student's copies."""
    monkeypatch.setattr(mine, "HOME", tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture(scope="session")
def contained() -> None:
    """For tests of contained processes."""
    if why := judge.unconfined():
        pytest.skip(why)
