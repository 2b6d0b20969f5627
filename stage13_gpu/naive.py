"""The kernels of flash.py in PyTorch: what one program does, over the same memory.

    keys and values of a layer and head: (slots, D)
    slot of a position: table[position // block] * block + position % block

Attention of a query is a softmax over all keys that it sees. Neither a program's registers nor its
share of the work hold that many, so it takes a tile of keys at a time (`online`), and several
programs take a piece of the keys each, whose results `merge` adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, PIECE = 64, 256  # keys that a program reads at a time, and all in all


@dataclass
class State:
    """The softmax of M queries over the keys so far, relative to the largest score among them."""

    best: Tensor  # (M,): the largest score
    total: Tensor  # (M,): the sum of the weights, 2 ** (score - best)
    mixed: Tensor  # (M, D): the sum of the values, each times its weight

    @classmethod
    def of(cls, q: Tensor) -> State:
        """The state of the queries q (M, D) before the first key."""
        nothing = q.new_zeros(len(q))
        return cls(nothing - torch.inf, nothing, torch.zeros_like(q))


def slots_of(table: Sequence[int], positions: Tensor, block: int) -> Tensor:
    """The slots of `positions` (T,) of a sequence whose blocks are in `table`."""
    blocks = torch.tensor(table)[positions // block]  # (T,)
    return blocks * block + positions % block


def online(q: Tensor, key: Tensor, value: Tensor, seen: Tensor, state: State) -> State:
    """Take T keys into the softmax of M queries: q (M, D); key, value (T, D); seen (M, T) says
    which query sees which key. Scores are in powers of 2, as the GPU's instruction is."""
    scale = q.shape[1] ** -0.5 * math.log2(math.e)  # 2 ** (x * log2(e)) is exp(x)
    scores = (q @ key.t() * scale).masked_fill(~seen, -torch.inf)  # (M, T)
    now = torch.maximum(state.best, scores.amax(1))
    shift = torch.where(now == -torch.inf, 0, now)  # of a query that has seen nothing yet
    weights = (scores - shift[:, None]).exp2()  # (M, T)
    decay = (state.best - shift).exp2()  # (M,): what was added so far, relative to the new best
    mixed = state.mixed * decay[:, None] + weights @ value
    return State(now, state.total * decay + weights.sum(1), mixed)


def attend(
    q: Tensor, query_at: Tensor, keys: Tensor, values: Tensor, table: Sequence[int], block: int,
    first: int, last: int,
) -> State:  # fmt: skip
    """The state of queries q (M, D) at the positions `query_at` (M,), each of which sees those up
    to its own, after the keys at positions from `first` to `last`. To decode, a program takes PIECE
    of them for one new token; to prefill, all of them for a tile of tokens."""
    state = State.of(q)
    for begin in range(first, last, TILE):
        positions = torch.arange(begin, min(begin + TILE, last))  # only what is stored
        slots = slots_of(table, positions, block)
        seen = positions <= query_at[:, None]  # (M, T)
        state = online(q, keys[slots], values[slots], seen, state)
    return state


def merge(states: Sequence[State]) -> Tensor:
    """The attention output (M, D) of queries whose keys were divided among `states`, in order."""
    all_ = states[0]
    for state in states[1:]:
        now = torch.maximum(all_.best, state.best)
        decay, share = (all_.best - now).exp2(), (state.best - now).exp2()
        mixed = all_.mixed * decay[:, None] + state.mixed * share[:, None]
        all_ = State(now, all_.total * decay + state.total * share, mixed)
    return all_.mixed / all_.total[:, None]
