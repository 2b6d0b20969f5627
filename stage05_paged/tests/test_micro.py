"""The small steps that every token pays for, timed:
`python -m pytest -m slow --benchmark-enable stage05_paged/tests/test_micro.py`.

To compare two states of the code on one machine. All steps are those of a decode pass: ROWS
sequences with CONTEXT tokens each, unchanged by it.
"""

from __future__ import annotations

import pytest
import torch

from shared import checkpoint, models
from shared.checkpoint import PRESETS
from shared.linear import optimize
from stage01_forward.generation import Row
from stage01_forward.params import SamplingParams
from stage04_continuous.fast_sampling import sample
from stage04_continuous.tests.traces import Trace
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedCache
from stage05_paged.scheduler import Scheduler

pytestmark = pytest.mark.slow

CONFIG = PRESETS["stories"]
ROWS, CONTEXT, BLOCK = 16, 256, 16
BLOCKS = ROWS * (CONTEXT // BLOCK + 1)


@torch.inference_mode()
def test_forward_pass(benchmark):
    """Blocks are apart, as in a pool that has been in use."""
    cache = PagedCache(CONFIG, BLOCKS, BLOCK)
    cache.kv.normal_()
    shares = [(list(range(row, BLOCKS, ROWS)), CONTEXT, 1) for row in range(ROWS)]
    attention = cache.extend(shares)
    model = models.load_model(checkpoint.load("stories"))
    optimize(model)
    ids, positions = torch.arange(ROWS), attention.positions
    logits = benchmark(lambda: model.logits(model(ids, positions, attention.attend)))
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=str)
def test_sample(benchmark, options):
    params = SamplingParams(max_tokens=9, seed=0, **options)
    logits, rows = torch.randn(ROWS, CONFIG.vocab_size), [Row(params, [1] * CONTEXT)] * ROWS
    best = logits.argmax(-1).tolist()
    tokens, _ = benchmark(sample, logits, rows)  # the same logits every time, overwritten
    assert len(tokens) == ROWS and (options or tokens == best)


def test_schedule(benchmark):
    """All rows have computed their prompts, and a token of the answer is to come."""
    trace = Trace(Scheduler(BlockPool(BLOCKS, BLOCK), ROWS, token_budget=ROWS * CONTEXT))
    for row in range(ROWS):
        trace.ask(chr(row), CONTEXT)
    trace.step()
    plan = benchmark(trace.scheduler.schedule)
    assert [(work.start, work.count, work.rows) for work in plan.work] == [(CONTEXT, 1, 1)] * ROWS
