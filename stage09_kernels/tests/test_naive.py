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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config
from shared.models import load_model
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig
from stage09_kernels import library
from stage09_kernels.cache import FAST, NAIVE, KernelCache
from stage09_kernels.operations import (
    GELU,
    LINEAR,
    NORM,
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
    skip = pytest.mark.skip(reason="no AMX here")
    return [
        *(pytest.param("amx", *pair, marks=skip) for pair in types if "amx" not in LEVELS),
        *(
            pytest.param(level, *pair, marks=() if level == LEVELS[0] else pytest.mark.slow)
            for level in LEVELS
            for pair in types
        ),
        *(pytest.param(EMULATED, *pair) for pair in types if BF16 in pair),
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
    made: Any = cache_at(level)
    cache: Any = SimpleNamespace(
        real=real_of(cached), kv=SimpleNamespace(dtype=cached), source=source,
        level=made.keywords["level"], defines=made.func.defines,
    )  # fmt: skip
    return KernelCache.library(cache, weights)


def run(source, level, dtypes, operation, **fields):
    library.call(
        kernel(source, level, *dtypes).step,
        ctypes.byref(operation),
        1,
        ctypes.byref(Pass(**fields)),
    )


def bits(x):
    """Whole numbers that are equal where x is, NaN included."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def near(naive, fast, real, bound, rare=0.0, loose=0.0):
    """Whether all but a share `rare` of the numbers differ by at most `bound` units of the last
    place of 1 in `real`, and those by at most `loose`."""
    assert naive.dtype == fast.dtype and naive.isfinite().all()
    error = (naive.double() - fast.double()).abs()
    outside = error > bound * torch.finfo(real).eps
    assert outside.double().mean() <= rare, f"{float(error.max()):.2g} in {int(outside.sum())}"
    assert not outside.any() or float(error.max()) <= loose


def cases():
    """Heads of every width from 1 to 130, groups of 1 to 12, blocks of 1 to 33, lengths below
    and above a tile of 256 keys."""
    for number in range(130):
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
    ones. make_cache: takes a config, blocks, their size, and `source`."""
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
        several = (torch.randn(shape, dtype=F64).to(real).to(weights).to(real) for shape in shapes)
        inputs.append((shares, [x.to(BF16) if weights == BF16 else x for x in several]))
    for source in sources:
        cache = make_cache(config, blocks, block, source=source)
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


class Exact(PagedCache):
    """Stage 05's cache in float64."""

    def __init__(self, config, blocks, block, source):
        super().__init__(config, blocks, block, dtype=F64)


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
        ((exact, _),) = attentions(case, Exact, weights, real, [""])
        tolerance = TOLERANCE[BF16 if BF16 in (weights, cached) else real]
        torch.testing.assert_close(naive.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif("amx" not in LEVELS, reason="no AMX here")
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_by_tiles_has_the_bits_of_the_emulation(heads):
    """Queries alone, which take vectors, and together; keys of two tiles; channels that leave a
    part of a tile."""
    for width in (64, 40, 17):
        torch.manual_seed(width)
        q, k, v = (torch.randn(300, n, width).to(BF16) for n in (4, heads, heads))
        outputs = []
        for kind, level in ((KernelCache, "amx"), (EmulatedCache, PAIRS)):
            config = LlamaConfig(11, 4096, 4 * width, 1, 4, heads, width)
            cache, parts, start = kind(config, 20, 16, dtype=BF16, level=level), [], 0
            for end in (270, 271, 300):
                attention = cache.extend([(list(range(20)), start, end - start)])
                parts.append(attention.attend(0, *(x[start:end] for x in (q, k, v))))
                start = end
            outputs.append(torch.cat(parts))
        assert torch.equal(bits(outputs[0]), bits(outputs[1]))


def linear(source, level, dtypes, shape, epilogue, out, x, layers, bias, residual, out_rows):
    rows, inputs, outputs = shape
    real = real_of(dtypes[1])
    packed = lay_out([interleave(*layers)] if epilogue == SILU_MUL else layers, dtypes[0])
    operand = F.pad(x.to(dtypes[0]), (2, inputs % 2))  # aligned to no vector
    operand = F.pad(operand, (0, 2), value=torch.nan)[:, 2:]  # behind the end of a row
    room = torch.full((rows + 1, outputs + 3), 7.0, dtype=out)  # with guards behind each row
    operation = Operation(LINEAR, 1)
    operation.of.linear = Linear(
        x=operand.data_ptr(), out=room.data_ptr(), weights=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        x_stride=operand.stride(0), out_stride=room.stride(0), inputs=inputs, outputs=outputs,
        residual_stride=outputs, epilogue=epilogue, out_is_operand=out != real,
        residual_of_all=out_rows is not None,
    )  # fmt: skip
    run(source, level, dtypes, operation, n_out_rows=rows,
        out_rows=None if out_rows is None else out_rows.data_ptr())  # fmt: skip
    assert (room[-1] == 7).all() and (room[:, outputs:] == 7).all()
    return room[:-1, :outputs]


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
        bias = 2 * torch.rand(2 * outputs, dtype=real) - 1
        residual = 2 * torch.rand(rows + 5, outputs, dtype=real) - 1
        for epilogue, out in product((PLAIN, GELU, SILU_MUL), {real, weights}):
            gated = epilogue == SILU_MUL
            sides = (
                (interleave(*bias.chunk(2)) if gated else bias[:outputs]) if number % 3 else None
            )
            if sides is not None:
                sides = F.pad(sides, (0, -len(sides) % PANEL))
            adds = residual if out == real and number % 2 else None
            chosen = torch.randperm(rows + 5)[:rows] if number % 4 == 1 else None
            parts = (layers if gated else layers[:1]), sides, adds, chosen
            shape = rows, inputs, outputs
            naive, fast = (
                linear(source, level, (weights, cached), shape, epilogue, out, x, *parts)
                for source in SOURCES
            )
            if exact and epilogue == PLAIN:
                assert torch.equal(naive, fast), (shape, out)
            bound = (8 + inputs**0.5) * max(1, naive.abs().max().item())
            rare = (RARE if out == BF16 else 0.0), 2**-7 * float(naive.abs().max())
            near(naive, fast, real, bound, *rare)
            products = [x.to(weights).double() @ layer.double().t() for layer in parts[0]]
            if number % 3:
                numbers = bias.double().split(outputs)
                products = [y + b for y, b in zip(products, numbers, strict=False)]
            wanted = products[0]
            if gated:
                wanted = F.silu(wanted) * products[1]
            elif epilogue == GELU:
                wanted = F.gelu(wanted, approximate="tanh")
            if adds is not None:
                wanted = wanted + adds[slice(rows) if chosen is None else chosen]
            near(naive, wanted.to(out), real, bound, *rare)


def test_a_row_of_a_product_does_not_depend_on_the_others():
    x, weight = torch.randn(103, 300), torch.randn(200, 300)

    def product_of(rows):
        shape = len(rows), 300, 200
        return linear(FAST, "", (F32, F32), shape, PLAIN, F32, rows, [weight], None, None, None)

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
            outputs = []
            for source in SOURCES:
                room = torch.full((rows + 1, heads * width + 3), 7.0, dtype=out)
                operation = Operation(NORM, 1)
                operation.of.norm = Norm(
                    x=x.data_ptr(), out=room.data_ptr(), gain=gain.data_ptr(),
                    bias=bias.data_ptr() if width % 2 else None, x_stride=x.stride(0),
                    out_stride=room.stride(0), width=width, heads=heads, centred=centred,
                    out_is_operand=out != real, epsilon=1e-3,
                )  # fmt: skip
                run(source, level, (weights, cached), operation, n_out_rows=rows)
                assert (room[-1] == 7).all() and (room[:, heads * width :] == 7).all()
                outputs.append(room[:-1, : heads * width])
            most = float(outputs[0].abs().max())
            rare = 0 if out == real else RARE * 4
            near(outputs[0], outputs[1], real, 64 * (1 + most), rare, most / 128)


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
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-11), (F32, 2e-4), (BF16, 0.05)])
def test_whole_steps_of_odd_models(config, dtype, bound):
    """Groups of 5 and 7, odd widths, and rows in any order, through the same list of operations."""
    torch.set_num_threads(2)
    tensors = random_tensors(config)
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor *= 8  # fresh weights hardly change their input, and would hide a mistake
    model = load_model(Checkpoint(config, tensors), dtype=dtype)
    caches = [KernelCache(config, 6, dtype=dtype, source=source) for source in SOURCES]
    naive, fast = (KernelRunner(model, cache) for cache in caches)
    for inputs in STEPS:
        expected, logits = naive.run(*inputs), fast.run(*inputs)
        assert expected.isfinite().all()
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


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_logits_do_not_depend_on_the_size_of_a_block(dtype):
    """Tokens pair by their positions, even where two of a pair lie in two blocks."""
    config = ODD[2]
    model = load_model(Checkpoint(config, random_tensors(config)), dtype=dtype)
    several = []
    for block in (1, 2, 3, 7, 16, 33):
        cache = KernelCache(config, 64, block, dtype=dtype)
        runner, table = KernelRunner(model, cache), list(range(-(-50 // block)))[::-1]
        parts = ((0, 37), (37, 12), (49, 1))
        passes = [
            (list(range(count)), [(table, start, count)], [count - 1]) for start, count in parts
        ]
        several.append(torch.cat([runner.run(*inputs).clone() for inputs in passes]))
    assert all(torch.equal(logits, several[0]) for logits in several)


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
