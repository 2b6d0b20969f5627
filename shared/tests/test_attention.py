"""Attention where PyTorch's kernel is not used as it is, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from shared.attention import attention

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2 * 2**-7}


@pytest.mark.parametrize("group, count", [(1, 3), (1, 1), (2, 3), (3, 1), (7, 3)])
@pytest.mark.parametrize("queries, sees", [(1, "rows"), (1, "all"), (4, "one"), (17, "causal")])
@pytest.mark.parametrize("stored", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_attention_is_the_formula(dtype, stored, queries, sees, group, count):
    """Query heads may share keys; a mask may be each row's own, or one for all."""
    torch.manual_seed(0)
    q = torch.randn(count, 2 * group, queries, 12, dtype=torch.float64).to(dtype)
    keys, values = torch.randn(2, count, 2, 22, 12, dtype=torch.float64).to(stored)[..., :17, :]
    visible = torch.rand(count, 1, queries, 17) < 0.5
    visible |= torch.arange(17) == torch.arange(queries)[:, None]  # no query sees nothing
    if sees == "one":
        visible = visible[0, 0]
    elif sees != "rows":
        visible = torch.ones(queries, 17, dtype=torch.bool).tril(0 if sees == "causal" else 17)
    mask = visible if sees in ("rows", "one") else None
    out = attention(q, keys, values, mask, sees == "causal")
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = (q.double() @ keys.mT / 12**0.5).masked_fill(~visible, -torch.inf)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    atol = max(BOUNDS[dtype], BOUNDS[stored])
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ values, rtol=0, atol=atol)
