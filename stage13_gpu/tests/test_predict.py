"""What is known without a GPU: counted kernels and bytes, and the compiler's report."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

import json
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import torch

from shared import catalog, kit
from shared.paths import ROOT
from stage13_gpu import benchmark, predict
from stage13_gpu import launch as launching
from stage13_gpu.cache import PIECE, GpuAttention, GpuCache
from stage13_gpu.counting import counting
from stage13_gpu.launch import INTERPRETED
from stage13_gpu.predict import GPUS, launches, seconds
from stage13_gpu.runner import GpuRunner
from stage13_gpu.tests.test_engine import CONFIGS, model_of
from stage13_gpu.tests.test_graphs import Tape
from stage13_gpu.tests.tools import caches, inputs

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counted by the interpreter")


def kernels(tape):
    """Launches, and operators that compute or copy: views and new memory start no kernel."""
    count = 0
    for func, _, _, _ in tape.calls:
        views = func is not None and any(r.alias_info for r in func._schema.returns)
        count += func is None or not (views or "empty" in func.__name__ or "arange" in str(func))
    return count


@pytest.mark.parametrize("context", [9, 300])
@pytest.mark.parametrize("name", ["gpt2", "grouped"])
def test_as_many_kernels_are_started_as_predicted(name, context):
    config = CONFIGS[name]
    runner, tape = GpuRunner(model_of(name), GpuCache(config, 100, 4)), Tape()
    shares = [(list(range(80)), min(context, 63), 1)]
    shape = replace(runner.cache.shape(shares, 1), pieces=2 if context > PIECE else 1)
    numbers = runner.cache.numbers(shape, shares, [1], [0])
    with patch.object(launching, "run", tape.launch), tape, torch.inference_mode():
        runner.compute(GpuAttention(runner.cache, shape, numbers))
    assert kernels(tape) == launches(config, context)


def test_a_decode_step_loads_each_key_once_for_its_group():
    _, gpu = caches(4, 2, 32, 16, torch.float32)
    tensors = inputs(1, 4, 2, 32, torch.float32)
    gpu.kv.zero_()
    attention = gpu.extend([(list(range(20)), 299, 1)])
    with counting() as counted:
        attention.attend(0, *tensors)
    attend, merge = counted["attend"], counted["merge"]
    keys = 300 * 2 * 32 * 4
    queries, tables = 2 * 4 * 32 * 4, 2 * 300 * 4 + 4 * 16  # of both pieces; and four items
    assert attend.loaded == 2 * keys + queries + tables
    assert (attend.launches, attend.programs, merge.programs) == (1, 4, 4)
    parts = 2 * 4 * (32 + 2) * 4
    assert attend.stored == parts and merge.stored == 4 * 32 * 4
    assert attend.operations == 2 * 5 * 2 * 2 * 16 * 64 * 32  # 5 tiles a head, padded to 16 rows
    assert sum(map(len, attend.addresses)) * 4 == attend.loaded


def test_a_step_takes_the_longest_of_bytes_operations_and_launches():
    config = catalog.presets()["gpt2"]
    h100 = seconds(config, torch.bfloat16, 1, 1000, GPUS["H100 SXM"])
    assert h100["bytes"] == pytest.approx(0.284e9 / 3350e9, rel=0.02)
    assert h100["eager"] == launches(config, 1000) * predict.LAUNCH > h100["graph"]
    t4 = seconds(config, torch.float32, 1, 1000, GPUS["T4"])
    assert t4["eager"] == t4["bytes"] == t4["graph"] - predict.REPLAY


@pytest.mark.parametrize(("device", "shown"), [("H100 80GB HBM3", "200"), ("L40S", "not measured")])
def test_what_a_gpu_has_measured_is_shown_beside_its_prediction(device, shown):
    """And not beside another's, whose name begins alike."""
    step = {"model": "gpt2", "rows": 1, "seconds": {benchmark.GRAPH: [1e-4, 3e-4, 2e-4]}}
    content = {"machine": {"device": f"NVIDIA {device}"}, "results": {"steps": [step]}}
    lines = benchmark.predicted(kit.Results(content), "gpt2")
    one_row, *others = (line["measured, graph"] for line in lines)
    assert one_row == shown and set(others) == {"not measured"}


def compiled(code):
    """What registers.py reports by `code`, in a process that has loaded no kernels."""
    code = (
        f"import json; from stage13_gpu.registers import *; [print(json.dumps(x)) for x in {code}]"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_no_kernel_spills():
    """Compiled for A100, L4 and H100, at the shapes of three models: minutes the first time."""
    lines = compiled("compiled()")
    assert {line["kernel"] for line in lines} == {
        "store", "attend", "merge", "add_norm", "silu_mul", "quantize", "multiply",
    }  # fmt: skip
    assert not [line for line in lines if line["spilled"]]
    assert max(line["shared"] for line in lines) <= 99 * 1024  # an L4's


def test_kernels_compile_without_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    lines = compiled("reports('tiny', Config(64, 64, 64, 1, 4), torch.float16)")
    assert {line["kernel"] for line in lines} >= {"attend", "merge", "multiply"}
    assert all(not line["spilled"] and line["registers"] > 8 for line in lines)
