"""Sliding windows in blocks: what no query sees any more is given back, while addresses hold.

That forks behind a window change no answer is shown by the lives in test_contract.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from shared.config import ALL
from stage01_forward.attention import Recompute
from stage02_kv_cache.cache import KVCache
from stage03_batching.cache import PaddedCache
from stage04_continuous.tests import oracle
from stage04_continuous.tests.oracle import ask, assert_answered, finish
from stage05_paged.blockmap import blockmap
from stage05_paged.blocks import NOWHERE
from stage05_paged.sanitizer import SanitizerError
from stage05_paged.tests.engines import assert_idle, engine_of, evict, preempt

from .test_contract import GROUPED

WINDOW, SIZE = 9, 4
MOST = (WINDOW - 2) // SIZE + 2  # blocks that WINDOW tokens in a row may touch


@pytest.fixture(autouse=True)
def windowed():
    with oracle.shape(replace(GROUPED, windows=(WINDOW, WINDOW - 4))):
        yield


def test_memory_of_a_long_answer_is_that_of_its_window():
    """With a pool for hardly more than one context, neighbours use what is given back."""
    engine = engine_of(blocks=18, size=SIZE, max_chunk=5)
    requests = [ask(engine, 20, 44), ask(engine, 3, 60)]
    while requests[0].output.token_ids == []:
        engine.step()
    while engine.requests:
        engine.step()
        held = [len(table.held) for table in engine.scheduler.tables.values()]
        assert max(held, default=0) <= MOST and engine.steps[-1].owned_blocks <= 2 * MOST
        assert sum(state >= 0 for state in blockmap(engine.scheduler)) == sum(held)
    assert_answered(*requests)
    assert_idle(engine)


@torch.inference_mode()
@pytest.mark.parametrize("windows", [(WINDOW, 5), (ALL, 6)], ids=str)
@pytest.mark.parametrize("cuts", [[30, 1, 1], [4, 1, 11, 8, 1, 7]], ids=str)
def test_passes_of_any_length_see_what_one_pass_sees(windows, cuts):
    """Stage 02, and stage 03 with a row of padding, whose own engines run prompts whole."""
    config = replace(GROUPED, windows=windows)
    with oracle.shape(config):
        model, ids = oracle.the_model(), torch.tensor(oracle.prompt_of(32))
    want = model(ids, torch.arange(32), Recompute(config).attend)
    one = KVCache(config, dtype=torch.float64)
    rows = PaddedCache(config, [32, 20], 32, torch.float64)
    padded = torch.stack([ids, torch.cat([ids[:12], ids[:20]])])  # any id may be padding
    for start, end in itertools.pairwise([0, *itertools.accumulate(cuts)]):
        single, several = one.extend(end - start), rows.extend(end - start)
        got = model(ids[start:end], single.positions, single.attend)
        torch.testing.assert_close(got, want[start:end], rtol=0, atol=1e-9)
        got = model(padded[:, start:end], several.positions, several.attend)
        torch.testing.assert_close(got[0], want[start:end], rtol=0, atol=1e-9)
        real = max(0, start - 12), max(0, end - 12)
        torch.testing.assert_close(got[1, max(0, 12 - start) :], want[slice(*real)])


def test_mixed_layers_give_nothing_back():
    with oracle.shape(replace(GROUPED, windows=(ALL, WINDOW))):
        engine = engine_of(size=SIZE, max_chunk=5)
        request = ask(engine, 20, 30)
        while len(request.output.token_ids) < 29:
            engine.step()
        table = engine.scheduler.tables[request]
        assert NOWHERE not in table.blocks and len(table.blocks) == 12
        finish(engine)
        assert_answered(request)


def test_a_hit_shares_the_window_alone_and_needs_the_chain_to_be_found():
    engine = engine_of(size=SIZE)
    first = ask(engine, 30, 12)
    finish(engine)
    for hit, held in ((28, MOST), (16, 6)):
        again = ask(engine, 30, 12)
        before = engine.scheduler.counts.hit_tokens
        engine.step()
        assert engine.scheduler.counts.hit_tokens - before == hit
        assert engine.steps[-1].sequences[0].blocks == held
        finish(engine)
        assert_answered(first, again)
        evict(engine, 1)  # the fifth block, behind the window of the sixth
    assert_idle(engine)


@pytest.mark.parametrize("swap_blocks", [0, 8])
def test_preemption_behind_the_window(swap_blocks):
    """Only the blocks that are held are swapped, and they come back to their addresses."""
    engine = engine_of(size=SIZE, swap_blocks=swap_blocks, prefix_caching=False)
    request = ask(engine, 20, 30)
    for _ in range(12):
        engine.step()
    preempt(engine, request)
    assert len(engine.scheduler.swapped.get(request, [])) == (MOST if swap_blocks else 0)
    engine.step()
    assert (engine.steps[-1].prefill_tokens == 0) == bool(swap_blocks)
    finish(engine)
    assert_answered(request)
    assert_idle(engine)


def test_the_sanitizer_names_a_block_that_is_given_back_too_soon():
    engine = engine_of(size=SIZE)
    request = ask(engine, 20, 30)
    engine.step()
    engine.scheduler.tables[request].pass_by(4)
    with pytest.raises(SanitizerError, match="in its window was given back"):
        engine.step()
