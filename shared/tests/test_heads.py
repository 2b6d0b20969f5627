"""Folders of transformers with other ends of text and other output layers, through every engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shared.checkpoint import check_vocabulary, load
from shared.course import stages
from shared.peers import transformers_greedy
from shared.tokenizer import ByteTokenizer
from stage01_forward.numpy_gpt2 import gpt2

SIZES = {"vocab_size": 101, "n_positions": 48, "n_embd": 24, "n_layer": 2, "n_head": 3}
PROMPT = [5, 9, 2]


def save(folder: Path, **options: object) -> GPT2LMHeadModel:
    """A folder of transformers with random weights, and its model in float64."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=None, **options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return model.eval()


def answer(folder: Path) -> list[int]:
    """The greedy answer, the same of each stage's engine."""
    model, params = stages.load_model(load(str(folder))), stages.sampling_params()(max_tokens=40)
    engines = [make(model) for make in stages.engines().values()]
    first, *others = [engine.generate([PROMPT], params)[0].token_ids for engine in engines]
    assert all(other == first for other in others)
    return first


def test_an_end_outside_the_vocabulary_ends_nothing(tmp_path, caplog):
    """transformers saves GPT-2's 50256 for any small model made with default settings."""
    model = save(tmp_path)
    assert load(str(tmp_path)).config.eos_ids == ()
    assert "50256" in caplog.text and "only 101 tokens" in caplog.text
    assert answer(tmp_path) == transformers_greedy(model, PROMPT, 40)


@pytest.mark.parametrize("listed", [False, True])
def test_each_of_several_ends_ends_an_answer(tmp_path, listed):
    free = transformers_greedy(save(tmp_path / "free", eos_token_id=None), PROMPT, 40)
    ends = [free[10], free[4]]
    model = save(tmp_path, eos_token_id=100)
    model.generation_config.eos_token_id = ends if listed else ends[0]
    model.generation_config.save_pretrained(tmp_path)  # it comes before config.json's
    got = answer(tmp_path)
    assert got == transformers_greedy(model, PROMPT, 40) and got[-1] in ends and len(got) < 40


def test_an_end_that_the_tokenizer_does_not_share_is_the_models(tmp_path, caplog):
    save(tmp_path, eos_token_id=7)
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.eos_id = 101, 3
    check_vocabulary(tokenizer, load(str(tmp_path)).config)
    assert "with token 3 and the model" in caplog.text and "with 7" in caplog.text


@pytest.mark.parametrize("equal", [False, True])
def test_an_output_layer_of_its_own(tmp_path, equal):
    model = save(tmp_path, eos_token_id=None, tie_word_embeddings=False)
    if equal:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.transformer.wte.weight)
        model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert answer(tmp_path) == transformers_greedy(model, PROMPT, 40)
    loaded = load(str(tmp_path))
    assert loaded.config.parameter_count == sum(p.numel() for p in model.parameters())
    weights = {name: tensor.numpy() for name, tensor in loaded.tensors.items()}
    want = model(torch.tensor([PROMPT])).logits[0].detach().numpy()
    assert np.allclose(gpt2(PROMPT, weights, n_layer=2, n_head=3), want, rtol=0, atol=1e-9)
