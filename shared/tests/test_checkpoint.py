"""Checkpoints of transformers in every accepted spelling; invalid folders, names and configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import catalog, checkpoint, models
from shared.checkpoint import WEIGHTS, Config, load
from shared.errors import UserError
from shared.peers import transformers_model
from shared.testing import random_checkpoint
from stage01_forward.attention import Recompute

Tensors = dict[str, torch.Tensor]
SIZES: Any = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers_model(random_checkpoint(Config(**SIZES)), torch.float32)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Save the weights again after `change`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    changed = {name: tensor.clone().contiguous() for name, tensor in change(tensors).items()}
    save_file(changed, folder / WEIGHTS)


def assert_same(ours: Tensors, model: Any) -> None:
    theirs = model.transformer.state_dict()
    assert list(ours) == list(theirs)  # in the model's order, too
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def refusal(call: Callable[[], object]) -> str:
    """The message of the UserError that `call` must raise: one line."""
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_folder_of_transformers(folder, model, tmp_path):
    before = (folder / WEIGHTS).read_bytes()
    loaded = load(str(folder))
    assert_same(loaded.tensors, model)
    assert (loaded.config, loaded.folder) == (Config(**SIZES, name="gpt2"), folder)
    assert loaded.config.parameter_count == model.num_parameters()
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / WEIGHTS).exists()
    assert_same(load(str(tmp_path)).tensors, model)
    loaded.tensors["wte.weight"].zero_()
    assert (folder / WEIGHTS).read_bytes() == before


def test_other_spellings_give_the_same_tensors(folder, model):
    """Without the prefix, with the masks of 2019, and with the tied output layer."""
    mask = torch.tril(torch.ones(1, 1, 32, 32)).to(torch.uint8)
    extra = {"h.1.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}

    def change(tensors: Tensors) -> Tensors:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return plain | extra | {"lm_head.weight": plain["wte.weight"]}

    rewrite(folder, change)
    assert_same(load(str(folder)).tensors, model)


def test_an_output_layer_of_its_own(tmp_path):
    twin = transformers_model(random_checkpoint(Config(**SIZES, tied=False)), torch.float64)
    twin.save_pretrained(tmp_path)
    loaded, ids = load(str(tmp_path)), torch.tensor([5, 9, 2])
    assert loaded.config.parameter_count == sum(p.numel() for p in twin.parameters())
    model = models.load_model(loaded)
    logits = model.logits(model(ids, torch.arange(3), Recompute().attend))
    torch.testing.assert_close(logits, twin(ids[None]).logits[0].detach(), rtol=0, atol=1e-9)


DEEPER, SHARDS = SIZES | {"n_layer": 5}, {"weight_map": {"wte.weight": "../model.safetensors"}}
MATRIX = "h.0.attn.c_attn.weight"
FAULTS: list[tuple[Any, str]] = [  # a change of the tensors, or files, of which None is removed
    (lambda ts: ts | {"extra": torch.zeros(2)}, "unexpected extra"),
    (lambda ts: ts | {f"transformer.{MATRIX}": torch.zeros(72, 24)}, f"misshapen {MATRIX}"),
    (lambda ts: {name: ts[name].char() for name in ts}, "not of a floating-point type wte.weight"),
    (lambda ts: ts | {"lm_head.weight": torch.zeros(101, 24)}, "differs from wte.weight"),
    ({"config.json": None}, "config.json is missing"),
    ({"config.json": b"\x80\x04"}, "config.json cannot be read"),
    ({"config.json": b"[" * 100_000}, "config.json is not JSON"),
    ({WEIGHTS: None, "pytorch_model.bin": b""}, "pytorch_model.bin: other formats may run code"),
    ({WEIGHTS: b"version https://git-lfs.github.com"}, "truncated, corrupt or not safetensors"),
    (
        {"config.json": json.dumps(DEEPER).encode()},
        "missing h.2.ln_1.weight, h.2.ln_1.bias, h.2.attn.c_attn.weight and 33",
    ),
    (
        {WEIGHTS: None, checkpoint.INDEX: json.dumps(SHARDS).encode()},
        "../model.safetensors, which is not in its folder",
    ),
]


@pytest.mark.parametrize(("spoil", "words"), FAULTS, ids=[words[:40] for _, words in FAULTS])
def test_each_fault_of_a_folder_is_one_sentence(folder, spoil, words):
    if callable(spoil):
        rewrite(folder, spoil)
        spoil = {}
    for name, data in spoil.items():
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)
    assert words in refusal(lambda: load(str(folder)))


def test_an_unknown_name_raises_with_the_known_ones(tmp_path, monkeypatch):
    for name in ("", "gpt5", "/no/such/folder", "a/b/c", "nul\0", "x" * 5000):
        message = refusal(lambda: load(name))  # noqa: B023
        assert all(known in message for known in ("stories", "gpt2-medium", "owner/name"))
        assert len(message) < 400
    (file := tmp_path / "model.bin").touch()
    assert "is a file: give a .gguf file or" in refusal(lambda: load(str(file)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "is not installed" in refusal(lambda: catalog.checked("smollm2"))
    for name in catalog.presets():  # of all families
        assert catalog.checked(name) == name


def test_no_network_and_names_that_the_hub_refuses(monkeypatch, tmp_path):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("gpt2", "a..b/c"):
        message = refusal(lambda: load(name))  # noqa: B023
        assert f"{name} cannot be downloaded" in message and "--model stories" in message


def test_configs_that_are_refused():
    """But not for an end outside the vocabulary: transformers saves GPT-2's for any small model."""
    assert Config.from_dict(SIZES | {"eos_token_id": [7, 50256]}).eos_ids == (7,)
    for field, value in (
        *(("n_embd", "24"), ("n_head", 5), ("activation_function", "relu")),
        *(("n_layer", 10**9), ("vocab_size", 2**25), ("n_positions", 0)),
    ):
        assert field in refusal(lambda: Config.from_dict(SIZES | {field: value}))  # noqa: B023
