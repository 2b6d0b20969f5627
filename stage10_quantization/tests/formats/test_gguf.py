"""GGUF files: models that are written and read, and files that are wrong in every way."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.checkpoint import random_tensors
from shared.config import Config
from shared.errors import UserError
from stage08_llama.config import LlamaConfig
from stage08_llama.rope import Rope
from stage10_quantization.formats.blocks import FORMATS
from stage10_quantization.formats.gguf import GGUF, NUMBERS
from stage10_quantization.formats.gguf_model import PROJECTIONS, GGUFModel
from stage10_quantization.formats.gguf_writer import write_gguf
from stage10_quantization.layers import QuantizedMatrix

LLAMA = LlamaConfig(64, 32, 64, 2, 4, 2, 16, 1e-5, (3,), False, "m", n_inner=96)
MODELS = {
    "gpt2": Config(64, 32, 32, 2, 2, eos_ids=(3, 5), name="m"),
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope=Rope(5e5, "llama3", 8.0, 8192), head_dim=32, tied=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=32),
}


def matrix(weight, bits, minimum=False):
    """Any matrix (N, K) in groups of 32, with scales that float16 holds."""
    groups = weight.float().unflatten(1, (-1, 32))
    low = groups.amin(-1).half().float()
    if minimum:
        scale = ((groups.amax(-1) - low) / (2**bits - 1)).half().float()
        codes = ((groups - low[:, :, None]) / scale[:, :, None]).round().clamp(0, 2**bits - 1)
        return QuantizedMatrix(codes.flatten(1).to(torch.int8), scale, low, bits)
    scale = (groups.abs().amax(-1) / 2 ** (bits - 1)).half().float()
    codes = (groups / scale[:, :, None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return QuantizedMatrix(codes.flatten(1).to(torch.int8), scale, None, bits)


def quantized(config):
    """Random tensors as a reader returns them: Q8_0, Q4_0, Q4_1, and floats."""
    tensors = {}
    for place, (name, tensor) in enumerate(random_tensors(config).items()):
        conv = name.endswith(PROJECTIONS)
        whole = tensor.ndim == 2 and name not in ("wpe.weight", "lm_head.weight")
        kind = [(8,), (4,), (4, True)][place % 3]
        tensors[name] = matrix(tensor.t() if conv else tensor, *kind) if whole else tensor
    return tensors


def plain(tensors):
    """Floats in the shapes of the config."""
    floats = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedMatrix):
            tensor = tensor.dequantized()
            tensor = tensor.t() if name.endswith(PROJECTIONS) else tensor
        floats[name] = tensor
    return floats


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read_as_it_was_written(tmp_path, name):
    config, path = MODELS[name], tmp_path / "m.gguf"
    tensors = quantized(config)
    write_gguf(path, config, tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    model = GGUFModel(path)
    assert model.config == config and model.names == list(tensors)
    read = {name: model.read(name) for name in model.names}
    for name, tensor in tensors.items():
        assert model.is_quantized(name) == isinstance(tensor, QuantizedMatrix)
        assert type(read[name]) is type(tensor)
    ours, theirs = plain(read), plain(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == config.shapes()
    assert all(torch.equal(ours[name], theirs[name]) for name in tensors)


def test_the_package_gguf_reads_what_was_written(tmp_path):
    """With q and k in the order of llama.cpp, which rotates neighbours."""
    gguf = pytest.importorskip("gguf", reason="requirements-formats.txt is not installed")
    tensors = quantized(LLAMA)
    write_gguf(tmp_path / "m.gguf", LLAMA, tensors.items(), {"tokenizer.ggml.model": "none"})
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    values = plain(tensors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in values.items():
        theirs = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = theirs.reshape(-1, 2, LLAMA.head_dim // 2, theirs.shape[-1])
            theirs = halves.swapaxes(1, 2).reshape(theirs.shape)
        spelled = name if name.startswith("lm_head") else f"model.{name}"
        ours = stored.pop(names.get_name(spelled, try_suffixes=(".weight",)))
        assert np.array_equal(ours, theirs), name
    assert not stored


@pytest.mark.parametrize("kind", FORMATS)
def test_all_types_in_a_file(tmp_path, kind):
    """Rows of several blocks, in a file that the package `gguf` wrote."""
    gguf = pytest.importorskip("gguf", reason="requirements-formats.txt is not installed")
    form, number = FORMATS[kind], gguf.GGMLQuantizationType[kind]
    octets = np.random.default_rng(0).integers(0, 60, (5, 3 * form.size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", octets, raw_dtype=number)
    writer.add_tensor("y", np.arange(6, dtype=np.float32).reshape(2, 3))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    file = GGUF(tmp_path / "m.gguf")
    ours = file.read("x")
    assert isinstance(ours, QuantizedMatrix) and ours.bits == form.bits
    assert ours.codes.shape == (5, 3 * form.values)
    assert np.array_equal(ours.dequantized().numpy(), gguf.dequantize(octets, number))
    floats = file.read("y")
    assert isinstance(floats, torch.Tensor) and floats.tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- files that are wrong ----


def text(value):
    return struct.pack("<Q", len(value)) + value


def info(name=b"x", sizes=(32,), kind="Q8_0", offset=0):
    number = NUMBERS[kind] if isinstance(kind, str) else kind
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)


def file(infos=(), values=(), data=b"", version=3, counts=None, magic=b"GGUF"):
    counts = counts or (len(infos), len(values))
    octets = magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(infos)
    return octets + bytes(-len(octets) % 32) + data


WRONG = {
    "an empty file": (b"", "cannot mmap an empty file"),
    "no GGUF": (file(magic=b"GGML"), "it does not begin with GGUF"),
    "version 1": (file(version=1), "its version is 1, not 2 or 3"),
    "cut in the counts": (file()[:20], "it ends within its header"),
    "many tensors": (file(counts=(2**60, 0)), f"a list of {2**60} entries"),
    "a key of 2^60 bytes": (
        file(counts=(0, 1))[:24] + struct.pack("<Q", 2**60),
        "it ends within its header",
    ),
    "an array of 2^61 numbers": (
        file(values=[text(b"a") + struct.pack("<IIQ", 9, 10, 2**61)]),
        "it ends within its header",
    ),
    "an array of 2^60 texts": (
        file(values=[text(b"a") + struct.pack("<IIQ", 9, 8, 2**60)]),
        f"a list of {2**60} entries",
    ),
    "arrays in an array": (
        file(values=[text(b"a") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)]),
        "a value of the unknown type 9",
    ),
    "an unknown type of value": (
        file(values=[text(b"a") + struct.pack("<I", 13)]),
        "a value of the unknown type 13",
    ),
    "a text that is not UTF-8": (
        file(values=[text(b"\xff") + struct.pack("<IB", 0, 1)]),
        "a text that is not UTF-8",
    ),
    "a key twice": (file(values=2 * [text(b"a") + struct.pack("<IB", 0, 1)]), "'a' is there twice"),
    "an odd alignment": (
        file(values=[text(b"general.alignment") + struct.pack("<II", 4, 24)]),
        "its alignment is 24, not a power of two",
    ),
    "no alignment": (
        file(values=[text(b"general.alignment") + struct.pack("<II", 4, 0)]),
        "its alignment is 0",
    ),
    "a tensor twice": (file(2 * [info()]), "the tensor 'x' is there twice"),
    "nine dimensions": (file([info(sizes=9 * [32])]), "the tensor 'x' has 9 dimensions"),
    "no dimensions": (file([info(sizes=())]), "the tensor 'x' has 0 dimensions"),
    "a size of 0": (file([info(sizes=(32, 0))]), "the tensor 'x' has the sizes [32, 0]"),
    "a part of a block": (file([info(sizes=(33,))]), "the tensor 'x' has the sizes [33]"),
    "sizes that overflow": (
        file([info(sizes=(2**32, 2**32, 2))], data=bytes(64)),
        "the tensor 'x' ends after the file",
    ),
    "a cut tensor": (file([info()], data=bytes(33)), "the tensor 'x' ends after the file"),
    "an odd offset": (file([info(offset=8)], data=bytes(64)), "the tensor 'x' is at 8"),
    "tensors that overlap": (
        file([info(), info(b"y", offset=32)], data=bytes(99)),
        "the tensors 'x' and 'y' overlap",
    ),
    **{
        kind: (
            file([info(kind=kind)], data=bytes(99)),
            f"the tensor 'x' has the type {kind}, which",
        )
        for kind in ("Q2_K", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "F64")
    },
    "a type of the future": (file([info(kind=999)]), "the tensor 'x' has the type number 999"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(tmp_path, name):
    path = tmp_path / "m.gguf"
    octets, reason = WRONG[name]
    path.write_bytes(octets)
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        GGUF(path)
    message = str(error.value)
    assert message.startswith(f"{path} cannot be opened as a GGUF file: ") and "\n" not in message


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(UserError, match="it is no file"):
            GGUF(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_scale_that_is_not_finite_is_refused(tmp_path, kind):
    form = FORMATS[kind]
    octets = bytearray(8 * form.size)
    place = form.size + (208 if kind == "Q6_K" else 0)
    octets[place : place + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(file([info(sizes=(form.values, 8), kind=kind)], data=octets))
    with pytest.raises(UserError, match="the tensor 'x' has a scale that is not finite"):
        GGUF(tmp_path / "m.gguf").read("x")


def changed(path, change):
    """A copy of a model's file in which bytes are replaced."""
    octets = path.read_bytes()
    assert change[0] in octets
    path.write_bytes(octets.replace(*change))
    return path


