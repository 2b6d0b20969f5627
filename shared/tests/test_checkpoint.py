"""Configs and random weights, checkpoints of transformers in every accepted spelling, and invalid
folders and names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import catalog, checkpoint, models
from shared.checkpoint import PRESETS, WEIGHTS, Config, check_vocabulary, load
from shared.errors import UserError
from shared.peers import transformers_model
from shared.testing import random_checkpoint
from shared.tokenizer import Tokenizer
from stage01_forward.attention import Recompute

Tensors = dict[str, torch.Tensor]
SIZES: Any = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers_model(random_checkpoint(Config(**SIZES)), torch.float32)


@pytest.fixture(scope="module")
def expected(model: Any) -> Tensors:
    return dict(model.transformer.state_dict())


@pytest.fixture(scope="module")
def original(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model.save_pretrained(folder := tmp_path_factory.mktemp("gpt2"))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Save the weights again after `change`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    changed = {name: tensor.clone().contiguous() for name, tensor in change(tensors).items()}
    save_file(changed, folder / WEIGHTS)


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert list(ours) == list(theirs)  # in the model's order, too
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def refusal(call: Callable[[], object]) -> str:
    """The message of the UserError that `call` must raise: one line."""
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_folder_of_transformers(original, model, expected, tmp_path):
    before = (original / WEIGHTS).read_bytes()
    loaded = load(str(original))
    assert_same(loaded.tensors, expected)
    assert loaded.config == Config(**SIZES, name=original.name)
    assert loaded.config.parameter_count == model.num_parameters()
    assert loaded.folder == original
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / WEIGHTS).exists()
    assert_same(load(str(tmp_path)).tensors, expected)
    loaded.tensors["wte.weight"].zero_()
    assert (original / WEIGHTS).read_bytes() == before


MASK = torch.tril(torch.ones(1, 1, 32, 32)).to(torch.uint8)
MASKS = {f"h.{layer}.attn.bias": MASK for layer in range(2)}  # in checkpoints of 2019
MASKS["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
SPELLINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "without prefix": lambda ts: {name.removeprefix("transformer."): ts[name] for name in ts},
    "old buffers": lambda ts: ts | MASKS,
    "lm_head": lambda ts: ts | {"lm_head.weight": ts["transformer.wte.weight"]},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_tensors(folder, expected, spelling):
    rewrite(folder, SPELLINGS[spelling])
    assert_same(load(str(folder)).tensors, expected)


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_dtypes_of_the_file_are_kept_or_converted(folder, expected, dtype):
    stored = {name: tensor.to(dtype).clone() for name, tensor in expected.items()}
    save_file(stored, folder / WEIGHTS)
    assert_same(tensors := load(str(folder)).tensors, stored)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    wide = {name: tensor.double() for name, tensor in stored.items()}
    assert_same(load(str(folder), dtype=torch.float64).tensors, wide)


def test_an_end_outside_the_vocabulary_ends_nothing(caplog):
    """transformers saves GPT-2's 50256 for any small model made with default settings."""
    assert Config.from_dict(SIZES | {"eos_token_id": [7, 50256]}).eos_ids == (7,)
    assert "50256" in caplog.text and "of 101 tokens" in caplog.text


def test_an_output_layer_of_its_own(tmp_path):
    twin = transformers_model(random_checkpoint(Config(**SIZES, tied=False)), torch.float64)
    twin.save_pretrained(tmp_path)
    loaded, ids = load(str(tmp_path)), torch.tensor([5, 9, 2])
    assert loaded.config.parameter_count == sum(p.numel() for p in twin.parameters())
    model = models.load_model(loaded)
    logits = model.logits(model(ids, torch.arange(3), Recompute().attend))
    torch.testing.assert_close(logits, twin(ids[None]).logits[0].detach(), rtol=0, atol=1e-9)


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {old: tensors[old] for old in tensors if old != f"transformer.{name}"}


def change(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors: tensors | {f"transformer.{name}": value(tensors[f"transformer.{name}"])}


def add(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.zeros(shape)}


TENSOR_FAULTS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (lambda ts: add("extra", 2)(drop("ln_f.bias")(ts)), "missing ln_f.bias; unexpected extra"),
    (change("h.0.attn.c_attn.weight", torch.t), "misshapen h.0.attn.c_attn.weight (72, 24) inste"),
    (change("h.0.ln_1.bias", torch.Tensor.char), "h.0.ln_1.bias (torch.int8)"),
    (add("lm_head.weight", 101, 24), "differs from wte.weight"),
]


def index(content: object) -> dict[str, Any]:
    """An index in place of the single file."""
    return {WEIGHTS: None, checkpoint.INDEX: json.dumps(content).encode()}


