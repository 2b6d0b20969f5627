"""Without a C compiler there are no kernels to test: shared/tests/test_parity.py shows that the
stage answers all the same."""

from collections.abc import Iterator

import pytest
import torch

from stage09_kernels import library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not library.compiler():
        for item in items:
            if "stage09_kernels" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no C compiler (cc, gcc, clang)"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many threads after a test as before it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
