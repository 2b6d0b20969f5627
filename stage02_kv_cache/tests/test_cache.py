"""The cache: what a pass sees and writes; one test for each pitfall of a first KV cache."""

from __future__ import annotations

import pytest
import torch

from shared.config import Config
from stage01_forward.attention import Recompute, explicit_attention
from stage02_kv_cache.cache import KVCache

IDS = [7, 3, 99, 14, 14, 56, 2, 81, 33, 60, 5, 21]


@torch.inference_mode()
def through_cache(model, cache, ids):
    attention = cache.extend(len(ids))
    return model(torch.tensor(ids), attention.positions, attention.attend)


@pytest.fixture
def cache(tiny_model):
    return KVCache(tiny_model.config, dtype=torch.float64)


@pytest.fixture
def whole(tiny_model):
    """Hidden states of IDS computed in one pass without a cache."""
    with torch.inference_mode():
        return tiny_model(torch.tensor(IDS), torch.arange(len(IDS)), Recompute().attend)


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 7], [5, 1, 6], [1, 11], [3] * 4], ids=str)
def test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass(
    cuts, tiny_model, cache, whole
):
    """Catches a decode step that forgets the past, positions that restart at 0, a square mask."""
    left = iter(IDS)
    parts = [through_cache(tiny_model, cache, [next(left) for _ in range(cut)]) for cut in cuts]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_positions_go_on_where_the_cache_ends(cache):
    positions = [cache.extend(count).positions.tolist() for count in (5, 1, 3)]
    assert positions == [[0, 1, 2, 3, 4], [5], [6, 7, 8]]


def test_a_chunk_sees_all_before_it_and_nothing_after(cache):
    """The mask of a pass of 3 tokens after 4: row i sees 5 + i columns."""
    cache.extend(4)
    assert cache.extend(3).mask.int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]


def test_forgotten_slots_are_never_read_again(tiny_model, cache, whole):
    through_cache(tiny_model, cache, IDS[:6] + [90, 91, 92])
    cache.length = 6
    cache.kv[:, :, :, 6:] = torch.nan
    rest = through_cache(tiny_model, cache, IDS[6:])
    assert torch.allclose(rest, whole[6:], rtol=0, atol=1e-12)


def test_attention_reads_the_cache_in_place(cache):
    attention = cache.extend(4)
    assert attention.seen.data_ptr() == cache.kv.data_ptr()
    assert attention.new.untyped_storage().data_ptr() == cache.kv.untyped_storage().data_ptr()


@torch.inference_mode()
def attended(cache, layer, q, k, v, cuts):
    """Attention (T, H, D) in passes of `cuts` tokens."""
    parts = zip(q.split(cuts), k.split(cuts), v.split(cuts), strict=True)
    return torch.cat([cache.extend(len(part[0])).attend(layer, *part) for part in parts])


def explicit(q, k, v):
    """The same in one pass and in float64."""
    return explicit_attention(*(x.double().transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


def test_one_decode_step_is_explicit_attention_over_all_keys(cache):
    """After a prompt and a chunk."""
    q, k, v = torch.randn(3, 9, 2, 12, dtype=torch.float64)
    out = attended(cache, 1, q, k, v, [5, 3, 1])
    assert torch.allclose(out, explicit(q, k, v), rtol=0, atol=1e-13)


@pytest.mark.parametrize("cuts", [[9], [5, 1, 3]], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_cache_may_have_a_dtype_of_its_own(cuts, dtype, stored):
    """The result has the dtype of the query."""
    q, k, v = torch.randn(3, 9, 2, 10).to(dtype)  # (T, H, D) each
    cache = KVCache(Config(5, 9, 20, 1, 2), dtype=stored)
    out = attended(cache, 0, q, k, v, cuts)
    coarsest = min(dtype, stored, key=lambda each: each.itemsize)
    # Query, scores, weights and result are rounded, each by half a step.
    bound = max(4 * torch.finfo(coarsest).eps / 2, 1e-14)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), explicit(q, k, v), rtol=0, atol=bound)


def test_the_cache_refuses_more_than_it_holds(tiny_model, cache):
    cache.extend(60)
    for count in (5, 0, -1):
        with pytest.raises(ValueError):
            cache.extend(count)
    assert cache.length == 60  # nothing was taken
    cache.extend(4)
    grouped = KVCache(Config(5, 9, 8, 1, n_head=4, n_kv_head=2))
    assert grouped.kv.shape == (1, 2, 2, 9, 2)
    assert cache.kv.nbytes == 64 * tiny_model.config.kv_bytes_per_token(torch.float64)
