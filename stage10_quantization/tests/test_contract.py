"""Engines over quantized layers: their tokens are those of the slow engine of the same model, and
bits do not depend on neighbours or chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import testing
from shared.config import Config
from shared.models import load_model
from shared.parity import prove, random_prompt
from shared.testing import random_checkpoint, wide_norm
from stage01_forward import engine as naive
from stage01_forward.attention import Recompute
from stage04_continuous.tests import oracle
from stage04_continuous.tests.contract import Again
from stage05_paged.blocks import BlockPool
from stage05_paged.tests import test_contract as paged
from stage08_llama.model import RMSNorm
from stage08_llama.tests.test_contract import GROUPED
from stage09_kernels import library
from stage09_kernels.cache import KernelCache
from stage09_kernels.engine import make as make_kernels
from stage09_kernels.runner import KernelRunner
from stage10_quantization.convert import FORMATS, Quantize
from stage10_quantization.layers import QuantizedLinear

from .rounded import Rounded

# Widths that groups of 32 divide, and an epsilon that no other test has.
GPT2 = Config(101, 64, 64, 2, 2, name="wide", layer_norm_epsilon=3e-5)
WIDTHS: Any = {"n_embd": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_inner": 96}
LLAMA = replace(GROUPED, **WIDTHS, layer_norm_epsilon=3e-5)
needs_kernels = pytest.mark.skipif(not library.compilers(), reason="no C compiler")


def model_of(config: Any, conversion: tuple[str, str], dtype: torch.dtype) -> Any:
    checkpoint = random_checkpoint(config, spread=24)
    checkpoint.conversion = Quantize(*conversion)
    return load_model(checkpoint, dtype=dtype)


PAIRS = [  # all by -m slow: the layers of both families are the same
    pytest.param(config, (w, a), id=f"{name}-{w}-{a}", marks=[pytest.mark.slow] * (a != usual))
    for name, config, usual in (("gpt2", GPT2, "int8"), ("llama", LLAMA, "float"))
    for w in FORMATS
    for a in ("int8", "float")
]


@pytest.mark.parametrize("config, conversion", PAIRS)
def test_every_engine_has_the_tokens_of_the_slow_one(config, conversion):
    model = model_of(config, conversion, torch.float64)
    slow = testing.oracle(model)
    prompts = [random_prompt(length, config, "quantized") for length in (3, 17, 30)]
    params = testing.sampling_params()(max_tokens=20)
    want = [output.token_ids for output in slow.generate(prompts, params)]
    assert len({*want[0], *want[1], *want[2]}) > 10
    for name, make in testing.engines().items():
        assert [o.token_ids for o in make(model).generate(prompts, params)] == want, name


class TestPaged(Again, paged.TestPaged):
    """The whole contract of stage 05, over int4 weights and int8 activations."""

    @pytest.fixture(autouse=True)
    def quantized(self):
        def checkpoint(config: Any, **options: Any) -> Any:
            made = random_checkpoint(config, **options)
            made.conversion = Quantize("int4")
            return made

        with pytest.MonkeyPatch.context() as patch, oracle.shape(GPT2):
            patch.setattr(oracle, "random_checkpoint", checkpoint)
            assert isinstance(oracle.the_model().h[1].mlp.c_fc, QuantizedLinear)
            yield

    def test_all_scenarios(self):
        """In float64 alone: the last bit of a float32 may change an activation's code."""
        super().test_all_scenarios(torch.float64)

    @needs_kernels
    def test_all_scenarios_on_the_kernels(self):
        model: Any = oracle.the_model()
        engine: Any = make_kernels(model, insist=True)
        parity = prove(engine, oracle.oracle_of(model), testing.sampling_params())
        assert parity.tokens > 100 and not parity.near_ties


@needs_kernels
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_quantized_weights_with_keys_and_values_in_int8(config, weights, monkeypatch):
    """Chunks, swaps and prefix hits on the kernels: the tokens of the naive engine, whose attention
    rounds keys and values as the cache does."""
    monkeypatch.setattr(RMSNorm, "forward", wide_norm)
    monkeypatch.setattr(naive, "Recompute", lambda: Rounded(Recompute()))
    model = model_of(config, (weights, "int8"), torch.float64)
    prompts = [random_prompt(length, config, "both") for length in (30, 17, 30, 9)]
    params = testing.sampling_params()(max_tokens=14)
    want = [o.token_ids for o in naive.Engine(model).generate(prompts, params)]
    engine: Any = make_kernels(
        model,
        insist=True,
        dtype=torch.int8,
        pool=BlockPool(20, 4),
        swap_pool=BlockPool(40, 4),
        preemption="swap",
        token_budget=12,
        max_sequences=4,
    )
    assert type(engine.runner.cache).__name__ == "Int8KernelCache"
    for _ in range(2):
        assert [o.token_ids for o in engine.generate(prompts, params)] == want
    counts = engine.scheduler.counts
    assert counts.swapped_in and counts.hit_tokens


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("weights", FORMATS)
def test_bits_do_not_depend_on_neighbours_or_chunks(config, weights, dtype):
    model = model_of(config, (weights, "int8"), dtype)
    ids = random_prompt(54, config, "bits")
    tables = [[3, 0], [5], [2, 7]]
    lengths = [21, 3, 30]

    def runner() -> Any:
        return KernelRunner(model, KernelCache(config, 8, 16, dtype=dtype))

    shares = [(table, 0, length) for table, length in zip(tables, lengths, strict=True)]
    together = runner().run(ids, shares, list(range(54))).clone()
    alone, chunks, start = [], [], 0
    for table, length in zip(tables, lengths, strict=True):
        some = ids[start : start + length]
        alone.append(runner().run(some, [(table, 0, length)], list(range(length))).clone())
        piecewise = runner()
        for first in range(0, length, 7):
            count = min(7, length - first)
            share = [(table, first, count)]
            logits = piecewise.run(some[first : first + count], share, list(range(count)))
            chunks.append(logits.clone())
        start += length
    assert together.isfinite().all()
    assert torch.equal(torch.cat(alone), together) and torch.equal(torch.cat(chunks), together)
