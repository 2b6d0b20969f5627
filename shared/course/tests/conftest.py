"""Fixtures of the course's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver  # here: most tests need none
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("chromium or its chromedriver is missing (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,860"):
        options.add_argument(f"--{switch}")
    browser = webdriver.Chrome(options, Service(driver))
    yield browser
    browser.quit()
