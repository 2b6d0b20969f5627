"""The map shows the tables: every block, after every step, and in the picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from shared import charts
from stage01_forward.params import SamplingParams
from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage05_paged.blockmap import CACHED, FREE, SHARED, blockmap, mark, picture
from stage05_paged.fork import add_samples
from stage05_paged.tests.engines import engine_of

BLOCKS = 24


def run(model: Any) -> Iterator[Engine]:
    """The engine after each step: a shared beginning, samples, a short pool, and an abort."""
    engine = engine_of(6, 24, model, BLOCKS, 4, swap_blocks=BLOCKS, eos_ids=())
    for n in range(8):
        params = SamplingParams(max_tokens=5 + 7 * n % 30)
        engine.add(Request([*range(1, 10), n], params, priority=n % 2))
    samples = [SamplingParams(max_tokens=12, temperature=1, seed=n) for n in range(3)]
    add_samples(engine, [50, 51, 52, 53, 54], samples)
    while engine.requests:
        engine.step()
        if len(engine.steps) == 9:
            engine.abort(engine.scheduler.running[-1].id)
        yield engine


@pytest.fixture(scope="module")
def frames(tiny_model):
    return [blockmap(engine.scheduler) for engine in run(tiny_model)]


def test_every_block_is_in_the_state_of_tables_and_pool(tiny_model):
    seen: set[int] = set()
    owners: dict[int, Request] = {}
    for engine in run(tiny_model):
        scheduler, states = engine.scheduler, blockmap(engine.scheduler)
        assert len(states) == BLOCKS
        for block, state in enumerate(states):
            holders = [owner for owner, table in scheduler.tables.items() if block in table.blocks]
            if state >= 0:  # one number, one request, from beginning to end
                assert [owners.setdefault(state, holders[0])] == holders
            else:
                pool = scheduler.pool
                is_state = len(holders) > 1, block in pool.cached, block in pool.free
                assert is_state == (state == SHARED, state == CACHED, state == FREE)
            seen.add(min(state, 0))
    assert seen == {0, FREE, CACHED, SHARED} and engine.scheduler.counts.preemptions > 0
    assert len(owners) == len(set(owners.values()))
    assert "abort" in {request.output.finish_reason for request in owners.values()}


def test_the_picture_shows_every_state_of_every_step(frames):
    figure = picture(frames, "Blocks")
    axes, grid = figure.axes[0], np.array(frames).T
    grid = grid[: 1 + np.flatnonzero((grid != FREE).any(axis=1))[-1]]  # up to the last in use
    states, shown = sorted({*grid.flatten().tolist()} - {FREE}), np.full(grid.shape, FREE)
    drawn = [each for each in axes.collections if isinstance(each, PolyCollection)]
    for state, collection in zip(states, drawn, strict=True):
        assert (collection.get_hatch() is None) == (state != SHARED)
        for path in collection.get_paths():
            (left, low), (right, high) = path.get_extents().get_points()
            area = shown[round(low + 0.5), round(left) : round(right)]
            assert high - low == 1 and (area == FREE).all()
            area[:] = state
    assert (shown == grid).all() and {SHARED, CACHED} < set(states)
    assert axes.get_xlim() == (0, len(frames)) and axes.get_ylim() == (len(grid) - 0.5, -0.5)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", f"block, of {BLOCKS}")
    figure.draw_without_rendering()
    assert len(axes.texts) >= 5
    for text in axes.texts:
        place = text.get_window_extent().transformed(axes.transData.inverted())
        under = grid[round(text.get_position()[1]), int(place.x0) : int(place.x1) + 1]
        assert {*map(mark, under)} == {text.get_text()} and under.min() >= 0
        assert float(text.get_fontsize()) >= 9
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["one sequence's, with its letter", "shared by several", "cached", "free"]


def test_the_picture_has_no_limit_of_size():
    figure = picture([list(range(20, 60))] * 9, "more sequences than letters have numbers")
    assert [text.get_text() for text in figure.axes[0].texts] == [str(n) for n in range(21, 61)]
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["one sequence's, with its number", "free"]
    many = [[block % 60 for block in range(700)] + [FREE] * 300] * 40
    figure = picture(many, "700 of 1,000 blocks")
    assert figure.axes[0].get_ylim() == (699.5, -0.5)
    assert figure.axes[0].get_ylabel() == "block, of 1000"
    assert figure.get_size_inches()[1] <= 9 and not figure.axes[0].texts
    assert charts.render(picture([[FREE]], "nothing")).startswith(b"<?xml")
    for wrong, words in (([], "no steps"), ([[FREE], [FREE, 0]], "one pool")):
        with pytest.raises(ValueError, match=words):
            picture(wrong, "t")
