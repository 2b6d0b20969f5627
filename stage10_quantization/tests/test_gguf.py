"""GGUF files that the package `gguf` writes, as we read them; and files that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from shared import models
from shared.checkpoint import random_tensors
from shared.errors import UserError
from shared.files import read_json
from shared.tokenizer import load_tokenizer
from stage08_llama.config import LlamaConfig
from stage08_llama.rope import Rope, frequencies
from stage08_llama.tests.folders import to_fields
from stage10_quantization import gguf_file
from stage10_quantization.gguf_file import GGUFModel, unpacked
from stage10_quantization.matrix import QuantizedMatrix

LLAMA = LlamaConfig(64, 32, 64, 2, 4, 2, 16, 1e-5, (3,), False, "m", n_inner=256)
MODELS = {
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope=Rope(5e5, "llama3", 8.0, 8192), head_dim=32, tied=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=32),
}
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]  # that Python can write
LARGE = ["Q4_K", "Q5_K", "Q6_K"]  # blocks of 256, in random bytes


def metadata_of(config) -> dict[str, Any]:
    fields = to_fields(config) | {"rope_theta": config.rope.theta}
    kind = fields["model_type"]
    ends = dict(zip(("eos", "eot"), config.eos_ids, strict=False))
    values = {f"{kind}.{key}": fields[name] for key, name in gguf_file.SIZES.items()}
    return values | {f"tokenizer.ggml.{end}_token_id": token for end, token in ends.items()}


def stored_values(name, tensor, config):
    """A tensor of config.shapes, with rows as the file has them."""
    if to_fields(config)["model_type"] == "llama" and name.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        pairs = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
        return pairs.transpose(1, 2).flatten(0, 2)
    return tensor


def write(path, config, metadata=None, drop=(), **options):
    """A file with random weights in all KINDS and LARGE. Returns the values of its tensors, as the
    package dequantizes them, in the file's order."""
    draw = np.random.default_rng(0)
    metadata = metadata_of(config) | (metadata or {})
    kind = next(iter(metadata)).partition(".")[0]
    writer = gguf.GGUFWriter(path, kind, **options)
    for key, value in metadata.items():
        add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{add[type(value)]}")(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.n_layer)
    values = {}
    for place, (name, tensor) in enumerate(random_tensors(config).items()):
        full = name if name.startswith("lm_head") else f"model.{name}"
        their_name = names.get_name(full, (".weight", ".bias"))
        data = stored_values(name, tensor, config).contiguous().numpy()
        form = gguf.GGMLQuantizationType.F32
        if data.ndim == 2:
            form = gguf.GGMLQuantizationType[KINDS[place % len(KINDS)]]
            data = gguf.quantize(data, form)
            if data.shape[1] and name.endswith("down_proj.weight"):
                form = gguf.GGMLQuantizationType[LARGE[place % 3]]
                size = gguf.GGML_QUANT_SIZES[form][1]
                data = draw.integers(0, 60, (tensor.shape[0], size), dtype=np.uint8)
        if their_name in drop:
            continue
        assert their_name is not None
        values[name] = torch.from_numpy(gguf.dequantize(data, form).astype(np.float32))
        writer.add_tensor(their_name, data, raw_dtype=form)
    if config.rope.kind == "llama3":
        plain = frequencies(Rope(config.rope.theta), config.head_dim)
        writer.add_tensor(
            "rope_freqs.weight", (plain / frequencies(config.rope, config.head_dim)).numpy()
        )
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return values


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_the_package_reads(tmp_path, name):
    config, path = MODELS[name], tmp_path / "m.gguf"
    values = write(path, config)
    model = GGUFModel(path)
    assert model.config == config
    kept = 0
    for name, want in values.items():
        tensor = model.read(name)
        assert isinstance(tensor, QuantizedMatrix) == (name in model.quantized)
        if isinstance(tensor, QuantizedMatrix):
            kept += 1
            tensor = tensor.dequantized()
        assert tuple(tensor.shape) == config.shapes()[name]
        assert torch.equal(stored_values(name, tensor.float(), config), want), name
    assert kept >= 4


@pytest.mark.parametrize("kind", gguf_file.CODES)
def test_codes_are_those_of_the_package(kind):
    """Of random bytes: all bits of the scales too, NaN, infinity, subnormal numbers, minus zero."""
    bits, size = gguf_file.CODES[kind]
    octets = np.random.default_rng(0).integers(0, 256, (900, 3 * size), dtype=np.uint8)
    matrix = unpacked(torch.from_numpy(octets), kind)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(octets, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(matrix.dequantized().numpy(), theirs, equal_nan=True)
    least = 0 if matrix.minimum is not None else -(2 ** (bits - 1))
    assert matrix.bits == bits and matrix.group == 32
    assert least <= int(matrix.codes.min()) and int(matrix.codes.max()) < least + 2**bits


def tokenizer_of(folder):
    """The metadata of a folder's tokenizer.json, a byte-level BPE that cuts as Qwen does."""
    fields = read_json(folder / "tokenizer.json")
    vocabulary, added = fields["model"]["vocab"], fields["added_tokens"]
    size = read_json(folder / "config.json")["vocab_size"]
    tokens, types = [f"[unused{row}]" for row in range(size)], [5] * size
    for token, row in vocabulary.items():
        tokens[row], types[row] = token, 1
    for entry in added:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in fields["model"]["merges"]]
    values: dict[str, object] = {"model": "gpt2", "pre": "qwen2", "merges": merges}
    values |= {"tokens": tokens, "token_type": types, "eos_token_id": tokens.index("<|im_end|>")}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_tokenizer_and_template_are_read(chatty, tmp_path):
    template = {"tokenizer.chat_template": "{{ messages }}"}
    rows = read_json(chatty / "config.json")["vocab_size"]
    write(tmp_path / "m.gguf", replace(LLAMA, vocab_size=rows), tokenizer_of(chatty) | template)
    theirs: Any = load_tokenizer(chatty)
    folder = models.load(str(tmp_path / "m.gguf")).folder
    ours: Any = load_tokenizer(folder)
    for text in ("12 x 345\u00bd", "  two\n\n  spaces ", "na\u00efve \u4e2d", "<|im_end|>", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.control == theirs.control and ours.eos_id == theirs.eos_id
    assert folder and "{{ messages }}" in (folder / "tokenizer_config.json").read_text()


def refusal(path):
    with pytest.raises(UserError) as caught:
        models.load(str(path))
    return str(caught.value)


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    for metadata, drop, reason in (
        ({"llama.key": 1}, (), "it sets llama.key, which our model does not implement"),
        ({"llama.attention.value_length": 18}, (), "attention.value_length is 18, not 16"),
        ({}, ("blk.1.attn_q.weight",), "it has no tensor for layers.1.self_attn.q_proj.weight"),
        ({"llama.block_count": 1}, (), "the tensor 'blk.1.attn_k.weight' is none of its archi"),
        ({"tokenizer.ggml.model": "gpt2"}, (), "cuts text by the rules 'None', not gpt2 by smollm"),
    ):
        write(path, LLAMA, metadata, drop)
        assert reason in refusal(path)
    write(path, LLAMA, endianess=gguf.GGUFEndian.BIG)
    assert "m.gguf is big-endian, for other processors" in refusal(path)
    write(path, LLAMA)
    octets = path.read_bytes()
    path.write_bytes(octets.replace(b"llama", b"mamba"))
    assert "its architecture is 'mamba', none of llama, " in refusal(path)
    path.write_bytes(octets[:3000])
    assert "it is cut, corrupt or no GGUF file" in refusal(path)
