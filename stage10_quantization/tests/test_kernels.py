"""The kernels against `layers.multiply`, to the last bit: every shape, format and level."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.checkpoint import Checkpoint, random_tensors
from shared.config import Config
from shared.models import load_model
from shared.testing import wide_norm
from stage04_continuous.runner import Runner
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig
from stage08_llama.model import RMSNorm
from stage09_kernels import library
from stage09_kernels.cache import FAST, NAIVE, KernelCache
from stage09_kernels.operations import EMBED, LINEAR, PLAIN, Embed, Operation, Pass
from stage09_kernels.runner import KernelRunner
from stage10_quantization import kernels
from stage10_quantization.kernels import PanelMatrix, product_of
from stage10_quantization.layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedMatrix,
    multiply,
)

LEVELS = library.levels()
EMULATED = "emulated"  # the loops over tiles, on any processor
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
EACH = [  # source and level; levels but the first are compiled for this test alone
    pytest.param(source, level, marks=() if level == LEVELS[0] else pytest.mark.slow)
    for source in (NAIVE, FAST)
    for level in LEVELS
    if source == FAST or level == LEVELS[0]
]


def a_matrix(rows, groups, group, bits, minimum=False, half=False) -> QuantizedMatrix:
    """Random codes, with both ends in each row, or the last one alone, and scales, some of which
    are 0 or negative."""
    first = 0 if minimum else -(2 ** (bits - 1))
    codes = torch.randint(2**bits, (rows, groups * group)) + first
    last = first + 2**bits - 1
    codes[::2, 0], codes[:, -1], codes[5::6] = first, last, last
    scale = torch.randn(rows, groups) / 50
    scale[0] = 0
    low = torch.randn(rows, groups) / 10
    if half:
        scale, low = scale.half().float(), low.half().float()
    return QuantizedMatrix(codes.to(torch.int8), scale, low if minimum else None, bits)


def inputs_of(rows: int, width: int) -> Tensor:
    """Rows of all sizes, one of zeros, one with NaN, one with infinity, one whose codes are 127."""
    x = torch.randn(rows, width) * 10.0 ** torch.arange(rows)[:, None].sub(rows // 2)
    x[1::6] = 0
    x[2::7, width // 2] = torch.nan
    x[3::8, -1] = -torch.inf
    x[4::9] *= 1e-38
    x[5::9] = 1
    return x


def a_cache(source, level, real) -> Any:
    """What a product needs of a KernelCache."""
    emulated = level == EMULATED
    cache: Any = SimpleNamespace(
        real=real, kv=SimpleNamespace(dtype=real), source=source,
        level="plain" if emulated else level, defines=("EMULATE_TILES=1",) if emulated else (),
    )  # fmt: skip
    cache.library = lambda *arguments: KernelCache.library(cache, *arguments)
    return cache


def run(source, level, x, layer):
    """The product by the kernel, with guards behind each row of it."""
    dtype = x.dtype
    cache = a_cache(source, level, F32)
    ours = product_of([layer], PLAIN, cache, dtype)
    assert ours is not None
    scratch = torch.full((len(x) * ours.scratch + 1,), 7, dtype=torch.uint8)
    operation = Operation(LINEAR, 1)
    operation.of.linear = ours.linear
    fields = operation.of.linear
    fields.scratch = scratch.data_ptr()
    spare = torch.nn.functional.pad(x, (0, 3), value=torch.nan)  # must not be read
    room = torch.full((len(x) + 1, fields.outputs + 3), 7.0)
    fields.x, fields.x_stride, fields.x_is_operand = spare.data_ptr(), spare.stride(0), True
    fields.out, fields.out_stride = room.data_ptr(), room.stride(0)
    this_pass = Pass(n_out_rows=len(x))
    step = cache.library(dtype).step
    library.call(step, ctypes.byref(operation), 1, ctypes.byref(this_pass))
    assert scratch[-1] == 7 and (room[-1] == 7).all() and (room[:, fields.outputs :] == 7).all()
    return room[:-1, : fields.outputs]


def bits(x: Tensor) -> Tensor:
    """Whole numbers that are equal where x is; all NaN are."""
    whole = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
    return whole.masked_fill(x.isnan(), -1)


def cases():
    """(groups, inputs in each, outputs, rows of x), for each class of shapes."""
    yield from ((1, 4 * n % 131 + 1, 7 * n % 130 + 1, n % 13 + 1) for n in range(26))
    yield from ((n % 5 + 1, group, 61 + n, n % 13 + 1) for n, group in enumerate((16, 32, 64, 128)))
    yield from ((3, group, 70, 7) for group in (1, 7, 12, 24, 33))
    yield from ((24, 32, 200, 33), (1, 768, 130, 40), (2, 2048, 64, 2))


@pytest.mark.parametrize(("source", "level"), [*EACH, (FAST, EMULATED)])
def test_every_shape_has_the_bits_of_the_reference(source, level):
    torch.manual_seed(0)
    for number, (groups, group, outputs, rows) in enumerate(cases()):
        torch.set_num_threads(number % 4 + 1)
        x = inputs_of(rows, groups * group)
        for code_bits, minimum in ((8, False), (4, False), (4, True)):
            matrix = a_matrix(outputs, groups, group, code_bits, minimum, half=number % 2 == 0)
            got = run(source, level, x, QuantizedLinear(matrix))
            assert torch.equal(bits(got), bits(multiply(matrix, x))), (groups, group, outputs, rows)


@pytest.mark.parametrize("level", [pytest.param(e.values[1], marks=e.marks) for e in EACH[1:]])
def test_inputs_that_are_not_rounded(level):
    """fast/ has the bits of naive.c, and both are near the product with the dequantized matrix."""
    torch.manual_seed(3)
    for number, (groups, group, outputs, rows) in enumerate(cases()):
        x = torch.randn(rows, groups * group).to((F32, BF16)[number % 2])
        for code_bits, minimum in ((8, False), (4, False), (4, True)):
            matrix = a_matrix(outputs, groups, group, code_bits, minimum)
            layer = QuantizedLinear(matrix, None, "float")
            naive, fast = (run(source, level, x, layer) for source in (NAIVE, FAST))
            assert torch.equal(naive, fast), (groups, group, outputs, rows)
            size = x.float().abs() @ matrix.dequantized().abs().t()
            assert ((fast - layer(x.float())).abs() <= 1e-5 * (1 + size)).all()


Formats = dict[str, tuple[int, int | None, bool]]  # bits, group and minimum


def quantized(model: Any, formats: Formats) -> Any:
    """`model` with its layers, and its table, in random whole numbers: in the format of the first
    word that a name contains."""

    def matrix_of(name: str, weight: Tensor) -> QuantizedMatrix:
        bits, group, minimum = next(kind for word, kind in formats.items() if word in name)
        inputs = weight.shape[1]
        return a_matrix(len(weight), inputs // (group or inputs), group or inputs, bits, minimum)

    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            matrix = matrix_of(name, layer.weight)
            model.set_submodule(name, QuantizedLinear(matrix, layer.bias))
    name = "wte" if hasattr(model, "wte") else "embed_tokens"
    weight = model.get_submodule(name).weight
    table = QuantizedEmbedding(matrix_of(name, weight), weight.dtype)
    model.set_submodule(name, table)
    model.lm_head = table.head()
    return model


MODELS: dict[str, tuple[Any, Formats]] = {
    "groups": (Config(211, 64, 64, 2, 2), {"wte": (8, None, False), "": (4, 32, True)}),
    "mixed": (
        LlamaConfig(211, 64, 64, 2, 4, 2, n_inner=96),
        {"v_proj": (8, 16, False), "embed": (8, 32, False), "": (4, 32, True)},
    ),
}
STEPS = (  # two prompts; a chunk that wants no logits; decode steps, in another order
    (list(range(3, 45)), [([4, 1, 5], 0, 37), ([2], 0, 5)], [36, 41]),
    (list(range(50, 59)), [([4, 1, 5], 37, 8), ([2], 5, 1)], [8]),
    ([7, 8], [([2], 6, 1), ([4, 1, 5], 45, 1)], [0, 1]),
)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("source", [NAIVE, FAST])
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_are_those_of_the_slow_layers(name, source, release, monkeypatch):
    """In float64, where norms and attention agree so far that x is rounded alike. Panels are laid
    out one at a time; a released model, its table too, reads them."""
    monkeypatch.setattr(kernels, "AT_A_TIME", 1)
    monkeypatch.setattr(RMSNorm, "forward", wide_norm)  # which computes in float32 otherwise
    config, formats = MODELS[name]
    tensors = random_tensors(config)
    for tensor in tensors.values():  # of norms: so that no x is in the middle between two codes
        tensor += torch.rand_like(tensor) / 8
    model = quantized(load_model(Checkpoint(config, tensors), dtype=F64), formats)
    slow = Runner(model, PagedCache(config, 6, dtype=F64))
    outputs = [slow.run(*inputs).clone() for inputs in STEPS]
    fast: Any = KernelRunner(model, KernelCache(config, 6, dtype=F64, source=source), release)
    matrices = [m.matrix for m in model.modules() if hasattr(m, "matrix")]
    assert all(isinstance(m, PanelMatrix) == release for m in matrices)
    for inputs, want in zip(STEPS, outputs, strict=True):
        assert (fast.run(*inputs) - want).abs().max() < 1e-12 * want.abs().max()
    again = Runner(model, PagedCache(config, 6, dtype=F64))
    assert torch.equal(again.run(*STEPS[0]), outputs[0])


@pytest.mark.parametrize(("source", "level"), EACH)
def test_rows_of_a_table_have_the_bits_of_the_reference(source, level):
    torch.manual_seed(2)
    ids = np.array([69, 0, 3, 64, 63], np.int64)
    shares = np.array([(0, 0, len(ids), 0)], np.int64)
    for real, dtype in ((F32, F32), (F32, BF16), (F64, F64)):
        for groups, group, code_bits, minimum in (
            *((1, 37, 8, False), (3, 32, 4, True), (2, 12, 4, False)),
        ):
            table = a_matrix(70, groups, group, code_bits, minimum, half=groups % 2 == 1)
            embedding, cache = QuantizedEmbedding(table, dtype), a_cache(source, level, real)
            ours = product_of([embedding.head()], PLAIN, cache, dtype)
            assert ours is not None and ours.reader(torch.nn.Embedding(70, 1)) is None
            room = torch.full((len(ids) + 1, groups * group + 3), 7.0, dtype=real)
            operation = Operation(EMBED)
            body = Embed(width=groups * group)
            body.out, body.out_stride = room.data_ptr(), room.stride(0)
            body.read_row, body.format = ours.reader(embedding) or (None, None)
            operation.of.embed = body
            this_pass = Pass(ids=ids.ctypes.data, shares=shares.ctypes.data, n_rows=len(ids))
            step = cache.library(dtype).step
            library.call(step, ctypes.byref(operation), 1, ctypes.byref(this_pass))
            expected = embedding(torch.from_numpy(ids)).to(real)
            assert torch.equal(bits(room[:-1, :-3]), bits(expected))
            assert (room[-1] == 7).all() and (room[:, -3:] == 7).all()