def shard(file: object) -> dict[str, Any]:
    return index({"weight_map": {"wte.weight": file}})


def config(**fields: int) -> dict[str, Any]:
    return {"config.json": json.dumps(SIZES | fields).encode()}


CORRUPT, ELSEWHERE = "truncated, corrupt or not safetensors", "which is not in its folder"
FILE_FAULTS: list[tuple[dict[str, Any], str]] = [  # None removes a file
    ({"config.json": None}, "config.json is missing"),
    *(({"config.json": text}, "cannot be read as JSON") for text in (b'{"n_', b"\x80\x04")),
    ({"config.json": b"[]"}, "is not a JSON object"),
    ({WEIGHTS: None, "pytorch_model.bin": b""}, "pytorch_model.bin: other formats may run code"),
    *(({WEIGHTS: data}, CORRUPT) for data in (b"", b"version https://git-lfs.github.com")),
    (config(n_layer=10**9), "n_layer in "),  # endless memory
    (config(n_embd=2**62), "must be a whole number from 1 to 16777216, not 46116860184273"),
    (config(n_layer=5), "missing h.2.ln_1.weight, h.2.ln_1.bias, h.2.attn.c_attn.weight and 33"),
    (config(vocab_size=200), "misshapen wte.weight (101, 24) instead of (200,"),
    (index({}), ELSEWHERE),
    *((shard(name), f"names {name}, {ELSEWHERE}") for name in ("../model.safetensors", "absent")),
]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [*TENSOR_FAULTS, *FILE_FAULTS],
    ids=lambda value: None if callable(value) else str(value)[:40],
)
def test_each_fault_of_a_folder_is_one_sentence(folder, spoil, words):
    if callable(spoil):
        rewrite(folder, spoil)
        spoil = {}
    for name, data in spoil.items():
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    assert words in refusal(lambda: load(str(folder)))


def test_an_unknown_name_raises_with_the_known_ones():
    for name in ("", "gpt5", "../a/b", "/no/such/folder", "a/b/c", "nul\0", "~no-user", "x" * 5000):
        message = refusal(lambda: load(name))  # noqa: B023
        assert all(known in message for known in ("stories", "gpt2-medium", "owner/name"))
        assert len(message) < 400
    for name in catalog.presets():  # of all families
        assert catalog.checked(name) == name


def test_no_network_and_names_that_the_hub_refuses(monkeypatch, tmp_path):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("gpt2", "a..b/c"):
        message = refusal(lambda: load(name))  # noqa: B023
        assert f"{name} cannot be downloaded" in message and "--model stories" in message


# ---- configs and random weights ------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    **dict(zip(SIZES, ((size, "must be") for size in (None, 0, 2.0, "24", 5)), strict=True)),
    "n_inner": (100, "n_inner to 100"),
    "activation_function": ("relu", "only gelu_new"),
    "scale_attn_weights": (False, "scale_attn_weights to False"),
    "add_cross_attention": (True, "add_cross_attention to True; only False works"),
}


@pytest.mark.parametrize("field", BAD)
def test_configs_that_are_refused(field):
    value, words = BAD[field]
    message = refusal(lambda: Config.from_dict(SIZES | {field: value}))
    assert words in message and field in message


def test_random_weights_are_those_of_the_seed_in_every_dtype():
    first, other = (load("tiny", random_weights=True, seed=seed) for seed in (7, 8))
    assert (first.config, first.folder) == (PRESETS["tiny"], None)
    assert {name: t.shape for name, t in first.tensors.items()} == first.config.shapes()
    assert not torch.equal(first.tensors["wte.weight"], other.tensors["wte.weight"])
    half = load("tiny", random_weights=True, seed=7, dtype=torch.bfloat16).tensors
    assert_same(half, {name: tensor.bfloat16() for name, tensor in first.tensors.items()})


def test_random_weights_need_a_config_alone(tmp_path):
    assert "There is no model" in refusal(lambda: load("owner/name", random_weights=True))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    loaded = load(str(tmp_path), random_weights=True)
    assert loaded.config.n_embd == 24 and loaded.folder is None  # no tokenizer there
    (tmp_path / "vocab.json").write_text("{}")
    assert load(str(tmp_path), random_weights=True).folder == tmp_path


def test_a_vocabulary_that_does_not_fit():
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, {"<256>": 256}, 256)
    check_vocabulary(tokenizer, Config(300, 8, 4, 1, 1))
    with pytest.raises(UserError, match="has 257 tokens and the model m only 256"):
        check_vocabulary(tokenizer, Config(256, 8, 4, 1, 1, name="m"))
