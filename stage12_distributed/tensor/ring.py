"""An all-reduce by hand: the sum of all ranks' tensors, on every rank, around a ring.

Each rank only talks to the next one. In the first size - 1 turns the sums are made
(reduce-scatter): a rank passes on one piece, and adds its own numbers to the piece that it
receives. In the next size - 1 turns the finished pieces go round (all-gather). A rank sends
2 (size - 1) / size of its tensor, however many ranks there are. `collectives.py` has
`torch.distributed` do this.
Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms" (2009).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]  # sends a piece to the next rank, returns the one before's


def all_reduce(x: Tensor, rank: int, size: int, exchange: Exchange) -> Tensor:
    """The sum of the x of all `size` ranks, of one shape (...). Every rank calls this at once.

    `exchange` sends a piece to rank + 1 and returns what rank - 1 has sent in the same turn, around
    the ring. It may be called 2 (size - 1) times, with at most ceil(numel / size) numbers each.
    x is not changed, and the result is equal to the last bit on all ranks.
    """
    pieces = list(x.flatten().clone().tensor_split(size))
    for turn in range(size - 1):  # piece rank - turn is summed over the last turn + 1 ranks
        received = exchange(pieces[(rank - turn) % size])
        index = (rank - turn - 1) % size
        pieces[index] = received + pieces[index]
    for turn in range(size - 1):  # piece rank + 1 - turn is finished
        pieces[(rank - turn) % size] = exchange(pieces[(rank + 1 - turn) % size])
    return torch.cat(pieces).view(x.shape)
