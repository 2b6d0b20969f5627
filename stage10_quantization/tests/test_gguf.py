"""GGUF files that the package `gguf` writes, as we read them; and files that are wrong."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from shared import models
from shared.catalog import STORIES
from shared.checkpoint import random_tensors
from shared.errors import UserError
from shared.files import read_json
from shared.tokenizer import load_tokenizer
from stage08_llama.config import LlamaConfig
from stage08_llama.tests.folders import to_fields
from stage10_quantization import gguf_file
from stage10_quantization.gguf_file import unpacked
from stage10_quantization.gguf_tokenizer import CUTS

LLAMA = LlamaConfig(2050, 32, 64, 2, 4, 2, 16, 1e-5, (2047,), False, "m", n_inner=256)
MODELS = {"untied": LLAMA, "tied, wide heads": replace(LLAMA, head_dim=32, tied=True)}
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]  # that Python can write
LARGE = ["Q4_K", "Q5_K", "Q6_K"]  # blocks of 256, in random bytes
TEXTS = (
    *("Hello  world", "In 2024, 1234567 people", "a\n\n\n  b\t\tc   ", "\u00bc\u00b2 \u0663\u0664"),
    *("\u4e00\u4e8c\u4e09 na\u00efve", "\U0001f469\u200d\U0001f467 ok", "don't I'll WE'RE"),
    *("<|endoftext|>\n", "\u00a0x\u2003y", "   ", "", "\r\n\r\nx"),
)


def tokenizer_of(cut) -> dict[str, Any]:
    """The metadata of the tokenizer of stories, with a token of a user's and a row for none."""
    vocabulary = read_json(STORIES / "vocab.json")
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "<tool_call>", "[PAD]"]
    merges = (STORIES / "merges.txt").read_text("utf-8").splitlines()[1:]
    values = {"model": "gpt2", "pre": cut, "merges": merges, "tokens": tokens}
    values |= {"token_type": [1] * 2047 + [3, 4, 5], "eos_token_id": 2047}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def stored_values(name, tensor, config):
    """A tensor of config.shapes, with rows as the file has them."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        pairs = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
        return pairs.transpose(1, 2).flatten(0, 2)
    return tensor


def write(path, config, metadata=None, drop=(), **options):
    """A file with random weights in all KINDS and LARGE. Returns the values of its tensors, as the
    package dequantizes them, in the file's order."""
    draw = np.random.default_rng(0)
    fields = to_fields(config) | {"rope_theta": config.rope.theta}
    values = {f"llama.{key}": fields[name] for key, name in gguf_file.SIZES.items()}
    writer = gguf.GGUFWriter(path, "llama", **options)
    for key, value in (values | tokenizer_of("smollm") | (metadata or {})).items():
        add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{add[type(value)]}")(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layer)
    values = {}
    for place, (name, tensor) in enumerate(random_tensors(config).items()):
        full = name if name.startswith("lm_head") else f"model.{name}"
        their_name = names.get_name(full, (".weight", ".bias"))
        data = stored_values(name, tensor, config).contiguous().numpy()
        form = gguf.GGMLQuantizationType.F32
        if data.ndim == 2:
            form = gguf.GGMLQuantizationType[KINDS[place % len(KINDS)]]
            data = gguf.quantize(data, form)
            if name.endswith("down_proj.weight"):
                form = gguf.GGMLQuantizationType[LARGE[place % 3]]
                size = gguf.GGML_QUANT_SIZES[form][1]
                data = draw.integers(0, 60, (tensor.shape[0], size), dtype=np.uint8)
        if their_name in drop:
            continue
        assert their_name is not None
        values[name] = torch.from_numpy(gguf.dequantize(data, form).astype(np.float32))
        writer.add_tensor(their_name, data, raw_dtype=form)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return values


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_model_is_what_the_package_reads(tmp_path, config):
    path = str(tmp_path / "m.gguf")
    values, loaded = write(path, config), models.load(path, weights="float32")
    assert loaded.config == config and loaded.tensors.keys() == values.keys()
    for name, tensor in loaded.tensors.items():
        assert tuple(tensor.shape) == config.shapes()[name]
        assert torch.equal(stored_values(name, tensor.float(), config), values[name]), name
    stored: Any = models.load(path).conversion
    assert len(stored.matrices) >= 4


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


@pytest.mark.parametrize("cut", CUTS)
def test_tokenizer_and_template_are_read(tmp_path, cut):
    """Digits are cut one by one by the rules of SmolLM, and all else as GPT-2 does."""
    write(tmp_path / "m.gguf", LLAMA, tokenizer_of(cut) | {"tokenizer.chat_template": "{{ 1 }}"})
    folder = models.load(str(tmp_path / "m.gguf")).folder
    assert folder is not None
    ours: Any = load_tokenizer(folder)
    theirs = load_tokenizer(STORIES)
    for text in TEXTS:
        apart = cut == "smollm"
        spaced = "".join(
            f"\0{c}\0" if apart and unicodedata.category(c)[0] == "N" else c for c in text
        )
        assert ours.encode(text) == sum(map(theirs.encode, spaced.split("\0")), [])
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<tool_call>") == [2048] and ours.vocab_size == 2049
    assert ours.control == {"<|endoftext|>"} and ours.eos_id == theirs.eos_id
    assert "{{ 1 }}" in (folder / "tokenizer_config.json").read_text()


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
        (tokenizer_of("qwen2"), (), "cuts text by the rules 'qwen2', and only gpt2 by gpt-2 or"),
        ({"tokenizer.ggml.add_bos_token": True}, (), "(add_bos_token), which is not read"),
    ):
        write(path, LLAMA, metadata, drop)
        assert reason in refusal(path)
    write(path, LLAMA, endianess=gguf.GGUFEndian.BIG)
    assert "m.gguf cannot be opened: it is big-endian, for other processors" in refusal(path)
    write(path, LLAMA)
    octets = path.read_bytes()
    path.write_bytes(octets.replace(b"llama", b"mamba"))
    assert "its architecture is 'mamba', and only llama is read" in refusal(path)
    path.write_bytes(octets[:3000])
    assert "it is cut, corrupt or no GGUF file" in refusal(path)
