"""The contract of engines with keys and values in int8: preemption, swaps, forks, aborts, prefix
hits and chunked prefill, in the readable cache and in that of the kernels. GPT-2, and a Llama.

They are compared with the naive engine, which keeps nothing: its attention rounds the keys and
values of the whole sequence in each pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from shared.testing import wide_norm
from stage01_forward import engine as naive
from stage01_forward.attention import Recompute
from stage04_continuous.tests import contract, oracle
from stage04_continuous.tests.lives import live
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import engine_of
from stage08_llama.model import RMSNorm
from stage08_llama.tests.test_contract import GROUPED
from stage09_kernels import library
from stage09_kernels.engine import make
from stage09_kernels.tests import test_contract as kernels
from stage10_quantization.cache import Int8Cache, Int8KernelCache

from .rounded import Rounded

INT8: dict[str, Any] = {"dtype": torch.int8}
KERNELS = kernels.KERNELS | INT8 | {"make_cache": partial(Int8KernelCache, real=torch.float64)}
compiled = pytest.mark.skipif(not library.compilers(), reason="no C compiler (cc, gcc, clang)")


# The caches' own tests have every shape.
OTHERS = [pytest.param("gpt2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", autouse=True, params=["grouped", *OTHERS])
def shape(request):
    """Its answers are those of an oracle that no other test asks."""
    config = oracle.CONFIG
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "grouped":
            patch.setattr(RMSNorm, "forward", wide_norm)
            config = replace(GROUPED, layer_norm_epsilon=4e-5)
        rounding = cache(oracle.Oracle)
        patch.setattr(naive, "Recompute", lambda: Rounded(Recompute()))
        patch.setattr(oracle, "oracle_of", rounding)
        patch.setattr(contract, "oracle_of", rounding)
        with oracle.shape(config):
            yield config


class TestInt8(contract.Again, paged.TestPaged):
    @staticmethod
    def engine(*args: Any, **options: Any) -> Any:
        return engine_of(*args, **(INT8 | options))


@compiled
class TestInt8Kernels(kernels.TestKernels):
    @staticmethod
    def engine(*args: Any, **options: Any) -> Any:
        real = options["model"].dtype if "model" in options else torch.float64
        make_cache = partial(Int8KernelCache, real=real)
        return engine_of(*args, **(KERNELS | {"make_cache": make_cache} | options))


class Int8Life(paged.PagedLife):
    def make(self, sequences, token_budget, **options):
        return super().make(sequences, token_budget, **INT8, **options)


class KernelLife(paged.PagedLife):
    def make(self, sequences, token_budget, **options):
        return super().make(sequences, token_budget, **KERNELS, **options)


@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_lives_of_fifty_calls(examples):
    live(Int8Life, examples)


@compiled
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_lives_with_kernels(examples):
    """Swaps, copies, hits and evictions, watched by the sanitizer."""
    seen = live(KernelLife, examples)
    assert all(seen[event] for event in ("copies", "evicted", "hit_tokens", "swapped_in"))


@compiled
def test_the_dtype_of_the_cache_selects_it():
    """In the engines of stages 05 and 09, by the option that selects bfloat16, and with blocks for
    so many bytes."""
    engine: Any = make(oracle.the_model(), 2, insist=True, **INT8)
    assert type(engine.runner.cache) is Int8KernelCache
    assert engine.runner.cache.real == torch.float64
    slow: Any = engine_of(**INT8)
    assert type(slow.runner.cache) is Int8Cache


def test_a_block_of_free_memory_is_poison_for_every_reader():
    """The sanitizer's bytes are NaN scales: what reads a block after its end shows."""
    engine: Any = engine_of(**INT8)
    request = oracle.ask(engine, 9, 4)
    engine.step()
    memory = engine.runner.cache.memory
    memory.poison(engine.scheduler.tables[request].blocks)
    oracle.finish(engine)
    assert request.output.finish_reason == "error"
