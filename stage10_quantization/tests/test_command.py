"""`quantize`, and the command that opens what it wrote."""

from __future__ import annotations

import pytest
import torch

from shared import cli, models
from stage01_forward.attention import Recompute
from stage10_quantization.__main__ import main
from stage10_quantization.layers import QuantizedEmbedding, QuantizedLinear

IDS = torch.tensor([3, 250, 41, 7, 7, 110])
WRITTEN = ("int8", "int8-g32", "int4")


def quantized(model, weights, out, *rest):
    return main(["quantize", "--model", str(model), "--weights", weights, "--out", str(out), *rest])


@pytest.fixture(scope="module")
def written(chatty, tmp_path_factory):
    """What the command wrote, by weights."""
    place = tmp_path_factory.mktemp("written")
    for weights in WRITTEN:
        assert quantized(chatty, weights, place / weights) == 0
    return {weights: place / weights for weights in WRITTEN}


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


@pytest.mark.parametrize("weights", WRITTEN)
def test_what_was_written_is_the_model_that_the_option_makes(chatty, written, weights):
    name = written[weights]
    model, plain = load(name), load(chatty)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.embed_tokens, QuantizedEmbedding)
    assert torch.nn.Linear not in {type(module) for module in model.modules()}
    assert (name / "tokenizer_config.json").read_text() == (
        chatty / "tokenizer_config.json"
    ).read_text()
    if weights != "int4":  # which a folder stores with whole zero points
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


def test_a_text_is_continued_by_what_was_written(written, capsys):
    arguments = ["Hello", "--model", str(written["int4"]), "--kv-dtype", "int8"]
    assert main([*arguments, "--max-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Hello") and "quantized weights, keys and values in int8" in err


def test_gptq_reads_a_text(chatty, tmp_path):
    text = tmp_path / "text"
    text.write_text("A long story about 12 cats. " * 200)
    rest, out = ("--method", "gptq", "--text", str(text)), tmp_path / "out"
    assert quantized(chatty, "int4", out, *rest) == 0
    exact, ours = logits(load(chatty)), logits(load(out))
    assert (ours - exact).norm() / exact.norm() < 0.8
    assert not torch.equal(ours, logits(load(chatty, weights="int4")))


def test_what_cannot_be_quantized_is_one_sentence(chatty, tmp_path, capsys):
    short, out = tmp_path / "short", tmp_path / "out"
    short.write_text("Too short.")
    command = ["quantize", "--weights", "int4", "--out", out]
    cases = {
        (*command, "--method", "gptq", "--text", short, "--model", chatty): "calibration text",
        (*command, "--method", "gptq", "--text", tmp_path / "none"): "cannot be read",
        (*command, "--text", short): "--method round reads no text",
        (*command, "--dtype", "bfloat16"): "leave --dtype out",
    }
    for arguments, message in cases.items():
        assert message in refusal(capsys, *arguments)
    assert not out.exists()
