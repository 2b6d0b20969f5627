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
CHOSEN = {"test_kernels.py": "shape or rounded", "test_cache.py": "kernels or every_shape"}


@pytest.mark.parametrize("file", CHOSEN)
def test_no_kernel_reads_or_writes_outside_of_its_memory(file, environment):
    arguments = FAST, Path(__file__).with_name(file), "-m", "not slow", "-k", CHOSEN[file]
    done = python("-c", PROGRAM, KERNELS, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
