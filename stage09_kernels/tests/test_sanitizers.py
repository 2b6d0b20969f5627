"""The C files under the address and undefined-behaviour sanitizers, where the compiler has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.testing import python
from stage09_kernels import library
from stage09_kernels.cache import FAST, FOLDER

pytestmark = pytest.mark.slow
# Other tests, in a process that has the sanitizer's library before all others: FAST of a module is
# another file. Checked copies of a function for each of its constants take minutes to compile.
PROGRAM = """
import importlib, pathlib, pytest, sys
from stage09_kernels import library
importlib.import_module(sys.argv[1]).FAST = pathlib.Path(sys.argv[2])
library.FLAGS += ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
library.FLAGS += ("-Dalways_inline=noinline",)
sys.exit(pytest.main(["-n", "0", "-s", "-x", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""
CACHE = "stage09_kernels.cache"
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process for code with the sanitizers."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux loads a sanitizer before a program that has none")
    compiler = library.compiler()
    query = [*compiler, "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(sanitizer):
        pytest.skip(f"{compiler[0]} has no address sanitizer to load first (libasan.so)")
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    return os.environ | cache | {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_kernels.py", "no_token"),
        ("test_naive.py", "attention_of_every_shape or linear or row_of_a_product"),
        ("test_contract.py", "all_scenarios"),
    ],
)
def test_no_kernel_reads_or_writes_outside_of_its_memory(file, chosen, environment):
    done = python("-c", PROGRAM, CACHE, FAST, TESTS / file, "-k", chosen, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_read_behind_the_weights_is_reported(environment, tmp_path):
    shutil.copytree(FOLDER, tmp_path / "copy", ignore=lambda *_: ["tests"])
    copy = tmp_path / "copy" / "fast" / "linear.c"
    copy.write_text(copy.read_text().replace("k < steps; k++", "k <= steps; k++"))
    arguments = copy.with_name(FAST.name), TESTS / "test_naive.py", "-k", "row_of_a_product"
    done = python("-c", PROGRAM, CACHE, *arguments, env=environment)
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stdout + done.stderr
    assert "linear.c" in done.stderr
