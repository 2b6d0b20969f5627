"""`quantize`, and every command that opens what it wrote."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import cli, models
from shared.checkpoint import WEIGHTS
from shared.cli import load_model_from
from shared.server import own_server
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage06_serving.settings import Settings
from stage09_kernels import LLM, SamplingParams
from stage10_quantization import quantize
from stage10_quantization.__main__ import main
from stage10_quantization.layers import QuantizedEmbedding, QuantizedLinear

IDS = torch.tensor([3, 250, 41, 7, 7, 110])
TEXTS = ("12 x 345\u00bd", "  two\n\n  spaces ", "na\u00efve \u4e2d\U0001f600", "<|im_end|>", "")
TALK = [{"role": "user", "content": "Hello <|im_end|> 17"}]
WEIGHTS_WRITTEN = ("int8", "int8-g32", "int4")
TARGETS = [(weights, name) for weights in WEIGHTS_WRITTEN for name in ("folder", "one.gguf")]


def quantized(model, weights, out, *rest):
    return main(["quantize", "--model", str(model), "--weights", weights, "--out", str(out), *rest])


@pytest.fixture(scope="module")
def written(chatty, tmp_path_factory):
    """What the command wrote, by weights and target."""
    place = tmp_path_factory.mktemp("written")
    names = {}
    for weights, target in TARGETS:
        names[weights, target] = name = place / weights / target
        assert quantized(chatty, weights, name) == 0
    assert sorted(path.name for path in place.rglob(".*")) == []  # nothing half-written
    return names


def logits(model):
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), Recompute().attend))


def load(name, **options):
    loaded = models.load(str(name), **options)
    return models.load_model(loaded, dtype=torch.float32)


def refusal(capsys, *arguments):
    """The message of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.run(main, list(map(str, arguments)))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in error
    return error.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("weights", "target"), TARGETS)
def test_what_was_written_is_the_model_that_the_option_makes(chatty, written, weights, target):
    name = written[weights, target]
    model, plain = load(name), load(chatty)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.embed_tokens, QuantizedEmbedding)
    assert torch.nn.Linear not in {type(module) for module in model.modules()}
    assert model.config.shapes() == plain.config.shapes()
    assert model.config.eos_ids == plain.config.eos_ids
    if target == "folder" and weights != "int4":  # which a folder stores with whole zero points
        assert torch.equal(logits(model), logits(load(chatty, weights=weights)))
    exact, ours = logits(plain), logits(model)
    bits = 4 if weights == "int4" else 8
    assert (ours - exact).norm() / exact.norm() < {4: 0.5, 8: 0.1}[bits]
    floats = load(name, weights="float32")
    assert all(not isinstance(m, QuantizedLinear) for m in floats.modules())
    assert (logits(floats) - ours).norm() / exact.norm() < 0.1  # activations are rounded in `ours`
    again = load(name, weights="int8")
    assert type(again.layers[0].mlp.up_proj) is QuantizedLinear
    assert again.layers[0].mlp.up_proj.matrix.bits == 8


def test_files_are_small(chatty, written):
    numbers = sum(tensor.numel() for tensor in load_file(chatty / WEIGHTS).values())
    for (weights, target), name in written.items():
        size = (name / WEIGHTS if target == "folder" else name).stat().st_size
        vocabulary = 30_000  # bytes: the table of tokens, int8 in both, and the tokenizer
        most = {"int8": 0.28, "int8-g32": 0.28, "int4": 0.2}[weights]
        assert size < most * 4 * numbers + vocabulary


@pytest.mark.parametrize(("weights", "target"), TARGETS)
def test_tokenizer_and_template_travel(chatty, written, weights, target):
    loaded = models.load(str(written[weights, target]))
    tokenizers: list[Any] = [load_tokenizer(folder) for folder in (chatty, loaded.folder)]
    theirs, ours = tokenizers
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.control == theirs.control and ours.eos_id == theirs.eos_id
    assert ours.unused(loaded.config.vocab_size) == theirs.unused(loaded.config.vocab_size) != []


