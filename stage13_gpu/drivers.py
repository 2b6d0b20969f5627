"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import torch

from shared.course.driver import tensors

from . import naive
from .naive import State


def slots(draw: Random) -> Any:
    seen: list[Any] = []
    for _ in range(30):
        block = draw.choice([1, 4, 5, 16])
        table = draw.sample(range(99), draw.randint(1, 9))
        count = draw.randint(1, 12)
        positions = torch.tensor([draw.randrange(len(table) * block) for _ in range(count)])
        call = f"slots_of {positions.tolist()} in {table}, blocks of {block}"
        seen.append({"call": call, "slots": naive.slots_of(table, positions, block)})
    return seen


def tiles_of(draw: Random) -> tuple[torch.Tensor, list[Any]]:
    """Queries, and tiles of keys, values and what is seen of them; all see something in the end."""
    width, queries = draw.choice([4, 8, 64]), draw.randint(1, 4)
    q = tensors(draw, queries, width) * draw.choice([1, 1, 1000])
    tiles = list[Any]()
    for _ in range(draw.randint(1, 4)):
        keys = draw.choice([1, 5, 64])
        seen = tensors(draw, queries, keys) < draw.choice([-9, 0, 9])
        tiles.append((*tensors(draw, 2, keys, width), seen))
    tiles[-1][2][:, -1] = True
    return q, tiles


def softmax(draw: Random) -> Any:
    """Tiles in turn, of which some queries see nothing."""
    seen: list[Any] = []
    for _ in range(12):
        q, tiles = tiles_of(draw)
        state = State.of(q)
        for place, (key, value, visible) in enumerate(tiles):
            state = naive.online(q, key, value, visible, state)
            counts = visible.sum(1).tolist()
            call = f"online, tile {place} of {tuple(key.shape)}, {counts} keys seen"
            seen.append({"call": call, "state": deepcopy(state)})  # it may change in place
    return seen


def merged(draw: Random) -> Any:
    """States of different keys. Some may have seen nothing, but not the first: relative to which
    maximum such ones would be added is open."""
    seen: list[Any] = []
    for _ in range(12):
        queries, width = draw.randint(1, 4), draw.choice([4, 8])
        states = []
        for place in range(draw.randint(1, 5)):
            best, total = 30 * tensors(draw, queries), 1 + tensors(draw, queries).abs()
            mixed, empty = tensors(draw, queries, width), draw.randrange(2 * queries)
            if place and empty < queries:
                best[empty], total[empty], mixed[empty] = -torch.inf, 0, 0
            states.append(State(best, total, mixed))
        call = f"merge of states with the best scores {[state.best.tolist() for state in states]}"
        seen.append({"call": call, "out": naive.merge(states)})
    return seen


DRIVERS = {1: slots, 2: softmax, 3: merged}
TWINS = {
    1: {"stage05_paged/cache.py": ("addresses",)},
    3: {"stage09_kernels/online.py": ("merge",)},
}
