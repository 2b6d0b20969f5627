"""Folders with a quantization_config: as GPTQ and AWQ publish their layouts, which the packers of
this file write as hexadecimal digits; and as we write and compressed-tensors reads."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import registry
from shared.catalog import STORIES
from shared.checkpoint import random_tensors
from shared.errors import UserError
from stage08_llama.config import LlamaConfig
from stage08_llama.tests.folders import to_fields
from stage10_quantization.convert import INT4_ZERO, INT8, INT8_GROUPS
from stage10_quantization.folder import FolderModel, Unfit, compressed, gptq, write_folder
from stage10_quantization.matrix import PROJECTIONS, QuantizedMatrix

LLAMA = LlamaConfig(64, 32, 64, 2, 2, 1, n_inner=96, tied=False)


def config_of(fields):
    return registry.load(registry.CONFIGS[fields["model_type"]])(fields, "out", "")


FIELDS = {"llama": to_fields(LLAMA), "gpt2": json.loads((STORIES / "config.json").read_text())}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
LAYER = "layers.1.mlp.up_proj"


def words(rows, bits=4):
    """Each row of codes (R, C) packed along itself, the first in the lowest bits: int32."""
    eights = rows.unflatten(1, (-1, 32 // bits)).flip(2).tolist()
    digits = [["".join(f"{c:0{bits // 4}x}" for c in part) for part in row] for row in eights]
    numbers = [[int(part, 16) for part in row] for row in digits]
    return torch.from_numpy(np.array(numbers, np.uint32).view(np.int32))


def draw(seed, rows, columns, count, bits=4, zero=None):
    """Codes (N, K), scales and zeros (N, G)."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=random)
    scale = (torch.randn(rows, count, generator=random) / 100).half()
    zeros = torch.randint(0, 2**bits, (rows, count), generator=random)
    return codes, scale, zeros if zero is None else torch.full_like(zeros, zero)


def expected(codes, scale, zeros):
    index = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
    return ((codes - zeros[:, index]) * scale.double()[:, index]).float()


