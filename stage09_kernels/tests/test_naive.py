"""The fast kernels against naive.c, over the same memory: every shape, dtype and level.

Where both add in the same order the numbers are equal. Elsewhere they differ by a few units of the
last place of `real`. In bfloat16 such a difference now and then carries a softmax weight or an
output over the middle between two numbers: RARE is the share of outputs that may differ by that.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config
from shared.models import load_model
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig
from stage09_kernels import library
from stage09_kernels.cache import FAST, NAIVE, KernelCache
from stage09_kernels.operations import (
    BODIES,
    GELU,
    LINEAR,
    NORM,
    OUT_ROWS,
    PANEL,
    PLAIN,
    SILU_MUL,
    Linear,
    Norm,
    Operation,
    Pass,
)
from stage09_kernels.program import interleave, lay_out
from stage09_kernels.runner import KernelRunner

LEVELS = library.levels()
EMULATED = "emulated"  # the loops over tiles, on any processor
SOURCES = (NAIVE, FAST)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
TYPES = ((F32, F32), (BF16, BF16), (F64, F64), (F32, BF16))  # of weights, and of the cache
RARE = 0.05
TOLERANCE = {F64: 1e-12, F32: 3e-6, BF16: 2e-2}  # to attention in float64
PAIRS = "avx512_bf16"  # its instruction adds two products at once


def at_every_level(types):
    """Levels but the first are compiled for this test alone."""
    return [
        pytest.param(level, *pair, marks=pytest.mark.slow if level in LEVELS[1:] else ())
        for level in (*LEVELS, EMULATED)
        for pair in types
        if level != EMULATED or BF16 in pair
    ]


every_level = pytest.mark.parametrize(("level", "weights", "cached"), at_every_level(TYPES))


def real_of(dtype):
    return F64 if dtype == F64 else F32


class EmulatedCache(KernelCache):
    defines = ("EMULATE_TILES=1",)


def cache_at(level):
    """Makes caches whose kernels are of `level`."""
    if level == EMULATED:
        return partial(EmulatedCache, level="plain")
    return partial(KernelCache, level=level)


def kernel(source, level, weights, cached):
    return cache_at(level)(ODD[0], 1, dtype=cached, source=source).library(weights)


def run(source, level, dtypes, body, rows, width, out, chosen=None):
    """What a norm or a product writes, (rows, width) of `out`, with guards behind each row."""
    room = torch.full((rows + 1, width + 3), 7.0, dtype=out)
    body.out, body.out_stride = room.data_ptr(), room.stride(0)
    body.out_is_operand = out != real_of(dtypes[1])
    operation = Operation(LINEAR if isinstance(body, Linear) else NORM, OUT_ROWS)
    setattr(operation.of, BODIES[operation.kind], body)
    given = Pass(n_out_rows=rows, out_rows=None if chosen is None else chosen.data_ptr())
    step = kernel(source, level, *dtypes).step
    library.call(step, ctypes.byref(operation), 1, ctypes.byref(given))
    assert (room[-1] == 7).all() and (room[:, width:] == 7).all()
    return room[:-1, :width]


def bits(x):
    """Whole numbers that are equal where x is, NaN included."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def near(naive, fast, real, bound, rare=0.0, loose=0.0):
    """Whether all but a share `rare` of the numbers differ by at most `bound` units of the last
    place of 1 in `real`, and those by at most `loose`."""
    assert naive.dtype == fast.dtype and naive.isfinite().all()
    error = (naive.double() - fast.double()).abs()
    outside = ~(error <= bound * torch.finfo(real).eps)  # NaN, too
    assert outside.double().mean() <= rare, f"{float(error.max()):.2g} in {int(outside.sum())}"
    assert not outside.any() or float(error.max()) <= loose


