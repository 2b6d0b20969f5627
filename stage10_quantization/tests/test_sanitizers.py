"""This stage's C files under the sanitizers, as stage 09's are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.testing import python
from stage09_kernels import cache
from stage09_kernels.tests.test_sanitizers import PROGRAM, environment
from stage10_quantization.kernels import FAST, FOLDER

__all__ = ["environment"]
pytestmark = pytest.mark.slow
KERNELS = "stage10_quantization.kernels"
TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_kernels.py", "shape or follows or rounded"),
        ("test_cache.py", "kernels or attention_of_every_shape or outside"),
    ],
)
def test_no_kernel_reads_or_writes_outside_of_its_memory(file, chosen, environment):
    arguments = FAST, TESTS / file, "-m", "not slow", "-k", chosen
    done = python("-c", PROGRAM, KERNELS, *arguments, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_read_behind_a_row_is_reported(environment, tmp_path):
    for folder in (cache.FOLDER, FOLDER):
        shutil.copytree(folder, tmp_path / folder.name, ignore=lambda *_: ["tests"])
    copy = tmp_path / FOLDER.name / "fast" / FAST.name
    place = "(const real *)l->x + row * l->x_stride + k"
    whole, text = f"*(const floats *)({place})", copy.read_text()
    copy.write_text(text.replace(f"load_partial({place}, left, 0)", whole))
    arguments = copy, TESTS / "test_kernels.py", "-m", "not slow", "-k", "shape"
    done = python("-c", PROGRAM, KERNELS, *arguments, env=environment)
    assert done.returncode and "AddressSanitizer" in done.stderr, done.stdout + done.stderr
    assert "stage10_quantization/fast/linear.c" in done.stderr
