"""The chart shows the records: all of them, once each, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from stage01_forward.params import SamplingParams
from stage04_continuous.engine import make
from stage04_continuous.request import Request
from stage04_continuous.timeline import bars, draw

SLOTS = 4


@pytest.fixture(scope="module")
def steps(tiny_model):
    """A run with chunks, refilled slots, and a request that is aborted half-way."""
    engine = make(tiny_model, SLOTS, eos_ids=(), token_budget=8)
    for n in range(12):
        engine.add(Request([1 + n] * (1 + 7 * n % 23), SamplingParams(max_tokens=1 + 11 * n % 29)))
    while engine.requests:
        if len(engine.steps) == 9:
            engine.abort(engine.scheduler.running[0].id)
        engine.step()
    return list(engine.steps)


def test_bars_hold_exactly_the_records(steps):
    tenants = bars(steps)
    found = [
        ((bar.slot, number), (bar.request_id, what))
        for bar in tenants
        for what, start, end in bar.pieces
        for number in range(start, end)
    ]
    shares = [
        ((slot, number), (share.request_id, "prefill" if share.prefill_tokens else "decode"))
        for number, step in enumerate(steps)
        for slot, share in zip(step.memory, step.shares, strict=True)
    ]
    assert sorted(found) == sorted(shares)
    assert len({bar.request_id for bar in tenants}) == len(tenants) == 12
    for bar in tenants:
        edges = [edge for _, *piece in bar.pieces for edge in piece]
        assert edges == sorted(edges) and (bar.start, bar.end) == (edges[0], edges[-1])
    for one, other in itertools.pairwise(tenants):
        assert one.slot < other.slot or one.slot == other.slot and one.end <= other.start


def test_the_chart_draws_every_piece_and_names_bars_that_have_room(steps):
    tenants = bars(steps)
    figure = draw(tenants, len(steps), "Slots are filled again", slots=6)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, len(steps)) and axes.get_ylim() == (5.5, -0.5)
    drawn = sum(len(collection.get_paths()) for collection in axes.collections)
    assert drawn == len(tenants) + sum(len(bar.pieces) for bar in tenants)
    names = {bar.request_id.removeprefix("request-") for bar in tenants}
    texts = [text.get_text().removeprefix("request-") for text in axes.texts]
    assert 5 <= len(texts) == len({*texts} & names)
