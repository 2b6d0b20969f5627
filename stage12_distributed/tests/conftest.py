"""Processes that tests start begin quickly."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Where the system can, a process that a test starts is forked from one that has imported
    PyTorch: each new Python would import it, which takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        yield
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stage12_distributed.tensor.group"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method=None: context)
        yield
