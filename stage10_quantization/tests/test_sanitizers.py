"""This stage's C files under the sanitizers, as stage 09's are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.testing import python
from stage09_kernels.tests.test_sanitizers import PROGRAM, environment
from stage10_quantization.kernels import FAST

__all__ = ["environment"]
pytestmark = pytest.mark.slow
KERNELS = "stage10_quantization.kernels"
TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_kernels.py", "shape or rounded"),
        ("test_cache.py", "kernels or attention_of_every_shape"),
    ],
)
def test_no_kernel_reads_or_writes_outside_of_its_memory(file, chosen, environment):
    arguments = FAST, TESTS / file, "-m", "not slow", "-k", chosen
    done = python("-c", PROGRAM, KERNELS, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
