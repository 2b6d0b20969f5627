"""Attention over rows with masks of their own: both formulations against softmax(Q K^T / sqrt(D)) V, row by row."""

from __future__ import annotations

import pytest
import torch

from stage03_batching.attention import masked_attention

B, H, S, D = 3, 2, 17, 12
EXACT = {torch.float64: 1e-13, torch.float32: 1e-5}
# bfloat16 numbers of about 1 lie `eps` apart. Query, scores, weights and result are rounded, by half of that each time.
ROUNDED = 4 * torch.finfo(torch.bfloat16).eps / 2


def problem(dtype, queries):
    """q, keys and values whose last `queries` columns are the queries' own, and a mask with holes as padding makes them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, queries, D, dtype=torch.float64, generator=generator).to(dtype)
    kv = torch.randn(2, B, H, S + 5, D, dtype=torch.float64, generator=generator).to(dtype)
    keys, values = kv[:, :, :, :S]  # views into something longer, as in a cache
    columns = torch.arange(S)
    own = columns[S - queries :, None]
    padding = torch.tensor([0, 6, S - 1])
    mask = (columns <= own) & (columns >= padding[:, None, None]) | (columns == own)  # (B, T, S)
    return q, keys, values, mask[:, None]


def by_hand(q, keys, values, sees):
    """In float64, one query at a time, over the keys that it sees and no others: (B, H, T, D). `sees` is (B, T, S)."""
    q, keys, values = q.double(), keys.double(), values.double()
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(
        torch.arange(B), torch.arange(q.shape[1]), torch.arange(q.shape[2])
    ).tolist():
        seen = sees[b, t]
        out[b, h, t] = (keys[b, h, seen] @ q[b, h, t] / D**0.5).softmax(0) @ values[b, h, seen]
    return out


@pytest.mark.parametrize("queries", [1, 4, S])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_a_query_sees_what_its_mask_says(dtype, queries):
    q, keys, values, mask = problem(dtype, queries)
    out = masked_attention(q, keys, values, mask)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert torch.allclose(
        out.double(), by_hand(q, keys, values, mask[:, 0]), rtol=0, atol=EXACT[dtype]
    )


@pytest.mark.parametrize("queries", [1, 4])
def test_bfloat16_is_explicit_attention_within_its_rounding(queries):
    """One query a row takes the written-out way, four take the fused kernel; both must see what the mask says."""
    q, keys, values, mask = problem(torch.bfloat16, queries)
    out = masked_attention(q, keys, values, mask)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert torch.allclose(out.double(), by_hand(q, keys, values, mask[:, 0]), rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("queries, sees", [(1, "mask"), (1, "all"), (4, "mask"), (S, "causal")])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_heads_may_share_keys_and_the_cache_may_have_a_dtype_of_its_own(
    dtype, stored, queries, sees, group
):
    q, keys, values, mask = problem(dtype, queries)
    q = torch.cat([q * (number + 1) for number in range(group)], dim=1)  # (B, group * H, T, D)
    keys, values = keys.to(stored), values.to(stored)
    visible = {
        "mask": mask[:, 0],
        "all": torch.ones(B, queries, S, dtype=torch.bool),
        "causal": torch.ones(B, S, S, dtype=torch.bool).tril(),
    }[sees]
    expected = by_hand(
        q, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), visible
    )
    out = masked_attention(q, keys, values, mask if sees == "mask" else None, sees == "causal")
    assert (out.shape, out.dtype) == (q.shape, dtype)
    coarse = torch.bfloat16 in (dtype, stored)
    exact = EXACT[torch.float64] if stored == torch.float64 else 1e-5
    assert torch.allclose(out.double(), expected, rtol=0, atol=group * ROUNDED if coarse else exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_a_mask_one_query_sees_all(dtype):
    q, keys, values, _ = problem(dtype, 1)
    expected = by_hand(q, keys, values, torch.ones(B, 1, S, dtype=torch.bool))
    out = masked_attention(q, keys, values, None)
    assert torch.allclose(out.double(), expected, rtol=0, atol=EXACT.get(dtype, ROUNDED))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_causal_needs_no_mask_where_queries_and_keys_are_the_same_columns(dtype):
    q, keys, values, _ = problem(dtype, S)
    expected = by_hand(q, keys, values, torch.ones(B, S, S, dtype=torch.bool).tril())
    out = masked_attention(q, keys, values, None, causal=True)
    assert torch.allclose(out.double(), expected, rtol=0, atol=EXACT.get(dtype, ROUNDED))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_hidden_keys_and_values_may_hold_any_finite_number(dtype, queries):
    """Bit for bit. NaN is another matter: zero times NaN is NaN, so a cache must not let it in (see test_cache.py)."""
    q, keys, values, mask = problem(dtype, queries)
    expected = masked_attention(q, keys, values, mask)
    hidden = ~mask.any(2)[:, :, :, None].expand(B, H, S, D)  # what no query of the row sees
    poisoned = masked_attention(
        q, keys.masked_fill(hidden, 1e30), values.masked_fill(hidden, -1e30), mask
    )
    assert torch.equal(poisoned, expected)
    assert hidden.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_do_not_meet(dtype):
    """Even NaN stays in its row."""
    q, keys, values, mask = problem(dtype, 1)
    expected = masked_attention(q, keys, values, mask)
    keys[1], values[1] = torch.nan, torch.nan
    out = masked_attention(q, keys, values, mask)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert out[1].isnan().all()
