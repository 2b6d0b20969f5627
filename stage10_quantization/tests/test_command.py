"""`quantize`, and the command that opens what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared import catalog, cli, models
from shared.files import read_json
from stage01_forward.attention import Recompute
from stage09_kernels import library
from stage10_quantization.__main__ import main
from stage10_quantization.convert import INT4_ZERO, Quantize
from stage10_quantization.layers import QuantizedLinear
from stage10_quantization.quantize import TOKENIZER

IDS = torch.tensor([3, 250, 41, 7, 7, 110])
CHAT = "stories-chat"  # a Llama with a tokenizer and a chat template
WRITTEN = [(CHAT, "int8"), (CHAT, "int8-g32"), (CHAT, "int4"), ("stories", "int4")]


def quantize(name, weights, out, *rest):
    return main(["quantize", "--model", name, "--weights", weights, "--out", str(out), *rest])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command wrote, by model and weights."""
    place = tmp_path_factory.mktemp("written")
    for name, weights in WRITTEN:
        assert quantize(name, weights, place / name / weights) == 0
    return {(name, weights): place / name / weights for name, weights in WRITTEN}


def load(name, *conversion, **options):
    checkpoint = models.load(str(name), **options)
    checkpoint.conversion = Quantize(*conversion) if conversion else checkpoint.conversion
    return models.load_model(checkpoint, dtype=torch.float32)


def logits(model):
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), Recompute().attend))


def error(ours, theirs):
    return (logits(ours) - logits(theirs)).norm() / logits(theirs).norm()


def refusal(capsys, *arguments):
    """The message of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.run(main, list(map(str, arguments)))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in error
    return error.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("name", "weights"), WRITTEN)
def test_what_was_written_is_the_model_that_the_option_makes(written, name, weights):
    """But for int4, whose folders have whole zero points and activations that are not rounded."""
    folder = written[name, weights]
    option = (INT4_ZERO, "float") if weights == "int4" else (weights,)
    assert torch.equal(logits(load(folder)), logits(load(name, *option)))
    assert error(load(folder, weights="float32"), load(name, *option)) < 0.1
    again = [m for m in load(folder, weights="int8").modules() if hasattr(m, "in_features")]
    assert {(type(layer), layer.matrix.bits) for layer in again} == {(QuantizedLinear, 8)}
    for file in filter(Path.exists, (catalog.EMBEDDED[name] / file for file in TOKENIZER)):
        assert (folder / file.name).read_bytes() == file.read_bytes()
    groups = read_json(folder / "config.json")["quantization_config"]["config_groups"].values()
    inputs = [group["input_activations"] for group in groups]
    sizes = {kind.get("group_size") for kind in inputs if kind}  # by the token, or as the weights
    assert sizes == {"int8": {None, 32}, "int8-g32": {32}, "int4": set()}[weights]


@pytest.mark.skipif(not library.compiler(), reason="no C compiler (cc, gcc, clang)")
def test_a_text_is_continued_by_what_was_written(written, capsys):
    arguments = ["Hello", "--model", str(written[CHAT, "int4"]), "--kv-dtype", "int8"]
    assert main([*arguments, "--max-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Hello") and "quantized weights, keys and values in int8" in err


def test_gptq_reads_a_text(tmp_path):
    text, out, name = tmp_path / "text", tmp_path / "out", "stories"
    text.write_text("A long story about 12 cats. " * 200)
    assert quantize(name, "int8", out, "--method", "gptq", "--text", str(text)) == 0
    assert error(load(out), load(name)) < 0.1 and error(load(out), load(name, "int8")) > 0


def test_what_cannot_be_quantized_is_one_sentence(tmp_path, capsys):
    short, out = tmp_path / "short", tmp_path / "out"
    short.write_text("Too short.")
    command = ["quantize", "--weights", "int4", "--out", out]
    cases = {
        (*command, "--method", "gptq", "--text", short): "calibration text",
        (*command, "--method", "gptq", "--text", tmp_path / "none"): "cannot be read",
        (*command, "--text", short): "--method round reads no text",
        (*command, "--dtype", "bfloat16"): "leave --dtype out",
        (*command[:-1], short): "exists already",
        (*command[:-1], short / "out"): "cannot be written",
    }
    for arguments, message in cases.items():
        assert message in refusal(capsys, *arguments)
    assert not out.exists()
