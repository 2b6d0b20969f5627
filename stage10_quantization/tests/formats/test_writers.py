"""Folders that are written, and that nothing is half-written. GGUF files: test_gguf.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from shared import models
from shared.checkpoint import random_tensors
from shared.errors import UserError
from shared.models import STORIES
from shared.tokenizer import load_tokenizer
from stage08_llama.config import to_fields
from stage10_quantization.formats.folder import FolderModel
from stage10_quantization.formats.folder_writer import write_folder
from stage10_quantization.formats.gguf_model import PROJECTIONS, GGUFModel
from stage10_quantization.formats.gguf_vocabulary import tokenizer_metadata
from stage10_quantization.formats.gguf_writer import write_gguf
from stage10_quantization.gguf_tokenizer import tokenizer_folder
from stage10_quantization.layers import QuantizedMatrix

from .test_folder import READERS
from .test_gguf import LLAMA, matrix, quantized

FIELDS = {"llama": to_fields(LLAMA), "gpt2": json.loads((STORIES / "config.json").read_text())}


SIDES = "weights", "input_activations"


def zero_points(weight):
    """A matrix (N, K) whose minima are whole multiples of its scales."""
    codes, scale = matrix(weight, 4).codes + 8, matrix(weight, 4).scale
    zeros = torch.arange(scale.numel()).view_as(scale) % 16
    return QuantizedMatrix(codes.to(torch.int8), scale, -(scale * zeros), 4)


def rows_of_bytes(weight):
    scale = weight.abs().amax(1, keepdim=True) / 128
    codes = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return QuantizedMatrix(codes, scale)


def tensors_of(config, packed):
    """Projections of int4 in both ways and int8, or of int8 in rows and groups."""
    groups = lambda w: matrix(w, 8)  # noqa: E731
    nibbles = lambda w: matrix(w, 4)  # noqa: E731
    kinds = [zero_points, rows_of_bytes, nibbles] if packed else [rows_of_bytes, groups]
    tensors = {}
    for place, (name, tensor) in enumerate(random_tensors(config).items()):
        weight = tensor.t() if name.endswith(PROJECTIONS) else tensor
        whole = name.endswith("proj.weight") or name.endswith(PROJECTIONS)
        tensors[name] = kinds[place % len(kinds)](weight.contiguous()) if whole else tensor
    return tensors


@pytest.mark.parametrize("packed", [True, False], ids=["int4", "int8"])
@pytest.mark.parametrize("family", FIELDS)
def test_a_folder_is_read_as_it_was_written(tmp_path, family, packed):
    fields, out = FIELDS[family], tmp_path / "out"
    tensors = tensors_of(READERS[family](fields, "out", ""), packed)
    write_folder(out, fields, tensors.items(), [STORIES / "vocab.json"], packed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors", "vocab.json"}
    model = FolderModel(out)
    assert model.config == READERS[family](fields, "out", "")
    assert set(model.names) == set(tensors)
    for name, tensor in tensors.items():
        ours = model.read(name)
        if isinstance(tensor, QuantizedMatrix):
            assert isinstance(ours, QuantizedMatrix) and ours.bits == tensor.bits
            assert torch.equal(ours.codes, tensor.codes) and torch.equal(ours.scale, tensor.scale)
            assert torch.equal(ours.dequantized(), tensor.dequantized())
        else:
            assert isinstance(ours, torch.Tensor) and torch.equal(ours, tensor)


def test_activations_are_rounded_by_the_token_or_as_the_weights_by_the_group(tmp_path):
    write_folder(tmp_path / "out", FIELDS["llama"], tensors_of(LLAMA, False).items(), (), False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sides = [
        [(scheme[side]["strategy"], scheme[side].get("group_size")) for side in SIDES]
        for scheme in config["config_groups"].values()
    ]
    assert sorted(sides) == [[("channel", None), ("token", None)], 2 * [("group", 32)]]


def test_compressed_tensors_reads_what_was_written(tmp_path):
    pytest.importorskip("compressed_tensors", reason="requirements-formats.txt is not installed")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensors = tensors_of(LLAMA, True)
    write_folder(tmp_path / "out", FIELDS["llama"], tensors.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    stored, compared = load_file(tmp_path / "out" / "model.safetensors"), 0
    for scheme in schemes:
        for layer in scheme.targets:
            prefix = f"{layer}."
            parts = {k.removeprefix(prefix): t for k, t in stored.items() if k.startswith(prefix)}
            theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
            ours = tensors[layer.removeprefix("model.") + ".weight"]
            assert isinstance(ours, QuantizedMatrix)
            exact = ours.minimum is None and theirs.dtype == torch.float32
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-4}  # of float16
            torch.testing.assert_close(theirs.float(), ours.dequantized(), **close)
            compared += 1
    assert compared == 14
    write_folder(tmp_path / "int8", FIELDS["llama"], tensors_of(LLAMA, False).items(), (), False)
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    sizes = {scheme.weights.group_size: scheme.input_activations.group_size for scheme in schemes}
    assert sizes == {None: None, 32: 32}


def test_minima_between_the_codes_need_a_gguf_file(tmp_path):
    tensors = random_tensors(LLAMA)
    name = "layers.0.self_attn.q_proj.weight"
    pairs = [(name, matrix(tensors[name], 4, True))]
    with pytest.raises(UserError, match=f"model.{name} has minima that are no whole multiples"):
        write_folder(tmp_path / "out", FIELDS["llama"], pairs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits, columns", [(6, 64), (4, 36)])
def test_codes_that_no_word_holds_are_refused(tmp_path, bits, columns):
    codes = torch.zeros(2, columns, dtype=torch.int8)
    pairs = [("x.weight", QuantizedMatrix(codes, torch.ones(2, 1), None, bits))]
    with pytest.raises(UserError, match=f"x.weight has {columns} columns of {bits} bits"):
        write_folder(tmp_path / "out", FIELDS["gpt2"], pairs)


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (QuantizedMatrix(torch.zeros(2, 32).char(), torch.ones(2, 2)), "in groups of 16"),
        (QuantizedMatrix(torch.zeros(2, 32).char(), torch.ones(2, 1), None, 6), "codes of 6 bits"),
        (QuantizedMatrix(torch.zeros(2, 32).char(), torch.full((2, 1), 1e5)), "float16 cannot"),
    ],
)
def test_matrices_that_no_block_holds_are_refused(tmp_path, tensor, reason):
    with pytest.raises(UserError, match=f"norm.weight has .*{reason}"):
        write_gguf(tmp_path / "m.gguf", LLAMA, [("norm.weight", tensor)])
    assert not list(tmp_path.iterdir())


def interrupted(tensors):
    yield from list(tensors.items())[:9]
    raise KeyboardInterrupt


def test_nothing_is_half_written(tmp_path):
    """Errors and interrupts leave what was there; a full disk is one sentence."""
    tensors, path, out = quantized(LLAMA), tmp_path / "m.gguf", tmp_path / "out"
    path.write_bytes(b"before")
    for write in (
        lambda: write_gguf(path, LLAMA, interrupted(tensors)),
        lambda: write_folder(out, FIELDS["llama"], interrupted(tensors_of(LLAMA, True))),
    ):
        with pytest.raises(KeyboardInterrupt):
            write()
    with pytest.raises(UserError, match="there is no tensor embed_tokens.weight"):
        write_gguf(path, LLAMA, list(tensors.items())[1:])
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
    write_gguf(path, LLAMA, tensors.items())
    assert GGUFModel(path).config == replace(LLAMA, name="m")
    with pytest.raises(UserError, match="cannot be written"):
        write_gguf(path / "m.gguf", LLAMA, tensors.items())
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(UserError, match="has files already"):
        write_folder(out, FIELDS["llama"], [])
    assert (out / "mine").exists()


def test_a_vocabulary_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = models.load("stories")
    metadata = tokenizer_metadata(STORIES, loaded.config)
    write_gguf(tmp_path / "m.gguf", loaded.config, loaded.tensors.items(), metadata)
    model = GGUFModel(tmp_path / "m.gguf")
    vocabulary = json.loads((STORIES / "vocab.json").read_text(encoding="utf-8"))
    kinds, tokens = (model.metadata[f"tokenizer.ggml.{name}"] for name in ("token_type", "tokens"))
    assert tokens == sorted(vocabulary, key=vocabulary.__getitem__)
    assert kinds.tolist() == [1 if token != "<|endoftext|>" else 3 for token in tokens]
    assert model.metadata["tokenizer.ggml.merges"] == metadata["tokenizer.ggml.merges"]
    assert model.config.eos_ids == loaded.config.eos_ids
    text = "Once upon a time, there were 123 dogs!"
    tokenizer = load_tokenizer(tokenizer_folder(model.metadata, model.file.error))
    assert tokenizer.encode(text) == load_tokenizer(STORIES).encode(text)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"model": {"type": "Unigram"}}, "it is Unigram over ByteLevel, not byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "it cuts text by rules that have no name"),
    ],
)
def test_other_tokenizers_are_not_written(tmp_path, change, reason):
    fields = {"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | change))
    with pytest.raises(UserError, match=reason):
        tokenizer_metadata(tmp_path, LLAMA)
