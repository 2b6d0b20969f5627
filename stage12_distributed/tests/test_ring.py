"""An all-reduce around a ring of ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from stage12_distributed.drivers import reduced


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
