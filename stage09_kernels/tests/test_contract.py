"""The contract of engines with the kernels: GPT-2, and a Llama with grouped heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.models import load_model
from shared.testing import random_checkpoint, wide_norm
from shared.tests.int8 import Int8
from stage04_continuous.tests import oracle
from stage04_continuous.tests.lives import live
from stage05_paged.tests import test_contract as paged
from stage05_paged.tests.engines import engine_of
from stage08_llama.model import RMSNorm
from stage08_llama.tests.test_contract import GROUPED
from stage09_kernels.backend import NoKernels
from stage09_kernels.cache import KernelCache
from stage09_kernels.runner import KernelRunner
from stage09_kernels.sample import sample_tokens

KERNELS: dict[str, Any] = {
    "make_cache": KernelCache,
    "make_runner": KernelRunner,
    "sample_tokens": sample_tokens,
}


@pytest.fixture(scope="module", autouse=True, params=["gpt2", "grouped"])
def shape(request):
    """The Llama has another epsilon here, so that no other test gets answers of `wide_norm`."""
    config = oracle.CONFIG
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "grouped":
            patch.setattr(RMSNorm, "forward", wide_norm)
            config = replace(GROUPED, layer_norm_epsilon=2e-5)
        with oracle.shape(config):
            yield config


class TestKernels(paged.TestPaged):
    every = 3

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_all_scenarios(self, dtype):
        super().test_all_scenarios(dtype)

    @staticmethod
    def engine(*args: Any, **options: Any) -> Any:
        return engine_of(*args, **(KERNELS | options))

    @pytest.fixture
    def passes(self, monkeypatch):
        """Those of a runner that calls no module of `the_model()`."""
        seen, run = [], KernelRunner.run

        def watch(runner, ids, shares, rows):
            if ids:
                seen.append((len(ids), len(rows)))
            return run(runner, ids, shares, rows)

        monkeypatch.setattr(KernelRunner, "run", watch)
        return lambda: seen


class KernelLife(paged.PagedLife):
    def make(self, sequences, token_budget, **options):
        return super().make(sequences, token_budget, **KERNELS, **options)


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_lives_of_fifty_calls(shape, examples):
    live(KernelLife, examples)


def test_a_format_without_a_kernel_is_refused(shape):
    checkpoint = random_checkpoint(shape)
    checkpoint.conversion = Int8("c_attn", "k_proj")
    model = load_model(checkpoint)
    with pytest.raises(NoKernels, match="no kernel for the product of Int8Linear"):
        KernelRunner(model, KernelCache(shape, 8))
