"""Adapters: several in one batch, beside PEFT's own answers, on ranks, and what is refused."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import UserError
from shared.parity import random_prompt
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage04_continuous.tests.oracle import finish
from stage05_paged.blocks import BlockPool
from stage12_distributed import lora
from stage12_distributed.tensor.group import RankGroup, Setup, make
from stage12_distributed.tensor.shard import shards
from stage12_distributed.tests.parts import ODD, logits_of, random_model, stored, write_adapter

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
SHAPES = {name: part.shape for name, part in shards(random_model(ODD), 0, 1).items()}


def write(folder: Path, seed: int = 0, zero: bool = False, **fields: Any) -> Path:
    """An adapter for every layer of ODD."""
    return write_adapter(folder, SHAPES, seed, zero, **fields)


def group_of(folder: Path, ranks: int = 1) -> Any:
    """The caller must close it."""
    return closing(RankGroup(Setup(partial(random_model, ODD), ranks, adapters=str(folder))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "zero")):
        write(made / name, seed, zero=name == "zero")
    return made


@pytest.fixture(scope="module")
def group(folder):
    """One rank, with three adapters."""
    with group_of(folder) as made:
        yield made


def prompt(length: int) -> list[int]:
    return random_prompt(length, ODD, 0)


def engine_of(group: RankGroup, **options: Any) -> Any:
    return make(group.model, pool=BlockPool(80, 4), sanitize=True, **options)


def ask(engine: Any, name: str, length: int, sampling: SamplingParams = GREEDY) -> Request:
    names = engine.runner.ranks.model.adapters.names
    request = engine.add(Request(prompt(length), sampling))
    engine.scheduler.tables[request].salt = b"tenant" + names.get(name, b"")
    return request


def answers(engine: Any, asked: list[tuple[str, int, SamplingParams]]) -> list[Any]:
    """[(ids, log-probabilities)] of requests (adapter, length, sampling) that run together."""
    requests = [ask(engine, *each) for each in asked]
    finish(engine)
    return [(request.output.token_ids, request.output.logprobs) for request in requests]


ASKED = [
    (name, 5 + 6 * place, GREEDY if place % 3 else DRAWN)
    for place, name in enumerate(["one", "", "two", "one", "zero", "two", "", "two"])
]


def test_an_adapter_of_zeros_is_the_model_bit_for_bit(group):
    base, zero = (
        answers(engine_of(group), [(name, length, GREEDY) for length in (3, 17, 40)])
        for name in ("", "zero")
    )
    assert base == zero  # log-probabilities too, to the last bit


def test_several_adapters_in_one_batch_equal_each_alone(group):
    """Prompts in chunks, and decoding in mixed passes."""
    alone = [answers(engine_of(group), [each])[0][0] for each in ASKED]
    engine = engine_of(group, token_budget=24, max_sequences=8)
    together = [ids for ids, _ in answers(engine, ASKED)]
    assert together == alone
    assert max(record.rows for record in engine.steps) == len(ASKED)


def test_an_adapter_loaded_again_with_other_bytes_finds_nothing_stale(tmp_path):
    """vLLM #42125: the blocks of the old version answered for the new one."""
    mine = write(tmp_path / "mine")
    with group_of(tmp_path) as group:
        (early,) = answers(engine_of(group), [("mine", 13, GREEDY)])
        engine, adapters = engine_of(group), group.model.adapters
        (old,) = answers(engine, [("mine", 30, GREEDY)])
        running = ask(engine, "mine", 13)
        engine.step()
        before, hits = adapters.names["mine"], engine.scheduler.counts.hit_tokens
        adapters.load(mine)
        assert adapters.names["mine"] == before  # the same bytes: nothing new
        write(mine, seed=1)
        adapters.load(mine)
        assert adapters.names["mine"] != before
        (new,) = answers(engine, [("mine", 30, GREEDY)])
        assert engine.scheduler.counts.hit_tokens == hits
        assert running.output.token_ids == early[0]  # it began with the old version
        (want,) = answers(engine_of(group), [("mine", 30, GREEDY)])
        assert new[0] == want[0] != old[0]


def test_adapters_on_two_ranks(group, folder):
    """Every rank must get the numbers of the pass (atlas #1133: the slot never reached rank 1)."""
    with group_of(folder, ranks=2) as ranked:
        one, two = (answers(engine_of(each, max_sequences=8), ASKED) for each in (group, ranked))
        assert [ids for ids, _ in one] == [ids for ids, _ in two]