@pytest.mark.parametrize("target", ["folder", "one.gguf"])
def test_server_chats_with_the_official_client(written, target):
    name = written["int4", target]
    llm = LLM(str(name), kv_dtype="int8")
    expected = llm.chat(TALK, SamplingParams(max_tokens=12))
    shown = "folder" if target == "folder" else "one"
    with own_server(["--model", str(name), "--kv-dtype", "int8"], quiet=True) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == [shown]
        options: Any = {"model": shown, "messages": TALK, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**options)
        pieces = client.chat.completions.create(**options, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert whole.choices[0].message.content == expected.text == streamed
        assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
        log = server.stderr()
        assert "quantized weights, keys and values in int8" in log and "bfloat16" not in log


@pytest.mark.parametrize("method", ["gptq", "smoothquant+round", "smoothquant+gptq"])
def test_methods_read_a_text(chatty, tmp_path, method):
    text = tmp_path / "text"
    text.write_text("A long story about 12 cats. " * 200)
    rest, out = ("--method", method, "--text", str(text), "--windows", "2"), tmp_path / "out.gguf"
    assert quantized(chatty, "int4", out, *rest) == 0
    exact, ours = logits(load(chatty)), logits(load(out))
    assert (ours - exact).norm() / exact.norm() < 0.8
    assert not torch.equal(ours, logits(load(chatty, weights="int4")))


def test_ctrl_c_leaves_nothing(chatty, tmp_path, monkeypatch):
    tensors = iter(range(5))

    def interrupted(model, name):
        if next(tensors, None) is None:
            raise KeyboardInterrupt
        return tensor_of(model, name)

    tensor_of = quantize.tensor_of
    monkeypatch.setattr(quantize, "tensor_of", interrupted)
    for out in ("folder", "one.gguf"):
        with pytest.raises(KeyboardInterrupt):
            quantized(chatty, "int8", tmp_path / out)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_quantized_is_one_sentence(chatty, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(chatty, broken)
    tensors = load_file(broken / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, broken / WEIGHTS, {"format": "pt"})
    short, out = tmp_path / "short", tmp_path / "out"
    short.write_text("Too short.")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    command = ["quantize", "--weights", "int4", "--out"]
    cases = {
        (*command, out, "--model", broken): "1.mlp.up_proj.weight has NaN or infinity in row 3",
        (*command, out, "--method", "gptq", "--text", short, "--model", chatty): "calibration text",
        (*command, out, "--method", "gptq", "--text", tmp_path / "none"): "cannot be read",
        (*command, out, "--text", short): "--method round reads no text",
        (*command, taken): "exists already",
        (*command, out, "--dtype", "bfloat16"): "leave --dtype out",
        (*command, out, "--model", "nonsense"): "no model or folder",
        ("Hello", "--weights", "int8", "--model", short): "is a file",
        ("Hello", "--weights", "float32", "--dtype", "bfloat16"): "two formats for one model",
    }
    for arguments, message in cases.items():
        assert message in refusal(capsys, *arguments)
    assert not out.exists()


def test_what_cannot_be_opened_is_one_sentence(written, tmp_path, capsys):
    whole = written["int4", "one.gguf"].read_bytes()
    cut, foreign = tmp_path / "cut.gguf", tmp_path / "foreign.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    foreign.write_bytes(whole.replace(b"qwen2", b"other"))
    folder = tmp_path / "folder"
    shutil.copytree(written["int4", "folder"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "torchao"
    (folder / "config.json").write_text(json.dumps(config))
    reasons = {cut: "may be cut", foreign: "by the rules 'other'", folder: "'torchao'"}
    for name, message in reasons.items():
        assert message in refusal(capsys, "Hello", "--model", name)


def test_the_command_line_and_the_server_offer_the_same_values():
    fields = Settings.model_fields
    for name in ("weights", "kv_dtype"):
        assert "int8" in str(fields[name].description)
    options = Namespace(**{name: field.default for name, field in fields.items()}, seed=0)
    formats = {"weights": "int4", "kv_dtype": "int8"}
    vars(options).update(formats, linear="plain", threads=None)
    loaded = load_model_from(options)
    assert type(loaded.model.h[0].mlp.c_fc) is QuantizedLinear
    assert loaded.kv_dtype == torch.int8 and "int4 weights" in str(loaded)
