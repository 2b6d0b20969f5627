"""What lies between two products, against PyTorch's operators."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="requirements-gpu.txt is not installed")

import torch
import torch.nn.functional as F
from torch import nn

from stage08_llama.model import RMSNorm
from stage08_llama.rope import rotate
from stage13_gpu.launch import DEVICE
from stage13_gpu.layers import add_norm, silu_mul
from stage13_gpu.tests.tools import TOLERANCE, caches, inputs


def close(output, wanted, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "norm"), [(24, True), (24, False), (64, True), (17, None)])
def test_queries_are_rotated_and_keys_stored_in_one_pass(width, norm, dtype):
    """norm None: neither norm nor rotation, as for GPT-2; the queries stay as they are."""
    torch.manual_seed(0)
    _, gpu = caches(4, 2, width, 5, dtype)
    q, k, v = inputs(7, 4, 2, width, dtype)
    rotated, stored = q.clone(), k.clone()
    attention = gpu.extend([([4, 9], 1, 6), ([2], 3, 1)])
    norms = [RMSNorm(width, 1e-6).to(DEVICE, dtype) for _ in range(2)]
    for module in norms:
        module.weight.data = torch.rand_like(module.weight) + 0.5
    turns = torch.randn(2, 7, 1, width // 2, device=DEVICE) if norm is not None else None
    with torch.inference_mode():
        if norm:
            rotated, stored = norms[0](rotated), norms[1](stored)
        if turns is not None:
            rotated, stored = rotate(rotated, *turns), rotate(stored, *turns)
        options = None if turns is None else tuple(turns), norms if norm else None
        attention.store(0, q, k, v, *options)
    close(q, rotated, dtype)
    slots = [21, 22, 23, 24, 45, 46, 13]
    keys, values = gpu.kv[0].flatten(2, 3)[:, :, slots].transpose(1, 2)
    close(keys, stored, dtype)
    assert torch.equal(values, v)
    assert int((~gpu.kv.isnan()).sum()) == 2 * 7 * 2 * width  # nothing else was written


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [24, 130])
def test_a_product_is_added_to_the_stream_and_the_sum_normed(width, kind, dtype):
    torch.manual_seed(1)
    norm = nn.LayerNorm(width) if kind == "layer" else RMSNorm(width, 1e-6)
    for parameter in norm.parameters():
        parameter.data = torch.randn_like(parameter)
    norm.to(DEVICE, dtype)
    x, y = (3 + torch.randn(2, 5, width + 2)).to(DEVICE, dtype)[..., 1:-1]  # strided
    with torch.inference_mode():
        total = x + y
        alone, before = add_norm(x, None, norm), x.clone()
        assert torch.equal(x, before)
        close(alone, norm(x), dtype)
        close(add_norm(x, y, norm), norm(x), dtype)
    close(x, total, dtype)  # the interpreter truncates to bfloat16
    assert dtype == torch.bfloat16 or torch.equal(x, total)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_gate_scales_what_is_beside_it(dtype):
    torch.manual_seed(2)
    x = (4 * torch.randn(3, 2 * 1500)).to(DEVICE, dtype)
    gate, up = x.chunk(2, 1)
    close(silu_mul(x), F.silu(gate) * up, dtype)
