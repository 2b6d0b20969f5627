"""An all-reduce around a ring of ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from stage12_distributed.drivers import noise, reduced


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7,), (1,), (4, 6)])
def test_every_rank_has_the_sum(size, shape):
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(size)]
    kept = [x.clone() for x in inputs]
    results, _ = reduced(inputs)
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, results[0]), "the ranks have different results"
        torch.testing.assert_close(result, sum(kept))
    assert all(map(torch.equal, inputs, kept)), "x has changed"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_sends_less_than_two_tensors(size):
    results, sent = reduced([torch.randn(4, 5) for _ in range(size)])
    for rank, counts in enumerate(sent):
        assert isinstance(results[rank], torch.Tensor), results[rank]
        assert len(counts) == 2 * (size - 1) and max(counts) <= -(-20 // size), (
            f"rank {rank} of {size} has sent {counts} numbers, at most {-(-20 // size)} in each of "
            f"{2 * (size - 1)} turns"
        )


@pytest.mark.parametrize("turn,ranks", [(0, {0, 1, 2}), (1, {0, 1, 2}), (2, {0, 2}), (3, {2})])
def test_the_sum_comes_by_the_ring(turn, ranks):
    """What rank 1 of 3 sends is wrong in a turn: so are the sums that it goes into, and no other
    numbers. Before the last two turns these are sums of all ranks."""
    inputs = [torch.randn(6, dtype=torch.float64) for _ in range(3)]
    wrong = noise(inputs, rank=1, turn=turn)
    assert all(isinstance(count, int) for count in wrong), wrong
    assert wrong == [2 * (rank in ranks) for rank in range(3)]
