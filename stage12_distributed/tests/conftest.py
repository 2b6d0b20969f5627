"""Tests may be coroutines, and their processes begin quickly."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
from collections.abc import Iterator

import pytest


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it has an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(asyncio.wait_for(test(**{n: pyfuncitem.funcargs[n] for n in names}), 60))
    return True


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
