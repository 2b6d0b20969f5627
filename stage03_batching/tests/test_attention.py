"""Attention over rows with their own masks, against softmax(Q K^T / sqrt(D)) V."""

from __future__ import annotations

import pytest
import torch

from stage03_batching.attention import masked_attention

B, H, S, D = 3, 2, 17, 12
# bfloat16 numbers of about 1 are `eps` apart. Query, scores, weights and result are rounded.
ROUNDED = 4 * torch.finfo(torch.bfloat16).eps / 2
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: ROUNDED}


def problem(dtype, queries):
    """q, keys and values whose last `queries` columns are the queries' own, and a padding mask."""
    torch.manual_seed(0)
    q = torch.randn(B, H, queries, D, dtype=torch.float64).to(dtype)
    kv = torch.randn(2, B, H, S + 5, D, dtype=torch.float64).to(dtype)
    keys, values = kv[:, :, :, :S]  # views into a longer tensor, as in a cache
    columns = torch.arange(S)
    own = columns[S - queries :, None]
    padding = torch.tensor([0, 6, S - 1])
    mask = (columns <= own) & (columns >= padding[:, None, None]) | (columns == own)  # (B, T, S)
    return q, keys, values, mask[:, None]


def by_hand(q, keys, values, sees):
    """The formula in float64: (B, H, T, D). sees: (B, T, S)."""
    scores = q.double() @ keys.double().mT / D**0.5
    return scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1) @ values.double()


@pytest.mark.parametrize("queries, sees", [(1, "mask"), (1, "all"), (4, "mask"), (S, "causal")])
@pytest.mark.parametrize("stored", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_query_sees_what_its_mask_says(dtype, stored, queries, sees):
    """The cache may have a dtype of its own."""
    q, keys, values, mask = problem(dtype, queries)
    keys, values = keys.to(stored), values.to(stored)
    all_keys = torch.ones(B, queries, S, dtype=torch.bool)
    visible = {"mask": mask[:, 0], "all": all_keys, "causal": all_keys.tril()}[sees]
    expected = by_hand(q, keys, values, visible)
    out = masked_attention(q, keys, values, mask if sees == "mask" else None, sees == "causal")
    assert (out.shape, out.dtype) == (q.shape, dtype)
    bound = max(BOUNDS[dtype], BOUNDS[stored])
    assert torch.allclose(out.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_hidden_keys_and_values_may_hold_any_finite_number(dtype, queries):
    """Bit for bit. But zero times NaN is NaN: a cache must not let it in (see test_cache.py)."""
    q, keys, values, mask = problem(dtype, queries)
    expected = masked_attention(q, keys, values, mask)
    hidden = ~mask.any(2)[:, :, :, None].expand(B, H, S, D)  # what no query of the row sees
    assert hidden.any()
    keys, values = keys.masked_fill(hidden, 1e30), values.masked_fill(hidden, -1e30)
    assert torch.equal(masked_attention(q, keys, values, mask), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_do_not_meet(dtype):
    """Even NaN stays in its row."""
    q, keys, values, mask = problem(dtype, 1)
    expected = masked_attention(q, keys, values, mask)
    keys[1], values[1] = torch.nan, torch.nan
    out = masked_attention(q, keys, values, mask)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert out[1].isnan().all()
