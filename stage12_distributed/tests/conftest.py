"""Tests may be coroutines, as in stage 06, and their processes begin quickly."""

import multiprocessing
from collections.abc import Iterator

import pytest

from stage06_serving.tests.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Where the system can, a process that a test starts is forked from one that has imported
    PyTorch: each new Python would import it, which takes seconds. What the server starts is not."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        yield
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stage12_distributed.tensor.group"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method=None: context)
        yield
