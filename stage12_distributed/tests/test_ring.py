"""An all-reduce around a ring of ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch

from stage12_distributed.tensor import ring


def reduced(inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[list[int]]]:
    """What `all_reduce` returns on each rank, a thread with one of `inputs`; and how many numbers
    the rank has sent in each turn."""
    ways: list[Queue[torch.Tensor]] = [Queue() for _ in inputs]
    sent: list[list[int]] = [[] for _ in inputs]

    def work(rank: int) -> object:
        def exchange(piece: torch.Tensor) -> torch.Tensor:
            sent[rank].append(piece.numel())
            ways[(rank + 1) % len(inputs)].put(piece.clone())
            return ways[rank].get(timeout=4)

        return ring.all_reduce(inputs[rank], rank, len(inputs), exchange)

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(work, range(len(inputs)))), sent


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7,), (1,), (4, 6)])
def test_every_rank_has_the_sum(size, shape):
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(size)]
    kept = [x.clone() for x in inputs]
    results, _ = reduced(inputs)
    for result in results:
        assert torch.equal(result, results[0]), "the ranks have different results"
        torch.testing.assert_close(result, sum(kept))
    assert all(map(torch.equal, inputs, kept)), "x has changed"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_sends_less_than_two_tensors(size):
    _, sent = reduced([torch.randn(4, 5) for _ in range(size)])
    for rank, counts in enumerate(sent):
        assert len(counts) == 2 * (size - 1) and max(counts) <= -(-20 // size), (
            f"rank {rank} of {size} has sent {counts} numbers, at most {-(-20 // size)} in each of "
            f"{2 * (size - 1)} turns"
        )
