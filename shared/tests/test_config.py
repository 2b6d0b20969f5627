"""Configs, the random weights of a config, and the vocabulary that fits it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from shared.checkpoint import PRESETS, check_vocabulary, load, random_tensors
from shared.config import Config
from shared.errors import UserError
from shared.tokenizer import Tokenizer

SIZES = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}
BAD: dict[str, list[tuple[Any, str]]] = {
    **{field: [(value, "must be") for value in (None, 0, -1, 2.0, "24", True)] for field in SIZES},
    "n_head": [(0, "must be"), (5, "n_embd in config.json must be a multiple of n_head, which is")],
    "n_inner": [(100, "n_inner to 100")],
    "layer_norm_epsilon": [(value, "epsilon") for value in (0, math.nan, "1e-5")],
    "eos_token_id": [
        ("1", "eos_token_id in config.json must be a token id or a list, not '1'."),
        (True, "not True."),
        ([1, None], "not [1, None]."),
    ],
    "activation_function": [("relu", "only gelu_new"), (["gelu_new"], "to ['gelu_new']")],
    "scale_attn_weights": [(False, "scale_attn_weights to False")],
    "scale_attn_by_inverse_layer_idx": [(True, "scale_attn_by_inverse_layer_idx")],
    "reorder_and_upcast_attn": [(True, "reorder_and_upcast_attn")],
    "add_cross_attention": [(True, "add_cross_attention")],
    "tie_word_embeddings": [("no", "tie_word_embeddings in config.json must be true or false")],
}


@pytest.mark.parametrize("field", BAD)
def test_configs_that_are_refused(field):
    for value, words in BAD[field]:
        with pytest.raises(UserError) as caught:
            Config.from_dict({"model_type": "gpt2", **SIZES, field: value})
        assert words in str(caught.value) and field in str(caught.value)


def test_configs_that_are_accepted():
    tanh = {"activation_function": "gelu_pytorch_tanh"}
    for extra in ({}, tanh, {"n_inner": 96}, {"n_inner": None}):
        config = Config.from_dict({**SIZES, **extra}, "mine")
        assert (config.name, config.vocab_size, config.layer_norm_epsilon) == ("mine", 101, 1e-5)
    for value, eos_ids in ((None, ()), (0, (0,)), ([1, 2], (1, 2)), ([100, 101], (100,))):
        assert Config.from_dict({**SIZES, "eos_token_id": value}).eos_ids == eos_ids


def test_heads_of_keys_are_a_field_of_their_own():
    plain = Config(101, 64, 24, 3, 2)
    assert (plain.n_kv_head, plain.head_dim) == (2, 12)
    grouped = Config(101, 64, 24, 3, n_head=4, n_kv_head=2, head_dim=10)
    assert (grouped.n_kv_head, grouped.head_dim) == (2, 10)
    assert grouped.kv_bytes_per_token(torch.bfloat16) == 3 * 2 * 2 * 10 * 2
    with pytest.raises(ValueError, match="4 query heads"):
        Config(101, 64, 24, 3, n_head=4, n_kv_head=3)


def test_presets_are_the_published_models():
    counts = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168}
    counts |= {"gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    assert {name: PRESETS[name].parameter_count for name in counts} == counts
    assert {PRESETS[name].head_dim for name in counts} == {64}


def test_random_weights_are_those_of_the_seed_in_every_dtype():
    first, other = (load("tiny", random_weights=True, seed=seed) for seed in (7, 8))
    assert (first.config, first.folder) == (PRESETS["tiny"], None)
    shapes = {name: tuple(tensor.shape) for name, tensor in first.tensors.items()}
    assert shapes == first.config.shapes()
    assert not torch.equal(first.tensors["wte.weight"], other.tensors["wte.weight"])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        converted = load("tiny", random_weights=True, seed=7, dtype=dtype).tensors
        assert list(converted) == list(first.tensors)
        for name, tensor in first.tensors.items():
            assert torch.equal(converted[name], tensor.to(dtype))


def test_random_weights_are_spread_as_when_gpt2_training_begins():
    tensors = random_tensors(Config(500, 200, n_embd=128, n_layer=8, n_head=2))
    residual = 0.02 / 4  # 2 * 8 layers add to the residual stream
    spreads = {"wte": 0.02, "wpe": 0.01, "h.7.attn.c_attn": 0.02, "h.7.mlp.c_fc": 0.02}
    spreads |= {"h.0.attn.c_proj": residual, "h.7.mlp.c_proj": residual}
    for name, spread in spreads.items():
        weight = tensors[f"{name}.weight"]
        assert weight.std().item() == pytest.approx(spread, rel=0.03)
        assert abs(weight.mean().item()) < spread / 20
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            assert (tensor == (1 if name.endswith("weight") else 0)).all()


def test_random_weights_need_a_config_alone(tmp_path):
    for name in ("gpt5", "owner/name"):
        with pytest.raises(UserError, match="No model and no folder is called"):
            load(name, random_weights=True)
    with pytest.raises(UserError, match="config.json is missing"):
        load(str(tmp_path), random_weights=True)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    loaded = load(str(tmp_path), random_weights=True)
    assert loaded.config.n_embd == 24 and loaded.folder is None  # no tokenizer there
    (tmp_path / "vocab.json").write_text("{}")
    assert load(str(tmp_path), random_weights=True).folder == tmp_path


def test_vocabularies_that_fit_and_others(caplog):
    def check(eos_id: int | None, size: int, eos_ids: tuple[int, ...]) -> None:
        """A tokenizer of 256 bytes and 4 special tokens, and a model of `size` tokens."""
        special = {f"<{i}>": i for i in range(256, 260)}
        tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, special, eos_id)
        check_vocabulary(tokenizer, Config(size, 8, 4, 1, 1, eos_ids=eos_ids, name="m"))

    for fits in ((259, 260, (259,)), (259, 300, (0, 259)), (None, 260, (259,)), (259, 260, ())):
        check(*fits)
    assert caplog.text == ""
    check(259, 260, (7,))  # the model's end counts
    assert "with token 259 and the model" in caplog.text and "with 7" in caplog.text
    with pytest.raises(UserError, match="has 260 tokens and the model m only 259"):
        check(None, 259, ())
