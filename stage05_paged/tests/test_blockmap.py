"""The map shows the tables: every block, after every step, on every screen, and in the picture."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from shared import charts
from stage01_forward.params import SamplingParams
from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage05_paged import blockmap as maps
from stage05_paged.blockmap import CACHED, FREE, SHARED, blockmap, lines, look, mark, picture
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
                is_state = (
                    len(holders) > 1,
                    block in scheduler.pool.cached,
                    block in scheduler.pool.free,
                )
                assert is_state == (state == SHARED, state == CACHED, state == FREE)
            seen.add(min(state, 0))
    assert seen == {0, FREE, CACHED, SHARED} and engine.scheduler.counts.preemptions > 0
    assert len(owners) == len(set(owners.values()))
    assert "abort" in {request.output.finish_reason for request in owners.values()}


def test_no_letter_and_colour_repeat_and_letters_are_enough():
    signs = [mark(state) for state in (FREE, CACHED, SHARED, *range(len(maps.LETTERS)))]
    assert len(set(signs)) == len(signs) and all(len(s) == 1 and s.isprintable() for s in signs)
    pairs = len(maps.LETTERS) * len(maps.COLOURS)
    assert len({(mark(state), look(state)) for state in range(7, 7 + pairs)}) == pairs
    assert "reverse" not in look(SHARED) + look(CACHED) + look(FREE)
    marks = maps.Marks()
    for state in range(1, 3 * pairs):  # beside two that stay
        numbers = marks.of([0, FREE, state, pairs], [state + 1])
        shown = [(mark(number), look(number)) for number in (*numbers, marks.numbers[state + 1])]
        assert len(set(shown)) == len({0, FREE, state, pairs, state + 1}), state
        assert shown[:2] == [(mark(0), look(0)), (mark(FREE), look(FREE))]


# ---- the terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "width", "height"),
    [(24, 80, 5), (200, 50, 9), (200, 50, 3), (7, 9, 1), (300, 7, 2), (5, 1, 2)],
)
def test_a_character_a_block_and_the_rest_is_counted(count, width, height):
    draw = random.Random(count)
    states = [draw.choice([FREE, CACHED, SHARED, 0, 1, 70]) for _ in range(count)]
    drawn = lines(states, width, height)
    assert 1 <= len(drawn) <= height and all(line.cell_len <= width for line in drawn)
    if width < 9:
        return  # too narrow to read
    cut = drawn[-1].plain.startswith("and ")
    shown = 0
    for line in drawn[: len(drawn) - cut]:
        first, characters = line.plain.split()
        assert int(first) == shown and shown % 10 == 0  # round numbers
        styles = [s.style for s in line.spans for _ in range(s.start, s.end)]
        group = states[shown : shown + len(characters)]
        assert characters == "".join(map(mark, group)) and styles == [look(s) for s in group]
        shown += len(characters)
    rest = states[shown:]
    assert cut == bool(rest)
    if rest:
        owned = sum(state >= 0 for state in rest)
        words = (
            f"and {len(rest)} more blocks: {owned} of one sequence, {rest.count(SHARED)} shared, "
            f"{rest.count(CACHED)} cached, {rest.count(FREE)} free"
        )
        assert drawn[-1].plain == words[:width]
    assert lines(states, width, 0) == []


# ---- the picture --------------------------------------------------------------------------------


def test_the_picture_shows_every_state_of_every_step(frames):
    figure = picture(frames, "Blocks")
    axes = figure.axes[0]
    want = np.array(frames).T
    want = want[: 1 + np.flatnonzero((want != FREE).any(axis=1))[-1]]
    shown = np.full(want.shape, FREE)
    boxes = []  # (block, start, end, state)
    states = sorted(set(want.flatten().tolist()) - {FREE})
    drawn = [each for each in axes.collections if isinstance(each, PolyCollection)]
    for state, collection in zip(states, drawn, strict=True):
        for path in collection.get_paths():
            corners = np.asarray(path.vertices)
            (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
            block, start, end = round(low + 0.5), round(left), round(right)
            assert high - low == 1 and (shown[block, start:end] == FREE).all()
            shown[block, start:end] = state
            boxes.append((block, start, end, state))
        assert (collection.get_hatch() is None) == (state != SHARED)
    assert (shown == want).all() and {SHARED, CACHED} < set(states)
    assert axes.get_xlim() == (0, len(frames)) and axes.get_ylim() == (len(want) - 0.5, -0.5)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", f"block, of {BLOCKS}")
    figure.draw_without_rendering()
    assert len(axes.texts) >= 5
    for text in axes.texts:
        area = text.get_window_extent().transformed(axes.transData.inverted())
        row = round(text.get_position()[1])
        inside = [box for box in boxes if box[0] == row and box[1] <= area.x0 and area.x1 <= box[2]]
        assert [mark(box[3]) for box in inside] == [text.get_text()] and inside[0][3] >= 0
        assert float(text.get_fontsize()) >= 9
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["one sequence's, with its letter", "shared by several", "cached", "free"]


def test_more_sequences_than_letters_have_numbers():
    figure = picture([list(range(20, 60))] * 9, "Blocks")
    assert [text.get_text() for text in figure.axes[0].texts] == [str(n) for n in range(21, 61)]
    keys = [text.get_text() for text in figure.legends[0].get_texts()]
    assert keys == ["one sequence's, with its number", "free"]


def test_the_picture_has_no_limit_of_size():
    many = [[block % 60 for block in range(700)] + [FREE] * 300] * 40
    figure = picture(many, "700 of 1,000 blocks")
    assert figure.axes[0].get_ylim() == (699.5, -0.5)
    assert figure.axes[0].get_ylabel() == "block, of 1000"
    assert figure.get_size_inches()[1] <= 9 and not figure.axes[0].texts
    assert charts.render(picture([[FREE]], "nothing")).startswith(b"<?xml")
    for wrong, words in (([], "no steps"), ([[FREE], [FREE, 0]], "one pool")):
        with pytest.raises(ValueError, match=words):
            picture(wrong, "t")
