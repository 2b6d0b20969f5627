"""Folders with a quantization_config: whole models, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from shared import registry
from shared.checkpoint import random_tensors
from shared.errors import UserError
from stage08_llama.config import LlamaConfig, to_fields
from stage10_quantization.formats.folder import FolderModel
from stage10_quantization.layers import QuantizedMatrix

from .test_packed import awq_parts, config_groups, draw, expected, gptq_parts, values, words

LLAMA = LlamaConfig(64, 32, 16, 2, 2, 1, n_inner=24, tied=False)
READERS = {kind: registry.load(entry) for kind, entry in registry.CONFIGS.items()}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
COMPRESSED |= {"config_groups": config_groups(4)}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1}
GPT2 |= {"n_head": 2}


def packed_layer(method, name, shape):
    """The tensors of a layer (N, K), and its values."""
    codes, scale, zeros = draw(len(name), shape[0], shape[1], shape[1] // 8, 4)
    if method != "compressed-tensors":
        parts = {"gptq": gptq_parts, "awq": awq_parts}[method](codes, scale, zeros)
        return parts, expected(codes, scale, zeros)
    size = torch.tensor(shape)
    parts = {"weight_packed": words(codes, 4), "weight_scale": scale, "weight_shape": size}
    return parts, expected(codes, scale, torch.full_like(zeros, 8))


def write(folder, options, fields=None, **changes):
    """A model with quantized projections; returns its tensors in float32. changes: to the tensors
    of the file, None removes one."""
    fields = fields or to_fields(LLAMA)
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": options}))
    config = READERS[fields["model_type"]](fields, "", "")
    tensors, stored = random_tensors(config), {}
    for name, tensor in list(tensors.items()):
        conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        if not (conv or name.endswith("_proj.weight")):
            stored[name] = tensor
            continue
        shape = tuple(tensor.t().shape if conv else tensor.shape)
        parts, matrix = packed_layer(options["quant_method"], name, shape)
        tensors[name] = matrix.t() if conv else matrix
        stored |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
    stored = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
    prefix = "model." if isinstance(config, LlamaConfig) else ""
    spelled = {n if n.startswith("lm_head") else prefix + n: t for n, t in stored.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in spelled.items()},
        folder / "model.safetensors",
    )
    return tensors


@pytest.mark.parametrize("options", [GPTQ, AWQ, COMPRESSED], ids=lambda kind: kind["quant_method"])
@pytest.mark.parametrize("fields", [None, GPT2], ids=["llama", "gpt2"])
def test_a_model(tmp_path, options, fields):
    tensors = write(tmp_path, options, fields)
    model = FolderModel(tmp_path)
    assert model.names == list(tensors) == list(model.config.shapes())
    read = {name: model.read(name) for name in model.names}
    quantized = {name for name, tensor in read.items() if isinstance(tensor, QuantizedMatrix)}
    assert quantized == {name for name in model.names if model.is_quantized(name)}
    assert len(quantized) == (4 if fields else 14)
    plain = {
        name: values(tensor).t() if fields and name in quantized else values(tensor)
        for name, tensor in read.items()
    }
    assert all(torch.equal(plain[name], tensors[name]) for name in tensors)


def refused(folder, name=None):
    with pytest.raises(UserError) as info:
        model = FolderModel(folder)
        for each in [name] if name else model.names:
            model.read(each)
    text = str(info.value)
    assert text.startswith(f"{folder} cannot be opened as a quantized model: ")
    assert text.endswith(".") and "\n" not in text
    return text


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "torchao", "hqq", "quanto", None])
def test_other_methods_are_refused_by_name(tmp_path, method):
    write(tmp_path, GPTQ)
    fields = to_fields(LLAMA) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert f"its quant_method is '{method}', and only gptq, awq" in refused(tmp_path)


@pytest.mark.parametrize("format", ["nvfp4-pack-quantized", "float-quantized", "marlin-24", None])
def test_other_formats_are_refused_by_name(tmp_path, format):
    write(tmp_path, COMPRESSED | {"format": format})
    assert f"its format is '{format}', and only pack-quantized and" in refused(tmp_path)


def test_options_that_change_the_arithmetic_are_refused_by_name(tmp_path):
    write(tmp_path, COMPRESSED | {"transform_config": {"config_groups": {}}})
    assert "it has a transform_config" in refused(tmp_path)


LAYER = "layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "options, changes, reason",
    [
        (GPTQ, {f"{LAYER}.scales": None}, f"{LAYER} are no gptq: scales is missing"),
        (GPTQ, {f"{LAYER}.bias": torch.ones(24)}, "bias is not read"),
        (GPTQ, {"norm.weight": torch.ones(4)}, "norm.weight has the shape (4,) instead of (16,)"),
        (GPTQ, {"norm.weight": None}, "it has no tensor for norm.weight"),
        (GPTQ, {"norm.scales": torch.ones(4)}, "norm.weight is stored as scales, weight"),
        (GPTQ, {"other.qweight": torch.ones(4)}, "the tensor model.other.qweight is none of the"),
        (
            COMPRESSED,
            {f"{LAYER}.weight_scale": torch.full((24, 2), torch.inf)},
            f"{LAYER} are no compressed-tensors: weight_scale has a value that is not finite",
        ),
        (COMPRESSED, {f"{LAYER}.input_scale": torch.ones(1)}, "input_scale is not read"),
        (COMPRESSED, {f"{LAYER}.weight_scale": torch.ones(24, 3)}, "weight_scale has 3 groups"),
        (COMPRESSED, {f"{LAYER}.weight_shape": torch.tensor([24, 17])}, "weight_shape is [24, 17]"),
        (
            COMPRESSED,
            {f"{LAYER}.weight_packed": torch.ones(24, 4, dtype=torch.int32)},
            "weight_packed holds codes of 8 bits, which no config_groups names",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, options, changes, reason):
    write(tmp_path, options, **changes)
    assert reason in refused(tmp_path)
