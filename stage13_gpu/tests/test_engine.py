"""The whole engine on the kernels: the tokens of stage 01, in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

from functools import cache
from typing import Any

import torch

from shared import parity
from shared.models import load_model
from shared.testing import random_checkpoint
from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage04_continuous.tests import oracle
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage08_llama.tests.test_contract import GROUPED
from stage09_kernels.backend import NoKernels
from stage13_gpu.cache import GpuCache
from stage13_gpu.launch import DEVICE
from stage13_gpu.runner import GpuRunner

CONFIGS = {"gpt2": oracle.CONFIG, "grouped": GROUPED}
KERNELS: dict[str, Any] = {"make_cache": GpuCache, "make_runner": GpuRunner}


@cache
def model_of(name: str) -> Any:
    checkpoint = random_checkpoint(CONFIGS[name], spread=24)
    return load_model(checkpoint, dtype=torch.float32, device=DEVICE)


def prove(name: str, only: list[str] | None) -> None:
    model = model_of(name)
    options: dict[str, Any] = {"max_sequences": 7, "token_budget": 7}
    engine = make(model, pool=BlockPool(60, 4), sanitize=True, **KERNELS, **options)
    proof = parity.prove(engine, Naive(model), SamplingParams, only)
    assert proof.tokens > 20 and proof.near_ties < 2, proof
    assert any(step.prefill_tokens and step.decode_tokens for step in engine.steps)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_stage_01(name):
    prove(name, ["own limits"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_all_scenarios(name):
    prove(name, None)


def test_a_projection_is_a_view_of_the_joined_weights():
    model = load_model(random_checkpoint(CONFIGS["grouped"], spread=24), dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]
    GpuRunner(model, GpuCache(CONFIGS["grouped"], 4))
    attention = model.layers[0].self_attn
    joined = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == joined
    assert all(map(torch.equal, before, model.parameters()))


def test_another_model_is_refused():
    with pytest.raises(NoKernels, match="do not support a Linear"):
        GpuRunner(torch.nn.Linear(1, 1), GpuCache(CONFIGS["gpt2"], 4))
