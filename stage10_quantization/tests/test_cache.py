"""Keys and values in int8: one rounding for all readers, and kernels that equal the page they were
written from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.errors import UserError
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig
from stage09_kernels import cache as floats
from stage09_kernels import library
from stage09_kernels.tests.test_kernels import in_all_ways
from stage09_kernels.tests.test_naive import EMULATED, at_every_level, attentions, cases, near
from stage10_quantization.cache import FAST, NAIVE, SCALE, Int8KernelCache, quantize

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
compiled = pytest.mark.skipif(not library.compiler(), reason="no C compiler (cc, gcc, clang)")
TYPES = ((F32, F32), (BF16, F32), (F64, F64))
LEVELS = [level for level in at_every_level(TYPES) if EMULATED not in level.values]
every_level = pytest.mark.parametrize(("level", "weights", "real"), LEVELS)
KERNELS = {floats.NAIVE: NAIVE, floats.FAST: FAST}
TINY = 2.0**-130  # subnormal in bfloat16 and float32
# A vector, its scale, and its codes.
DEFINED = {
    "zeros": ([0.0, -0.0, 0.0], 0.0, [0, 0, 0]),
    "exact": ([127.0, -63.0, 0.0], 1.0, [127, -63, 0]),
    "ties to even": ([127.0, 0.5, -1.5], 1.0, [127, 0, -2]),
    "rounded up": ([128.0, 64.0, 1.0], 1.0078125, [127, 64, 1]),  # 128 / 127 lies below
    "rounded down": ([127.4, 63.7, -63.7], 1.0, [127, 64, -64]),
    "a subnormal scale": ([127 * TINY, -TINY, 0.0], TINY, [127, -1, 0]),
    "too small for a scale": ([2.0**-149, 0.0, 0.0], 0.0, [0, 0, 0]),
    "large": ([3e38, -3e38, 0.0], 2.3661e36, [127, -127, 0]),
    "NaN": ([1.0, torch.nan, 2.0], torch.nan, [0, 0, 0]),
    "infinity": ([1.0, -torch.inf, 2.0], torch.nan, [0, 0, 0]),
}
defined = pytest.mark.parametrize(("numbers", "scale", "codes"), DEFINED.values(), ids=DEFINED)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_of(width, heads=1, group=1, layers=1):
    count = heads * group
    return LlamaConfig(11, 4096, width * count, layers, count, heads, width)


def unpacked(cache, block, layer=0):
    """Codes (2, H, B, D) and scales (2, H, B) of a block of a kernel's cache."""
    size, width = cache.block_size, cache.width
    line, rows = -(-size // 16) * 16, -(-width // 16) * 16
    kv = cache.kv[layer, block]  # (H, bytes)
    ends = (width + width % 2) * line, size * rows
    keys, values, scales = kv.split([*ends, kv.shape[1] - sum(ends)], 1)
    codes = (keys.unflatten(1, (-1, line))[:, :width, :size].transpose(1, 2),
             values.unflatten(1, (size, rows))[:, :, :width])  # fmt: skip
    both = scales.contiguous().view(SCALE).unflatten(1, (2, line))[:, :, :size].transpose(0, 1)
    return torch.stack(codes), both


@defined
@pytest.mark.parametrize("dtype", [F32, F64])
def test_vectors_whose_codes_are_worked_out_by_hand(numbers, scale, codes, dtype):
    ours, theirs = quantize(torch.tensor([numbers], dtype=dtype))
    assert ours.tolist() == [codes] and (ours.dtype, theirs.dtype) == (torch.int8, SCALE)
    torch.testing.assert_close(theirs, torch.tensor([scale], dtype=SCALE), equal_nan=True)


@compiled
@defined
@pytest.mark.parametrize("source", [None, NAIVE])
@pytest.mark.parametrize("real", [F32, F64])
def test_kernels_round_the_same_vectors_alike(numbers, scale, codes, source, real):
    cache = Int8KernelCache(config_of(3), 1, dtype=torch.int8, source=source, real=real)
    cache.memory.poison([0])
    x = torch.tensor(numbers, dtype=real).view(1, 1, 3)
    cache.extend([([0], 0, 1)]).attend(0, torch.zeros(1, 1, 3, dtype=real), x, x)
    ours, theirs = unpacked(cache, 0)
    assert ours[:, 0, 0].tolist() == [codes, codes]
    wanted = torch.tensor([scale] * 2, dtype=SCALE)
    torch.testing.assert_close(theirs[:, 0, 0], wanted, equal_nan=True)
    assert theirs[:, 0, 1:].isnan().all()  # slots of later tokens


def test_codes_fit_the_scale_that_readers_multiply_by():
    """Codes of the unrounded scale would be up to a quarter of a scale further off."""
    x = torch.linspace(0, 1, 1001, dtype=F64)[None] * torch.linspace(1, 2, 301, dtype=F64)[:, None]
    codes, scales = quantize(x)
    error = (codes * scales.double()[:, None] - x).abs() / scales.double()[:, None]
    assert error.max() <= 0.5 + 1e-9
    careless = (x / (x.amax(1, keepdim=True) / 127)).round()
    assert ((careless * scales.double()[:, None] - x).abs() / scales[:, None]).max() > 0.7


def test_without_the_kernels_they_are_refused():
    with pytest.raises(UserError, match="int8 need the kernels of stage 09"):
        PagedCache(config_of(3), 1, dtype=torch.int8)


@compiled
@every_level
def test_attention_of_every_shape(level, weights, real):
    def make_cache(config, blocks, size, source):
        options: Any = {"source": KERNELS[source], "real": real, "level": level}
        return Int8KernelCache(config, blocks, size, dtype=torch.int8, **options)

    for case in cases():
        (naive, one), (fast, other) = attentions(case, make_cache, weights, real)
        assert torch.equal(one.kv, other.kv), case  # the same codes and scales, to the last bit
        narrow = weights == BF16
        near(naive, fast, real, 4.5 * (8 + max(case[3]) ** 0.5), 0.05 * narrow, 4.5 / 128)


@compiled
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_bits_depend_on_neither_neighbours_nor_chunks_nor_threads(kv_heads):
    config, outputs, contents = config_of(64, kv_heads, 6 // kv_heads), [], []

    def make_cache():
        cache = Int8KernelCache(config, 360, dtype=torch.int8, real=F32)
        cache.memory.poison(range(360))
        return cache

    for output, cache in in_all_ways(make_cache, kv_heads):
        outputs.append(output)
        contents.append(cache.memory.read(range(20)))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(torch.equal(content, contents[0]) for content in contents)