def logits_with(group: RankGroup, name: str, ids: list[int]) -> torch.Tensor:
    """Logits of a whole prompt with an adapter, next to a prompt without one."""
    runner, adapters = engine_of(group).runner, group.model.adapters
    adapters.batch.adapters = [lora.BASE, adapters.numbers[adapters.names[name]]]
    count = len(ids)
    shares = [([0, 1], 0, 7), (list(range(2, 2 - -count // 4 + 1)), 0, count)]
    return runner.run(prompt(7) + ids, shares, range(7, 7 + count))


def test_an_adapter_is_its_product_added_to_each_weight(group, folder):
    """Each layer gets its own: two of them are called c_proj. The scale is alpha by the rank."""
    model, saved = random_model(ODD), load_file(folder / "two" / lora.WEIGHTS)
    for layer in SHAPES:
        key = f"base_model.model.transformer.{layer}.lora_"
        a, b = (saved[f"{key}{matrix}.weight"].double() for matrix in "AB")
        model.get_submodule(layer).weight += 12 / 4 * b @ a
    ids = prompt(20)
    want = logits_of(model, ids)
    assert (logits_with(group, "two", ids) - want).abs().max() < 1e-9 * want.abs().max()


# ---- beside PEFT --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_logits_are_those_of_peft(tmp_path, family):
    """Every linear layer has an adapter, so both layers called c_proj have one."""
    why = "the reference for LoRA is in requirements-distributed.txt"
    peft = pytest.importorskip("peft", reason=why)
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": 101, "hidden_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "max_position_embeddings": 64, "eos_token_id": 1}
    if family == "gpt2":
        config = transformers.GPT2Config(**sizes)
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=40, num_key_value_heads=1)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config)
    for tensor in theirs.parameters():
        tensor.data += 0.05 * torch.randn_like(tensor)
    theirs.save_pretrained(tmp_path / "base")
    more = {"init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    more |= {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    tuned = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=10, **more))
    tuned.save_pretrained(tmp_path / "adapters" / "tuned")
    ids = prompt(23)
    with torch.inference_mode():
        want = tuned.double().eval()(torch.tensor([ids])).logits[0]
    load = partial(stored, str(tmp_path / "base"))
    with closing(RankGroup(Setup(load, 1, adapters=str(tmp_path / "adapters")))) as group:
        got = logits_with(group, "tuned", ids)
    assert (got - want).abs().max() < (1e-9 if family == "gpt2" else 1e-5)


# ---- what is refused ----------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora to True, which is not implemented"),
    ({"use_rslora": True}, "use_rslora to True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save to \['lm_head'\]"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights to pissa"),
    ({"lora_alpha": None}, "lora_alpha to None"),
    ({"lora_alpha": math.inf}, "lora_alpha to inf"),
    ({"r": 0}, "r to 0"),
    ({"base_model_name_or_path": "C:\\models\\odd-2\\"}, r"odd-2\\, not odd"),
    ({"r": 8}, r"is \(4, 24\) instead of \(8, 24\): the adapter is of another rank"),
]


@pytest.mark.parametrize("fields, message", BAD)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        lora.read(write(tmp_path / "bad", **fields), ODD, SHAPES)


def test_files_that_do_not_fit_are_refused(tmp_path):
    """Of another model, of a training that failed, or in another format."""
    bad, name = write(tmp_path / "bad"), "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight"
    other = {"h.0.attn.c_attn": (72, 24)}
    with pytest.raises(UserError, match="has no such layer"):
        lora.read(bad, ODD, other)
    save_file({name: torch.zeros(4, 24)}, bad / lora.WEIGHTS)
    with pytest.raises(UserError, match="one of two matrices for h.0.mlp.c_fc"):
        lora.read(bad, ODD, SHAPES)
    save_file({name: torch.full((4, 24), torch.nan)}, bad / lora.WEIGHTS)
    with pytest.raises(UserError, match="has NaN or infinite numbers"):
        lora.read(bad, ODD, SHAPES)
    (bad / lora.WEIGHTS).unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors: save the adapter as safet"):
        lora.read(bad, ODD, SHAPES)
    with pytest.raises(UserError, match="has no subfolder with an adapter"):
        group_of(bad)
