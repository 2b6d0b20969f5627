"""Captured steps, with a stand-in for CUDA's graphs: it records the operators and launches of a
pass, and runs them again over the same memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stage01_forward.engine import Engine as Naive
from stage01_forward.params import SamplingParams
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage13_gpu import cache as module
from stage13_gpu import launch as launching
from stage13_gpu.graphs import Graphs
from stage13_gpu.launch import INTERPRETED, run
from stage13_gpu.runner import GpuRunner
from stage13_gpu.tests.test_engine import CONFIGS, KERNELS, model_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU captures graphs of its own")


class Tape(TorchDispatchMode):
    """Operators and launches in order. An operator that asks for a number cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadname == "item" or "_local_scalar_dense" in str(func):
            raise RuntimeError("a captured pass asks for a number")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def launch(self, kernel, grid, *arguments, **constants):
        self.calls.append((None, (kernel, grid, *arguments), constants, None))
        with torch.utils._python_dispatch._disable_current_modes():
            run(kernel, grid, *arguments, **constants)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            if func is None:
                run(*args, **kwargs)
            elif "empty" in func.__name__:
                if out.is_floating_point():
                    out.fill_(torch.nan)  # whatever was there before
            else:
                again = func(*args, **kwargs)
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def tensors(out):
    listed = out if isinstance(out, (list, tuple)) else [out]
    return [x for x in listed if isinstance(x, torch.Tensor)]


def capture(work):
    tape = Tape()
    with patch.object(launching, "run", tape.launch), tape:
        results = work()
    return tape.replay, results


def graphed(engine):
    runner = engine.runner
    runner.graphs = Graphs(runner.cache, runner.compute, capture)
    return runner.graphs


@pytest.mark.parametrize("name", ["gpt2", "grouped"])
def test_replayed_steps_give_the_tokens_of_stage_01(name, monkeypatch):
    """Sequences come and go, so that one, two, three and four rows are replayed, by the graphs of
    1, 2 and 4; nothing moves, and no pass is computed but the captured ones and prompts."""
    monkeypatch.setattr(module, "PIECE", 16)
    monkeypatch.setattr(module, "TILE", 32)
    model = model_of(name)
    engine = make(model, pool=BlockPool(60, 4), max_sequences=8, **KERNELS)
    graphs, computed = graphed(engine), []
    runner: Any = engine.runner
    plain = runner.compute

    def watch(attention):
        computed.append(attention)
        return plain(attention)

    monkeypatch.setattr(runner, "compute", watch)
    prompts = [[5, 9, 2, 6, 5, 3, 5, 8, 9], [7, 7], [3, 1, 4, 1, 5], [8]]
    sampling = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (10, 3, 5, 4)]
    outputs = engine.generate(prompts, sampling)
    wanted = Naive(model).generate(prompts, sampling)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert {shape.tokens for shape in graphs.kept} == {1, 2, 4}
    assert {shape.pieces for shape in graphs.kept} == {1, 2} and len(computed) == 1  # the prompts
    shapes = list(graphs.kept)
    again = engine.generate(prompts, sampling)
    assert [o.token_ids for o in again] == [o.token_ids for o in wanted]
    assert list(graphs.kept) == shapes


def test_a_replay_writes_to_the_slots_of_its_rows_alone():
    """Rows that fill up a graph write nowhere, and a capture writes nothing."""
    runner = GpuRunner(model_of("gpt2"), module.GpuCache(CONFIGS["gpt2"], 9, 4))
    graphs = Graphs(runner.cache, runner.compute, capture)
    runner.cache.kv.fill_(7.0)
    shares = [([4], 0, 1), ([8], 0, 1), ([2], 0, 1)]
    shape = graphs.shape(shares, [0, 1, 2])
    assert shape is not None and shape.tokens == 4
    with torch.inference_mode():
        logits = graphs.run(shape, [1, 2, 3], shares)
    assert len(logits) == 3 and logits.isfinite().all()
    changed = (runner.cache.kv[0] != 7.0).any(-1)  # (2, H, blocks, block)
    assert changed.nonzero()[:, 2:].unique(dim=0).tolist() == [[2, 0], [4, 0], [8, 0]]


def test_fields_of_a_pass_begin_at_16_bytes():
    shape = module.Shape(3, 1, 3, 0, 3, 5, 1)
    fields = shape.split(torch.zeros(shape.numbers, dtype=torch.int32))
    assert not any(field.storage_offset() % 4 for field in fields.values())


def test_what_fits_no_graph_runs_without():
    cache = module.GpuCache(CONFIGS["gpt2"], 300, 4)
    graphs = Graphs(cache, lambda attention: attention.parts, capture)
    one = ([0, 1], 3, 1)
    assert graphs.shape([one, ([2], 0, 2)], [0, 2]) is None  # a prompt is among them
    assert graphs.shape([one] * 3, [0, 2]) is None  # not all logits are wanted
    assert graphs.shape([one] * 257, range(257)) is None
    shapes = {graphs.shape([one] * n, range(n)) for n in range(1, 257)}
    assert sorted(shape.tokens for shape in shapes if shape) == [2**n for n in range(9)]