@pytest.mark.parametrize(
    "change, reason",
    [
        ((b"llama", b"mamba"), "its architecture is 'mamba', not gpt2, llama"),
        ((b"blk.1.attn_q.", b"blk.7.attn_q."), "it has no tensor for layers.1.self_attn.q_proj"),
        ((b"output_norm.weight", b"output_nor!.weight"), "it has no tensor for norm.weight"),
        ((b"llama.rope.freq_base", b"llama.rope.\nreq_base"), r"it sets 'llama.rope.\\nreq_base'"),
        ((b"rope.freq_base", b"rope.freq_bass"), "it sets 'llama.rope.freq_bass', which our model"),
        (
            (b"key_length" + struct.pack("<II", 4, 16), b"key_length" + struct.pack("<II", 4, 18)),
            "attention.value_length is 16, not the heads' width, 18",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path, change, reason):
    write_gguf(tmp_path / "m.gguf", LLAMA, quantized(LLAMA).items())
    with pytest.raises(UserError, match=reason):
        GGUFModel(changed(tmp_path / "m.gguf", change))


def test_stretched_positions_of_the_metadata(tmp_path):
    path, prefix = tmp_path / "m.gguf", "llama.rope.scaling."
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 16.0}
    metadata = {prefix + name: value for name, value in scaling.items()}
    write_gguf(path, LLAMA, quantized(LLAMA).items(), metadata)
    config: Any = GGUFModel(path).config
    rope = config.rope
    assert (rope.kind, rope.factor, rope.trained, rope.fast) == ("yarn", 4.0, 16, 16.0)
    metadata[f"{prefix}yarn_log_multiplier"] = 0.1
    write_gguf(path, LLAMA, quantized(LLAMA).items(), metadata)
    with pytest.raises(UserError, match="it sets 'llama.rope.scaling.yarn_log_multiplier'"):
        GGUFModel(path)


def test_stretched_positions_must_be_those_of_llama3(tmp_path):
    config = MODELS["llama3"]
    write_gguf(tmp_path / "m.gguf", config, quantized(config).items())
    eight = np.float32(8).tobytes()
    with pytest.raises(UserError, match="the tensor 'rope_freqs.weight' is none of Llama 3's"):
        GGUFModel(changed(tmp_path / "m.gguf", (eight, np.float32(9).tobytes(), 1)))


def fuzzed(octets, source, header):
    """The file with bytes flipped, cut or grown, mostly in its header."""
    octets = bytearray(octets)
    for _ in range(source.choice([1, 1, 2, 5])):
        end = min(header, len(octets)) if source.random() < 0.9 else len(octets)
        place = source.randrange(end)
        kind = source.randrange(5)
        if kind == 0:
            octets[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            octets[place] = source.randrange(256)
        elif kind == 2:  # a size, a count or an offset
            large = source.choice([2**31, 2**60, 2**63 - 1, 2**64 - 1, source.randrange(2**16)])
            octets[place : place + 8] = struct.pack("<Q", large)
        elif kind == 3:
            del octets[place : place + source.choice([1, 8, len(octets)])]
        else:
            octets[place:place] = source.randbytes(source.choice([1, 8, 64]))
        if not octets:
            break
    return bytes(octets)


def attempt(path, octets):
    """Read all of a model; whether that worked. Anything but a UserError is a failure."""
    path.unlink(missing_ok=True)  # a new file: a mapped one must not change
    path.write_bytes(octets)
    try:
        model = GGUFModel(path)
        for name, shape in model.config.shapes().items():
            tensor = model.read(name)
            size = tensor.numel() if isinstance(tensor, torch.Tensor) else tensor.codes.numel()
            assert size == np.prod(shape)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return False
    return True


@pytest.mark.parametrize("rounds", [800, pytest.param(50_000, marks=pytest.mark.slow)])
def test_any_bytes_give_an_error_or_tensors(tmp_path, rounds):
    """Without a crash, and without more memory than a small multiple of this small file."""
    config = replace(LLAMA, n_layer=1)
    write_gguf(tmp_path / "m.gguf", config, quantized(config).items())
    octets = (tmp_path / "m.gguf").read_bytes()
    header = GGUF(tmp_path / "m.gguf").infos["token_embd.weight"].start
    source, path, opened = random.Random(rounds), tmp_path / "f.gguf", 0
    tracemalloc.start()
    try:
        for _ in range(rounds):
            opened += attempt(path, fuzzed(octets, source, header))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rounds / 50 < opened < rounds / 2  # both happen
    assert peak < 4e6, peak


def test_every_cut_of_a_file_is_refused(tmp_path):
    config = replace(LLAMA, n_layer=1)
    write_gguf(tmp_path / "m.gguf", config, quantized(config).items())
    octets = (tmp_path / "m.gguf").read_bytes()
    assert attempt(tmp_path / "f.gguf", octets)
    for end in range(0, len(octets) - 32, max(1, len(octets) // 300)):
        assert not attempt(tmp_path / "f.gguf", octets[:end])
