"""The new layers one by one, against their formulas, and grouped heads against repeated ones."""

from __future__ import annotations

import pytest
import torch

from shared import models, testing
from shared.checkpoint import without_weights
from stage01_forward.params import SamplingParams
from stage08_llama.config import LlamaConfig
from stage08_llama.model import Attention, RepeatedHeads, RMSNorm
from stage08_llama.rope import KINDS, Rope, frequencies, rotate, rotation
from stage08_llama.tests.folders import save


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_divides_in_float32_and_weighs_in_the_dtype(dtype):
    norm = RMSNorm(24, 0.5).to(dtype)
    norm.weight.data = normal(24, dtype=dtype)
    x = (3 * normal(5, 24) + 1).to(dtype)  # a mean that must not be subtracted
    x[0] *= 1000  # float16 ends at 65,504, which its square is over
    wide = x.float()
    scale = 1 / (wide.pow(2).mean(-1, keepdim=True) + 0.5).sqrt()
    want = (wide * scale).to(dtype) * norm.weight
    got = norm(x.clone())
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype.itemsize > 2 else 1e-2, atol=0)
    assert dtype.itemsize > 2 or (got == want).float().mean() > 0.95  # weighed in float32: 0.74


def test_a_pair_turns_as_a_complex_number():
    x, positions = normal(7, 3, 10), torch.tensor([0, 1, 2, 3, 50, 301, 900])
    turns = frequencies(Rope(100.0), 10)
    got = rotate(x.clone(), *rotation(positions, turns))
    angles = positions[:, None, None].float() * turns
    turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    torch.testing.assert_close(got[0], x[0], rtol=0, atol=0)  # position 0 turns nothing
    for dtype in (torch.bfloat16, torch.float16):
        small = x.to(dtype)
        turned = torch.complex(*small.float().chunk(2, -1)) * torch.polar(angles * 0 + 1, angles)
        got = rotate(small.clone(), *rotation(positions, turns))
        want = torch.view_as_real(turned)
        same = got == want.movedim(-1, -2).flatten(-2).to(dtype)
        assert got.dtype == dtype and same.float().mean() > 0.95  # turned in the dtype: 0.5


def test_a_stretched_context_slows_the_slow_pairs():
    def same(got, want):
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=0)

    plain = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    same(frequencies(Rope(10_000.0), 16), plain)
    same(frequencies(Rope(10_000.0, "dynamic", 4.0), 16), plain)
    same(frequencies(Rope(10_000.0, "linear", 4.0), 16), plain / 4)
    blend = Rope(10_000.0, "llama3", 4.0, 512, 1.0, 4.0)
    turned = 512 * plain / (2 * torch.pi)  # times that a pair turns in 512 positions
    kept = ((turned - 1) / 3).clamp(0, 1)
    assert 0 < int(((kept > 0) & (kept < 1)).sum()) < 8
    same(frequencies(blend, 16), plain * kept + plain / 4 * (1 - kept))


def test_angles_are_computed_where_weights_are_not():
    """A model is made on the device "meta", without weights; its angles come from no file."""
    with without_weights():
        angles = [frequencies(Rope(1e4, kind, 4.0, 512), 16) for kind in KINDS]
    assert {f"{each.dtype} on {each.device}" for each in angles} == {"torch.float32 on cpu"}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_heads_are_normed_then_turned_and_values_are_neither(qk_norm):
    config = LlamaConfig(11, 32, 24, 1, 6, 2, 8, n_inner=4, qk_norm=qk_norm, qkv_bias=True)
    layer = Attention(config).double()
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = normal(*parameter.shape) * (number + 1) / 4
    x = normal(5, 24)
    turn = rotation(torch.arange(5), frequencies(Rope(), 8))
    q, k, v = layer.heads(x.clone(), turn)
    assert (q.shape, k.shape, v.shape) == ((5, 6, 8), (5, 2, 8), (5, 2, 8))
    plain = [p(x).view(5, -1, 8) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert torch.equal(v, plain[2])
    for got, want, norm in ((q, plain[0], layer.q_norm), (k, plain[1], layer.k_norm)):
        torch.testing.assert_close(got, rotate(norm(want), *turn), rtol=0, atol=1e-12)


def test_repeated_heads_are_an_oracle(tmp_path):
    save(tmp_path, "llama, three kv heads")
    model = models.load_model(models.load(str(tmp_path)))
    before = RepeatedHeads(model)
    wide, narrow = (m.config.kv_bytes_per_token(torch.float32) for m in (before, model))
    assert wide == 2 * narrow
    prompts, params = [[5], [1, 2, 3, 4], [9] * 30], SamplingParams(max_tokens=20)
    make = testing.engines()["stage05_paged"]
    assert make(before).generate(prompts, params) == make(model).generate(prompts, params)