def gptq_parts(codes, scale, zeros, bits=4, less=1):
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(((zeros - less) % 2**bits).t(), bits),
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
    fields = FIELDS["llama"] | {"quantization_config": options}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors, stored = random_tensors(LLAMA), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        point, first = first or zero, None
        drawn = draw(len(stored), rows, columns, columns // 8, options.get("bits", 4), point)
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
    model = FolderModel(folder)
    assert list(tensors) == list(model.config.shapes()) and len(model.quantized) == 14
    for name, want in tensors.items():
        tensor = model.read(name)
        assert isinstance(tensor, QuantizedMatrix) == (name in model.quantized)
        values = tensor.dequantized() if isinstance(tensor, QuantizedMatrix) else tensor
        assert torch.equal(values, want), name


@pytest.mark.parametrize("options", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_a_model(tmp_path, options):
    assert_read(tmp_path, write(tmp_path, options))


@pytest.mark.parametrize("less", [0, 1])
def test_the_version_of_a_gptq_file_is_that_of_all_its_zeros(tmp_path, less):
    """Symmetric files lie about it, so their zeros count; others are what they state, also where
    all zeros of a layer happen to look like those of a symmetric file."""
    lie, truth = ("gptq", "gptq_v2")[less], ("gptq_v2", "gptq")[less]
    for bits in (4, 8):
        symmetric = GPTQ | {"bits": bits, "sym": True, "checkpoint_format": lie}
        tensors = write(tmp_path, symmetric, zero=2 ** (bits - 1), bits=bits, less=less)
        assert_read(tmp_path, tensors)
    stated = GPTQ | {"checkpoint_format": truth}
    other = 7 + 2 * less  # stored, it is the middle of the other version
    tensors = write(tmp_path, stated, first=other, less=less)
    assert_read(tmp_path, tensors)


def test_gptq_adds_one_within_a_field():
    """A zero of 0 is stored as 15; one more must not reach the field beside it."""
    codes, scale, zeros = draw(0, 16, 8, 1)
    zeros[::3] = 0
    parts, options = gptq_parts(codes, scale, zeros), {"bits": 4, "group_size": 8}
    ours = gptq(parts, (16, 8), options, 1)
    assert torch.equal(ours.dequantized(), expected(codes, scale, zeros))


@pytest.mark.parametrize(
    "changed, tensors, reason",
    [
        ({"quant_method": "fp8"}, {}, "its quant_method is 'fp8', and only gptq, awq"),
        ({"quant_method": "compressed-tensors", "format": "marlin"}, {}, "its format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, {}, "only 4 bits in the packing"),
        ({"bits": 3}, {}, "codes of 3 bits are not read, only 4 or 8"),
        ({}, {f"{LAYER}.g_idx": torch.arange(64).flip(0) // 8}, "(desc_act) are not read"),
        ({}, {f"{LAYER}.scales": None}, f"{LAYER} are no gptq: scales is missing"),
        ({}, {f"{LAYER}.bias": torch.ones(96)}, f"{LAYER}.bias is none of the model"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, changed, tensors, reason):
    write(tmp_path, GPTQ, changes=tensors)
    fields = FIELDS["llama"] | {"quantization_config": GPTQ | changed}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="cannot be opened as a quantized model: ") as caught:
        model = FolderModel(tmp_path)
        for name in model.config.shapes():
            model.read(name)
    assert reason in str(caught.value)


def test_int8_codes_with_zeros_of_their_own_are_refused():
    """They were read as if all zeros were 0."""
    zeros = torch.zeros(4, 1, dtype=torch.int8)
    parts = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    assert compressed(parts | {"weight_zero_point": zeros}, (4, 8), {}).bits == 8
    with pytest.raises(Unfit, match="zeros of their own"):
        compressed(parts | {"weight_zero_point": zeros + 3}, (4, 8), {})


# ---- writing ----


def quantized(config, *formats):
    """Tensors as `FolderModel.read` returns them, the projections in `formats` by turns."""
    tensors, turns = {}, itertools.cycle(formats)
    for name, tensor in random_tensors(config).items():
        weight = tensor.t().contiguous() if name.endswith(PROJECTIONS) else tensor
        projection = name.endswith(("proj.weight", "c_attn.weight", "c_fc.weight"))
        tensors[name] = next(turns).quantized(name, weight) if projection else tensor
    return tensors


@pytest.mark.parametrize("packed", [True, False], ids=["int4", "int8"])
@pytest.mark.parametrize("family", FIELDS)
def test_a_folder_is_read_as_it_was_written(tmp_path, family, packed):
    fields, out = FIELDS[family], tmp_path / "out"
    formats = (INT4_ZERO, INT8) if packed else (INT8, INT8_GROUPS)
    tensors = quantized(config_of(fields), *formats)
    write_folder(out, fields, tensors, [STORIES / "vocab.json"])
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors", "vocab.json"}
    model = FolderModel(out)
    assert model.config == config_of(fields)
    for name, tensor in tensors.items():
        ours = model.read(name)
        if isinstance(tensor, QuantizedMatrix):
            assert isinstance(ours, QuantizedMatrix) and ours.bits == tensor.bits
            assert torch.equal(ours.codes, tensor.codes) and torch.equal(ours.scale, tensor.scale)
        else:
            assert isinstance(ours, torch.Tensor) and torch.equal(ours, tensor)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    inputs = [scheme["input_activations"] for scheme in config["config_groups"].values()]
    sizes = {kind.get("group_size") for kind in inputs if kind}  # by the token, or as the weights
    assert sizes == (set() if packed else {None, 32})


def test_compressed_tensors_reads_what_was_written(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensors = quantized(LLAMA, INT4_ZERO, INT8)
    write_folder(tmp_path / "out", FIELDS["llama"], tensors)
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


def test_a_place_that_is_taken(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/out"):
        with pytest.raises(UserError, match="cannot be written"):
            write_folder(tmp_path / place, FIELDS["llama"], {})
