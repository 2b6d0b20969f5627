"""Folders with a quantization_config: as GPTQ and AWQ publish their layouts, which the packers of
this file write as hexadecimal digits; and as we write and compressed-tensors reads."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import models
from shared.checkpoint import random_tensors
from shared.errors import UserError
from stage08_llama.config import LlamaConfig
from stage08_llama.tests.folders import to_fields
from stage10_quantization import Unfit
from stage10_quantization.convert import INT4_ZERO, INT8
from stage10_quantization.folder import compressed, gptq, write_folder

LLAMA = LlamaConfig(64, 32, 64, 2, 2, 1, n_inner=96, tied=False)
FIELDS = to_fields(LLAMA)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
LAYER = "layers.1.mlp.up_proj"


def words(rows):
    """Each row of codes (R, C) packed along itself, the first in the lowest bits: int32."""
    eights = rows.unflatten(1, (-1, 8)).flip(2).tolist()
    numbers = [[int("".join(f"{c:x}" for c in part), 16) for part in row] for row in eights]
    return torch.from_numpy(np.array(numbers, np.uint32).view(np.int32))


def draw(seed, rows, columns, count, zero=None):
    """Codes (N, K), scales and zeros (N, G)."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    scale = (torch.randn(rows, count, generator=random) / 100).half()
    zeros = torch.randint(0, 16, (rows, count), generator=random)
    return codes, scale, zeros if zero is None else torch.full_like(zeros, zero)


def expected(codes, scale, zeros):
    index = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
    return ((codes - zeros[:, index]) * scale.double()[:, index]).float()


def gptq_parts(codes, scale, zeros, less=1):
    return {
        "qweight": words(codes).t().contiguous(),
        "qzeros": words(((zeros - less) % 16).t()),
        "scales": scale.t().contiguous(),
    }


def awq_parts(codes, scale, zeros):
    def packed(lines):  # (R, C) -> (R, C / 8), columns of eight in the order of AWQ's nibbles
        return words(lines.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scale.t()}


def write(folder, options, zero=None, first=None, changes=(), **how):
    """A model whose projections are quantized; returns its tensors in float32. zero: of all groups;
    first: of those of the first layer. changes: to the tensors of the file, None removes one. how:
    of the packer."""
    pack = awq_parts if options == AWQ else gptq_parts
    fields = FIELDS | {"quantization_config": options}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors, stored = random_tensors(LLAMA), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        point, first = first or zero, None
        rows, columns = tensor.shape
        drawn = draw(len(stored), rows, columns, columns // 8, point)
        tensors[name], layer = expected(*drawn), name.removesuffix(".weight")
        stored |= {f"{layer}.{kind}": part for kind, part in pack(*drawn, **how).items()}
    spelled = {
        name if name.startswith("lm_head") else f"model.{name}": tensor.contiguous()
        for name, tensor in (stored | dict(changes)).items()
        if tensor is not None
    }
    save_file(spelled, folder / "model.safetensors")
    return tensors


def assert_read(folder, tensors):
    stored: Any = models.load(str(folder)).conversion
    assert len(stored.matrices) == 14
    ours = models.load(str(folder), weights="float32").tensors
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], want) for name, want in tensors.items())


@pytest.mark.parametrize("options", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_a_model(tmp_path, options):
    assert_read(tmp_path, write(tmp_path, options))


@pytest.mark.parametrize("less", [0, 1])
def test_the_version_of_a_gptq_file_is_that_of_all_its_zeros(tmp_path, less):
    """Symmetric files lie about it, so their zeros count; others are what they state, also where
    all zeros of a layer happen to look like those of a symmetric file."""
    lie, truth = ("gptq", "gptq_v2")[less], ("gptq_v2", "gptq")[less]
    symmetric = GPTQ | {"sym": True, "checkpoint_format": lie}
    assert_read(tmp_path, write(tmp_path, symmetric, zero=8, less=less))
    other = 7 + 2 * less  # stored, it is the middle of the other version
    stated = GPTQ | {"checkpoint_format": truth}
    assert_read(tmp_path, write(tmp_path, stated, first=other, less=less))


def test_gptq_adds_one_within_a_field():
    """A zero of 0 is stored as 15; one more must not reach the field beside it."""
    codes, scale, zeros = draw(0, 16, 8, 1)
    zeros[::3] = 0
    ours = gptq(gptq_parts(codes, scale, zeros), (16, 8), 1)
    assert torch.equal(ours.dequantized(), expected(codes, scale, zeros))


@pytest.mark.parametrize(
    "changed, tensors, reason",
    [
        ({"quant_method": "fp8"}, {}, "its quant_method is 'fp8', and only gptq, awq"),
        ({"quant_method": "compressed-tensors", "format": "marlin"}, {}, "its format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, {}, "only the packing version 'gemm'"),
        ({"bits": 3}, {}, "codes of 3 bits are not read, only 4"),
        ({}, {f"{LAYER}.g_idx": torch.arange(64).flip(0) // 8}, "(desc_act) are not read"),
        ({}, {f"{LAYER}.scales": None}, f"{LAYER} are no gptq: scales is missing"),
        ({}, {f"{LAYER}.bias": torch.ones(96)}, f"{LAYER} are no gptq: bias is not read"),
        ({}, {"layers.1.mlp.scales": torch.ones(96)}, "layers.1.mlp.scales is none of the model"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, changed, tensors, reason):
    write(tmp_path, GPTQ, changes=tensors)
    fields = FIELDS | {"quantization_config": GPTQ | changed}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=" cannot be opened: ") as caught:
        models.load(str(tmp_path))
    assert reason in str(caught.value)


def test_int8_codes_with_zeros_of_their_own_are_refused():
    """They were read as if all zeros were 0."""
    zeros = torch.zeros(4, 1, dtype=torch.int8)
    parts = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    assert compressed(parts | {"weight_zero_point": zeros}, (4, 8)).bits == 8
    with pytest.raises(Unfit, match="zeros of their own"):
        compressed(parts | {"weight_zero_point": zeros + 3}, (4, 8))


# ---- writing ----


def test_compressed_tensors_reads_what_was_written(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    turns = itertools.cycle((INT4_ZERO, INT8))
    tensors: dict[str, Any] = {
        name: next(turns).quantized(name, tensor) if name.endswith("_proj.weight") else tensor
        for name, tensor in random_tensors(LLAMA).items()
    }
    write_folder(tmp_path / "out", FIELDS, tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    stored, compared = load_file(tmp_path / "out" / "model.safetensors"), 0
    for scheme in schemes:
        for layer in scheme.targets:
            names = [name for name in stored if name.startswith(f"{layer}.")]
            parts = {name.removeprefix(f"{layer}."): stored[name] for name in names}
            theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
            ours = tensors[layer.removeprefix("model.") + ".weight"]
            torch.testing.assert_close(theirs.float(), ours.dequantized(), rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared == 14
