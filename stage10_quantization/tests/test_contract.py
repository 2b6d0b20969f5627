"""Engines over quantized layers, and over keys and values in int8: their tokens are those of the
slow engine of the same model, and bits do not depend on neighbours or chunks.

With keys and values in int8 the naive engine is the oracle, whose attention rounds the keys and
values of the whole sequence in each pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shared import testing
from shared.config import Config
from shared.models import load_model
from shared.parity import random_prompt
from shared.testing import random_checkpoint, wide_norm
from stage01_forward import engine as naive
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage04_continuous.tests import contract, oracle
from stage05_paged.tests.engines import engine_of
from stage08_llama.model import RMSNorm
from stage08_llama.tests.test_contract import GROUPED
from stage09_kernels import library
from stage09_kernels.tests import test_contract as kernels
from stage10_quantization.cache import Int8KernelCache, quantize
from stage10_quantization.convert import FORMATS, INT4, Format, Quantize

# Widths that groups of 32 divide, and an epsilon that no other test has.
GPT2 = Config(101, 64, 64, 2, 2, name="wide", layer_norm_epsilon=3e-5)
WIDTHS: Any = {"n_embd": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_inner": 96}
LLAMA = replace(GROUPED, **WIDTHS, layer_norm_epsilon=3e-5)
needs_kernels = pytest.mark.skipif(not library.compiler(), reason="no C compiler")


class Rounded:
    """The attention of a pass over a whole sequence, as a cache in int8 lets it see keys and
    values."""

    def __init__(self) -> None:
        self.whole = Recompute()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, heads, D), k and v (T, H, D) -> (T, heads, D)."""
        real = torch.promote_types(q.dtype, torch.float32)
        pairs = [quantize(x.to(real)) for x in (k, v)]
        k, v = ((codes * scales.to(real)[..., None]).to(q.dtype) for codes, scales in pairs)
        return self.whole.attend(layer, q, k, v)


class Mixed(Quantize):
    """Values have groups of their own, so that a product becomes several."""

    def matrix(self, name: str, plain: Any) -> Any:
        self.format = Format(8, 16) if "v_proj" in name else INT4
        return super().matrix(name, plain)


PAIRS = [  # the layers of both families are the same
    pytest.param(config, Quantize(weights, activations), id=f"{name}-{weights}-{activations}")
    for name, config, activations in (("gpt2", GPT2, "int8"), ("llama", LLAMA, "float"))
    for weights in FORMATS
] + [pytest.param(LLAMA, Mixed("int4"), id="mixed")]


@pytest.mark.parametrize("config, conversion", PAIRS)
def test_every_engine_has_the_tokens_of_the_slow_one(config, conversion, monkeypatch):
    """A released model, its table too, keeps no matrix."""
    monkeypatch.setattr("stage10_quantization.kernels.AT_A_TIME", 1)  # panels
    monkeypatch.setattr(RMSNorm, "forward", wide_norm)  # so that x is rounded alike
    checkpoint = random_checkpoint(config, spread=24)
    checkpoint.conversion = conversion
    model = load_model(checkpoint, dtype=torch.float64)
    slow = naive.Engine(model)
    prompts = [random_prompt(length, config, "quantized") for length in (3, 17, 30)]
    params = SamplingParams(max_tokens=20)
    want = [output.token_ids for output in slow.generate(prompts, params)]
    assert len({*want[0], *want[1], *want[2]}) > 10
    for name, make in testing.engines().items():
        assert [o.token_ids for o in make(model).generate(prompts, params)] == want, name
    if library.compiler() and conversion.activations == "int8":
        released = testing.engines()["stage09_kernels"](model, release=True)
        assert [o.token_ids for o in released.generate(prompts, params)] == want
        assert all(m.matrix.codes.is_meta for m in model.modules() if hasattr(m, "matrix"))


# ---- keys and values in int8: the contract of engines, of stage 05 -------------------------------


@pytest.fixture(scope="module")
def rounding():
    """A Llama, whose answers are those of an oracle that no other test asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "forward", wide_norm)
        oracle_of = cache(oracle.Oracle)
        patch.setattr(naive, "Recompute", Rounded)
        patch.setattr(oracle, "oracle_of", oracle_of)
        patch.setattr(contract, "oracle_of", oracle_of)
        with oracle.shape(replace(GROUPED, layer_norm_epsilon=4e-5)):
            yield


@needs_kernels
@pytest.mark.usefixtures("rounding")
class TestInt8Kernels(kernels.TestKernels):
    """Preemption, swaps, forks, aborts, prefix hits and chunked prefill."""

    @staticmethod
    def engine(*args: Any, **options: Any) -> Any:
        real = options["model"].dtype if "model" in options else torch.float64
        ours = {"dtype": torch.int8, "make_cache": partial(Int8KernelCache, real=real)}
        return engine_of(*args, **(kernels.KERNELS | ours | options))