def cases():
    """Heads of every width from 1 to 130 and two of the widest, groups of 1 to 12, blocks of 1 to
    33, lengths below and above a tile of 256 keys."""
    for number in (*range(130), 255, 511):
        width, group, block = number + 1, number % 12 + 1, number % 33 + 1
        lengths = [1 + number % 9, 30 - number % 7]
        if number % 43 == 0:
            group, lengths = 1 + group % 4, [255 + number // 43, 270 + number % 5]
        yield width, group, block, lengths, number % 4 + 1


def passes(block, lengths, blocks):
    """The shares of passes that write sequences of `lengths` in up to 3 pieces, into blocks in any
    order."""
    free = torch.randperm(blocks).tolist()
    tables = [[free.pop() for _ in range(-(-length // block))] for length in lengths]
    done = [0] * len(lengths)
    for cut in range(3):
        shares = []
        for row, length in enumerate(lengths):
            left = length - done[row]
            count = (-(-left // 3), left - 1, left)[cut]  # a prompt, a chunk, a decode step
            if count > 0:
                shares.append((tables[row], done[row], count))
                done[row] += count
        if shares:
            yield shares


def attentions(case, make_cache, weights, real, sources=SOURCES):
    """The outputs of `passes` over `case`, and the cache: by the naive kernels, then by the fast
    ones. make_cache: takes a config, blocks, their size, and `source`, or none for stage 05's."""
    width, group, block, lengths, count = case
    torch.set_num_threads(count)
    torch.manual_seed(width)
    heads = 1 if max(lengths) > 200 else 1 + width % 2
    every = heads * group
    config = LlamaConfig(11, 4096, width * every, 1, every, heads, width)
    blocks = sum(-(-length // block) for length in lengths) + 3
    inputs = []
    for shares in passes(block, lengths, blocks):
        total = sum(count for _, _, count in shares)
        shapes = [(total, n, width) for n in (every, heads, heads)]
        several = [torch.randn(shape, dtype=F64).to(real).to(weights).to(real) for shape in shapes]
        for x in several[1:]:  # the cache stores subnormal numbers as they are
            x[..., 1:2] *= torch.finfo(real).smallest_normal
        inputs.append((shares, [x.to(BF16) if weights == BF16 else x for x in several]))
    for source in sources:
        cache = make_cache(config, blocks, block, **({"source": source} if source else {}))
        if source:
            cache.memory.poison(range(blocks))  # NaN, which stage 05 reads
        parts = []
        for shares, qkv in inputs:
            attention = cache.extend(shares)
            rows = (x[attention.order] for x in qkv)
            output = attention.attend(0, *(rows if source else (x.double() for x in rows)))
            parts.append(torch.empty_like(output))
            parts[-1][attention.order] = output
        yield torch.cat(parts), cache


@every_level
def test_attention_of_every_shape(level, weights, cached):
    """The naive kernels are compared with stage 05's attention in float64."""
    make_cache, real = partial(cache_at(level), dtype=cached), real_of(cached)
    for case in cases():
        (naive, one), (fast, other) = attentions(case, make_cache, weights, real)
        assert torch.equal(bits(one.kv), bits(other.kv)), case
        bound = 4.5 * (8 + max(case[3]) ** 0.5)  # 4.5: a large value
        if BF16 not in (weights, cached):
            near(naive, fast, real, bound)
        else:  # after one tile, weights are rounded relative to another maximum
            long = max(case[3]) > 256
            near(naive, fast, F32, bound, 1.0 if long else RARE, 4.5 / (64 if long else 128))
        ((exact, _),) = attentions(case, partial(PagedCache, dtype=F64), weights, real, [None])
        tolerance = TOLERANCE[BF16 if BF16 in (weights, cached) else real]
        torch.testing.assert_close(naive.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif("amx" not in LEVELS, reason="no AMX here")
@pytest.mark.parametrize("group", [1, 4])
def test_attention_by_tiles_has_the_bits_of_the_emulation(group):
    """Queries alone, which take vectors, and together; keys of two tiles; channels that leave a
    part of a tile."""

    def make_cache(config, blocks, block, source):
        kind = KernelCache if source == "amx" else EmulatedCache
        return kind(config, blocks, block, dtype=BF16, level=source)

    for width in (64, 40, 17):
        case = width, group, 16, [300], 1
        (tiles, _), (emulated, _) = attentions(case, make_cache, BF16, F32, ("amx", PAIRS))
        assert torch.equal(bits(tiles), bits(emulated))


def linear(source, level, dtypes, epilogue, out, x, layers, bias=None, adds=None, chosen=None):
    """x (rows, inputs) times the first of two `layers`, or for SILU_MUL both; `bias`, of both."""
    (rows, inputs), outputs, gated = x.shape, len(layers[0]), epilogue == SILU_MUL
    packed = lay_out([interleave(*layers)] if gated else layers[:1], dtypes[0])
    if bias is not None:
        bias = interleave(*bias.chunk(2)) if gated else bias[:outputs]
        bias = F.pad(bias, (0, -len(bias) % PANEL))
    operand = F.pad(x.to(dtypes[0]), (2, inputs % 2))  # aligned to no vector
    operand = F.pad(operand, (0, 2), value=torch.nan)[:, 2:]  # behind the end of a row
    body = Linear(
        x=operand.data_ptr(), weights=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if adds is None else adds.data_ptr(),
        x_stride=operand.stride(0), inputs=inputs, outputs=outputs, residual_stride=outputs,
        epilogue=epilogue, residual_of_all=chosen is not None,
    )  # fmt: skip
    return run(source, level, dtypes, body, rows, outputs, out, chosen)


@every_level
def test_linear_layers_of_every_shape(level, weights, cached):
    """All rows of x, weights and bias between -1 and 1, so that a sum of K products is below K. The
    naive product is compared with PyTorch's in float64."""
    torch.manual_seed(0)
    real = real_of(cached)
    exact = weights != BF16 or level != PAIRS
    shapes = [(n % 13 + 1, 3 * n + 1, 7 * n % 130 + 1) for n in range(40)] + [(105, 301, 70)]
    for number, (rows, inputs, outputs) in enumerate(shapes):
        torch.set_num_threads(number % 4 + 1)
        x = 2 * torch.rand(rows, inputs, dtype=real) - 1
        layers = [(2 * torch.rand(outputs, inputs, dtype=real) - 1).to(weights) for _ in range(2)]
        bias = 2 * torch.rand(2 * outputs, dtype=real) - 1 if number % 3 else None
        residual = 2 * torch.rand(rows + 5, outputs, dtype=real) - 1
        for epilogue, out in product((PLAIN, GELU, SILU_MUL), {real, weights}):
            adds = residual if out == real and number % 2 else None
            chosen = torch.randperm(rows + 5)[:rows] if number % 4 == 1 else None
            given = epilogue, out, x, layers, bias, adds, chosen
            naive, fast = (linear(source, level, (weights, cached), *given) for source in SOURCES)
            if exact and epilogue == PLAIN:
                assert torch.equal(naive, fast), (x.shape, out)
            bound = (8 + inputs**0.5) * max(1, naive.abs().max().item())
            rare = (RARE if out == BF16 else 0.0), 2**-7 * float(naive.abs().max())
            near(naive, fast, real, bound, *rare)
            products = [x.to(weights).double() @ layer.double().t() for layer in layers]
            if bias is not None:
                several = zip(products, bias.double().chunk(2), strict=True)
                products = [y + numbers for y, numbers in several]
            wanted = products[0]
            if epilogue == SILU_MUL:
                wanted = F.silu(wanted) * products[1]
            elif epilogue == GELU:
                wanted = F.gelu(wanted, approximate="tanh")
            if adds is not None:
                wanted = wanted + adds[slice(rows) if chosen is None else chosen]
            near(naive, wanted.to(out), real, bound, *rare)


def test_a_row_of_a_product_does_not_depend_on_the_others():
    x, weight = torch.randn(103, 300), torch.randn(200, 300)

    def product_of(rows):
        return linear(FAST, "", (F32, F32), PLAIN, F32, rows, [weight])

    assert torch.equal(product_of(x), torch.cat([product_of(row[None]) for row in x]))


@every_level
def test_norms_of_every_width(level, weights, cached):
    torch.manual_seed(1)
    real = real_of(cached)
    for width in range(1, 131):
        torch.set_num_threads(width % 4 + 1)
        rows, heads = 1 + width % 3, 1 + width % 4
        x = torch.randn(rows, heads * width + 2, dtype=real)[:, 1:]  # aligned to nothing
        gain, bias = torch.randn(2, width, dtype=real)
        for out, centred in product({real, weights}, (0, 1)):
            body = Norm(
                x=x.data_ptr(), gain=gain.data_ptr(), bias=bias.data_ptr() if width % 2 else None,
                x_stride=x.stride(0), width=width, heads=heads, centred=centred, epsilon=1e-3,
            )  # fmt: skip
            naive, fast = (
                run(source, level, (weights, cached), body, rows, heads * width, out)
                for source in SOURCES
            )
            most = float(naive.abs().max())
            rare = 0 if out == real else RARE * 4
            near(naive, fast, real, 64 * (1 + most), rare, most / 128)


ODD = (
    Config(211, 64, 35, 2, 5),
    LlamaConfig(211, 64, 42, 3, 7, 1, n_inner=45),
    LlamaConfig(211, 64, 40, 2, 10, 2, n_inner=33, qk_norm=True),
)
# Two prompts; a chunk of one that wants no logits; decode steps, in another order; any rows, one of
# them twice.
STEPS = (
    (list(range(3, 45)), [([4, 1, 5], 0, 37), ([2], 0, 5)], [36, 41]),
    (list(range(50, 59)), [([4, 1, 5], 37, 8), ([2], 5, 1)], [8]),
    ([7, 8], [([2], 6, 1), ([4, 1, 5], 45, 1)], [0, 1]),
    (list(range(60, 66)), [([4, 1, 5], 46, 2), ([2], 7, 4)], [5, 1, 1, 0, 3]),
)


@pytest.mark.parametrize("config", ODD)
@pytest.mark.parametrize(
    ("dtype", "cached", "bound"),
    [(F64, F64, 1e-11), (F32, F32, 2e-4), (BF16, BF16, 0.05), (BF16, F32, 0.05)],
)
def test_whole_steps_of_odd_models(config, dtype, cached, bound):
    """Groups of 5 and 7, odd widths, and rows in any order, through the same list of operations;
    the fast kernels keep the one copy of the weights."""
    torch.set_num_threads(2)
    tensors = random_tensors(config)
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor *= 8  # fresh weights hardly change their input, and would hide a mistake
    model = load_model(Checkpoint(config, tensors), dtype=dtype)
    naive, fast = (
        KernelRunner(model, KernelCache(config, 6, dtype=cached, source=source), source == FAST)
        for source in SOURCES
    )
    assert all(m.weight.is_meta for m in model.modules() if type(m) is nn.Linear)
    for inputs in STEPS:
        expected, logits = naive.run(*inputs), fast.run(*inputs)
        assert expected.isfinite().all() and logits.dtype == real_of(cached)
        limit = bound * max(1.0, float(expected.abs().max()))
        assert (expected - logits).abs().max() <= limit


@pytest.mark.parametrize(("ids", "start"), [([-1], 0), ([3, 211], 0), ([3, 4], 63)])
def test_what_a_model_has_no_embedding_for_is_refused(ids, start):
    """C would read behind the table."""
    runner = KernelRunner(
        load_model(Checkpoint(ODD[0], random_tensors(ODD[0]))), KernelCache(ODD[0], 6)
    )
    runner.run([3, 210], [([0, 1, 2, 3, 4], 62, 2)], [1])
    with pytest.raises(IndexError, match="outside"):
        runner.run(ids, [([0, 1, 2, 3, 4], start, len(ids))], [0])


def test_each_part_runs_once_and_after_the_operation_before(monkeypatch):
    """A chain of products, each added to what was there: a part that runs twice adds twice, and one
    that runs too early reads old numbers. More threads than parts, and than most machines have; and
    a parallel loop that runs all parts in one thread, in any order: none may wait for another."""
    torch.manual_seed(5)
    width, count = 512, 120
    packed = [lay_out([torch.randn(width, width) / 40], F32) for _ in range(2)]

    def chain(threads):
        torch.set_num_threads(threads)
        rows = torch.ones(2, 1, width)  # each operation reads one and adds to the other
        several = (Operation * count)()
        for number, operation in enumerate(several):
            x, out = rows[number % 2], rows[1 - number % 2]
            operation.kind, operation.rows = LINEAR, 0
            operation.of.linear = Linear(
                x=x.data_ptr(), out=out.data_ptr(), weights=packed[number % 2].data_ptr(),
                residual=out.data_ptr(), x_stride=width, out_stride=width, residual_stride=width,
                inputs=width, outputs=width,
            )  # fmt: skip
        step = kernel(FAST, "", F32, F32).step
        library.call(step, several, count, ctypes.byref(Pass(n_rows=1)))
        return rows

    alone = chain(1)
    assert alone.isfinite().all()
    for number in range(20):
        assert torch.equal(chain(2 + number % 8), alone)

    body_type = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2)
    def backwards(begin, end, grain, body, context):
        for part in reversed(range(begin, end)):
            body_type(body)(part, part + 1, context)
        return 0

    address, output = ctypes.cast(backwards, ctypes.c_void_p), []
    monkeypatch.setattr(library, "parallel_for", lambda: address)
    worker = threading.Thread(target=lambda: output.append(chain(1)), daemon=True)
    worker.start()
    worker.join(30)
    assert output and torch.equal(output[0], alone)
